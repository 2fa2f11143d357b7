"""Features of decoding, and cases that hold every pair of their values.

A case has a value of every feature. Two features may harm each other although each works alone. So
the cases of `covering` are chosen such that every two values that the package accepts together
share a case. Each case compares the joint distribution of its texts with enumeration: the target,
called on one device for every text by itself, gives the probability of each.
"""

import dataclasses
import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from specsamp import (
    Adaptive,
    BlockRule,
    Confidence,
    CoupledRule,
    KSeqRule,
    RecursiveRule,
    TokenRule,
    TransformerConfig,
    TransformerLM,
    TraversalRule,
    TreeShape,
    bias,
    chain,
    generate,
    generate_many,
    greedy,
    penalties,
    stream,
    temperature,
    top_k,
    top_p,
)
from specsamp.decoding.method import make_method
from specsamp.mesh.layout import make_mesh
from specsamp.mesh.sharded import shard
from specsamp.models.config import ExpertsConfig
from specsamp.sampling.warp import log_probs
from support.drafters import DRAFTERS, LAYERS, OTHERS, SHAPE, Kind, ModelTree, twice, with_errors
from support.weights import drawn_params

V, LENGTH, STOP = 4, 3, 0
FAMILY = TreeShape((0, 0, 0, 1, 2))  # three siblings
CHAINS = "model parallel tokenizer window voting EAGLE-3 Medusa modules DSpark beam choices".split()
CHAINS += ["none", "early exit", "prompt lookup"]
TREES = ("model tree", "EAGLE-3 tree", "block tree", "three siblings")
SIBLINGS = Kind(twice, lambda pair: ModelTree(pair.draft, tree=FAMILY), (0, FAMILY.K))
DRAFTS = DRAFTERS | OTHERS | {"three siblings": SIBLINGS}
KINDS = {name: DRAFTS[name] for name in (*CHAINS, *TREES)}
STOPS = Confidence(0.3)
EXPERTS = ExpertsConfig(num_experts=4, experts_per_token=2, width=8, bias=True, limit=0.5)
GPT_OSS = dict(window=2, global_layers=(1,), attention_sinks=True, gated=True, experts=EXPERTS)
EARLY = bias({STOP: -np.inf}, until=2)
FEATURES = {
    "drafter": KINDS,
    "rule": {
        "token": TokenRule(),
        "block": BlockRule(),
        "coupled": CoupledRule(),
        "recursive": RecursiveRule(),
        "k-seq": KSeqRule(),
        "traversal": TraversalRule(),
    },
    "warp": {
        "none": chain(),
        "of rows": chain(temperature([0.7, 1.5]), top_p([1.0, 0.9])),
        "penalties": chain(penalties(1.4, 0.3, 0.4), bias({1: 0.8}), temperature(1.2)),
        "min_tokens": chain(EARLY, temperature(1.2)),
    },
    "draft": {"same warp": None, "own warp": chain(temperature(0.5), top_k(2)), "greedy": greedy()},
    "cache": {
        "whole": {},
        "int8": dict(cache_dtype="int8"),
        "windowed": dict(window=2, global_layers=(1,), ngram_rows=32),
        "sinks": GPT_OSS,
    },
    "prompts": {"alike": [[2, 1], [3, 1]], "ragged": [[0], [2, 0, 1, 1]]},
    "lengths": {"fixed": None, "stopped": "stop", "adaptive": "costs_ms"},
    "stop": {"none": [], "token": [STOP]},
    "entry": {"generate": generate, "stream": stream, "queue": generate_many},
    "mesh": {"one": None, "data": dict(data=2, model=1), "model": dict(data=1, model=2)},
}
NAMES = tuple(FEATURES)
OF_TREES = ("recursive", "k-seq", "traversal")


@dataclasses.dataclass(frozen=True)
class Case:
    """A value of every feature, by its name."""

    drafter: str = "model"
    rule: str = "token"
    warp: str = "none"
    draft: str = "same warp"
    cache: str = "whole"
    prompts: str = "alike"
    lengths: str = "fixed"
    stop: str = "none"
    entry: str = "generate"
    mesh: str = "one"

    def __str__(self):
        return ", ".join(dataclasses.astuple(self))

    def value(self, feature):
        return FEATURES[feature][getattr(self, feature)]

    @property
    def pairs(self):
        """Returns all pairs of (feature, value)."""
        return set(itertools.combinations(dataclasses.asdict(self).items(), 2))

    @property
    def target(self):
        """Returns the target on one device."""
        shape = dict(vocab_size=V, num_layers=LAYERS) | SHAPE | self.value("cache")
        return TransformerLM(TransformerConfig(**shape))

    def decoding(self):
        """Returns the pair and the keywords of `generate`."""
        pair = pair_of(self.drafter, self.cache, self.mesh)
        kind = self.value("drafter")
        drafter = kind.drafter(pair)
        options = dict(drafter=drafter, rule=self.value("rule"), sampling=self.value("warp"))
        if self.value("draft") is not None:
            options["draft_sampling"] = self.value("draft")
        if self.lengths == "stopped":
            options["draft_length"] = Adaptive(lengths=(drafter.K,), stop=STOPS)
        if self.lengths == "adaptive":
            costs = tuple(1 + 0.1 * length for length in kind.lengths)
            options["draft_length"] = Adaptive(
                lengths=kind.lengths, costs_ms=costs, pause=1, trust=0.1, decay=0.5, margin=0
            )
        return pair, options

    def refusal(self):
        """Returns the package's reason to refuse the case, or None, without compilation."""
        try:
            pair, options = self.decoding()
            make_method(pair, **options)
        except ValueError as error:
            return str(error)
        return None

    def texts(self, samples, seed):
        """Returns ``[prompts, samples, LENGTH]`` tokens; a shorter text is padded with ``STOP``."""
        pair, options = self.decoding()
        prompts = self.value("prompts")
        has_rows = self.entry == "queue"
        found = self.value("entry")(
            pair,
            prompts,
            LENGTH,
            num_samples=samples,
            seed=seed,
            stop=self.value("stop"),
            **(dict(rows=min(256, samples)) if has_rows else {}),
            **options,
        )
        texts_BST = np.full((len(prompts), samples, LENGTH), STOP)
        filled_BS = np.zeros((len(prompts), samples), int)
        for one in found:
            place = one.prompt_index, one.sample_index
            first = filled_BS[place]
            texts_BST[place][first : first + len(one.tokens)] = one.tokens
            filled_BS[place] += len(one.tokens)
        return texts_BST

    def expected(self):
        """Returns the distribution of each prompt's text, ``[V] * LENGTH``, by enumeration."""
        return [
            enumerated(self.cache, self.warp, index, tuple(prompt), self.stop)
            for index, prompt in enumerate(self.value("prompts"))
        ]


@functools.cache
def pair_of(drafter, cache, mesh):
    """Returns the pair of these values, sharded unless ``mesh`` is "one"."""
    target = Case(cache=cache).target
    pair = dataclasses.replace(
        with_errors(KINDS[drafter].pair(target)), target_params=drawn_params(target)
    )
    axes = FEATURES["mesh"][mesh]
    if axes is None:
        return pair
    return shard(pair, make_mesh(**axes, devices=jax.devices()[:2]))


@functools.cache
def enumerated(cache, warp, index, prompt, stop):
    """Returns the distribution of the text after a prompt, the ``index``-th of a call."""
    case = Case(cache=cache, warp=warp)
    sampling = jax.tree.map(
        lambda x: x[index : index + 1] if np.shape(x) == (2,) else x, case.value("warp")
    )
    texts = list(itertools.product(range(V), repeat=LENGTH))
    tokens_NT = np.array([[*prompt, *text] for text in texts], np.int32)
    weights = case.target.prepare(drawn_params(case.target))
    # [N, LENGTH, V]: for each text, the distribution of each token after the tokens before it.
    probs = np.exp(np.asarray(each_token(case.target, weights, sampling, tokens_NT), np.float64))
    probs /= probs.sum(-1, keepdims=True)
    joint = np.ones(len(texts))
    for place in range(LENGTH):
        for number, text in enumerate(texts):
            is_over = stop == "token" and STOP in text[:place]  # then the stop token is repeated
            joint[number] *= text[place] == STOP if is_over else probs[number, place, text[place]]
    return joint.reshape((V,) * LENGTH)


@functools.partial(jax.jit, static_argnums=0)
def each_token(model, weights, sampling, tokens_NT):
    """Returns log-probabilities at the last ``LENGTH`` tokens of each text, by one call."""
    count, end = tokens_NT.shape
    start = end - LENGTH
    cache = model.init_cache(count, 128)
    logits_NTV = model(weights, tokens_NT, jnp.zeros(count, jnp.int32), cache).logits_BTV
    state = sampling.init(tokens_NT[:, :start], jnp.full(count, start), V)
    rows = []
    for place in range(start, end):
        rows.append(log_probs(sampling, logits_NTV[:, place - 1], state))
        state = sampling.advance(state, tokens_NT[:, place])
    return jnp.stack(rows, axis=1)


def p_value(texts_ST, distribution):
    """Returns the p-value of the texts by Pearson's statistic; unlikely texts are one cell."""
    cells = np.ravel_multi_index(texts_ST.T, distribution.shape)
    observed = np.bincount(cells, minlength=distribution.size)
    expected = distribution.ravel() * len(texts_ST)
    if observed[distribution.ravel() == 0].any():
        return 0.0
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    possible = expected > 1e-3
    terms = (observed - expected)[possible] ** 2 / expected[possible]
    return scipy.stats.chi2.sf(terms.sum(), max(possible.sum() - 1, 1))


def default_for(chosen):
    """Returns a case with the chosen values, whose drafter and rule fit if neither is chosen."""
    if chosen.get("drafter") in TREES and "rule" not in chosen:
        return Case(**chosen, rule="recursive")
    if chosen.get("rule") in OF_TREES and "drafter" not in chosen:
        return Case(**chosen, drafter="model tree")
    return Case(**chosen)


def all_pairs():
    """Returns every pair of values of different features."""
    return [
        ((one, value), (other, second))
        for one, other in itertools.combinations(NAMES, 2)
        for value in FEATURES[one]
        for second in FEATURES[other]
    ]


@functools.cache
def refused():
    """Returns the pairs that the package refuses, with its reasons."""
    reasons = {pair: default_for(dict(pair)).refusal() for pair in all_pairs()}
    return {pair: reason for pair, reason in reasons.items() if reason is not None}


@functools.cache
def covering(seed=3):
    """Returns cases that together hold every pair that is not refused."""
    draw = random.Random(seed)
    missing = set(all_pairs()) - refused().keys()
    cases = []
    while missing:
        candidates = [candidate(draw, missing) for _ in range(12)]
        candidates.sort(key=lambda case: len(case.pairs & missing), reverse=True)
        best = next(case for case in candidates if case.refusal() is None)
        cases.append(best)
        missing -= best.pairs
    return cases


def candidate(draw, missing):
    """Returns a case with a missing pair, and greedily with further missing pairs."""
    first = draw.choice(sorted(missing))
    chosen = dict(first)
    order = [name for name in NAMES if name not in chosen]
    draw.shuffle(order)
    for name in order:
        values = [
            value
            for value in FEATURES[name]
            if not any(ordered((name, value), other) in refused() for other in chosen.items())
        ]
        draw.shuffle(values)
        chosen[name] = max(
            values,
            key=lambda value: sum(
                ordered((name, value), other) in missing for other in chosen.items()
            ),
        )
    return Case(**chosen)


def ordered(one, other):
    """Returns the two values in the order of their features."""
    return (one, other) if NAMES.index(one[0]) < NAMES.index(other[0]) else (other, one)
