"""Checks that a head fits its target and is read as it was trained, since wrong features cost speed and nothing else.

    found = check_head(pair, write_texts(pair, ["def fibonacci(n):"]))
    print("\\n".join(found.sentences))

The target and the head read a few texts (teacher forcing). After every pair of tokens the first drafted token is accepted
with probability ``sum_x min(q(x), p(x))`` of the target's distribution q and the head's p. This is measured as the head is
configured, and for each other plausible reading of its files: the layers before or after the configured layers, the
readings that its configuration names (`HeadConfig.other_readings`), and other ids of a reduced vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.decoding.data_shards import BY_ROWS, REPLICATED, DataShards
from specsamp.decoding.drafters.feature import FeatureDrafter
from specsamp.decoding.engine import to_host
from specsamp.decoding.generate import generate
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import Prompt, encode
from specsamp.decoding.state import Weights
from specsamp.decoding.whole_texts import read_texts
from specsamp.evaluation.audit.readers import first_logits
from specsamp.models.heads import DRAFT_IDS, FeatureHead
from specsamp.models.interface import LayeredModel
from specsamp.sampling.warp import Warp, chain, for_rows, log_probs, temperature

Array = jax.Array

CONFIGURED = "as configured"
# Another reading is clearly better if its mean acceptance is higher by this much, and by so many standard errors.
CLEAR_GAIN, CLEAR_ERRORS = 0.05, 4.0
CHECKED_TEXTS, CHECKED_TOKENS = 4, 64  # read by `warn_unless_it_fits`
EXAMPLES = (
    "The steam engine was improved by James Watt, whose separate condenser kept the cylinder hot. It soon drove mills,",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / len(values)\n",
    "In a large bowl, mix the flour and the salt. Then add the water, a little at a time, and knead the dough until it",
)
LOW = 0.2  # acceptance; heads that fit have more than a half


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Reading:
    """The acceptance under one way to read a head.

    Attributes:
      name: the difference from the configured reading.
      hidden_layers: the target's layers that are read, as in `HeadConfig`.
      acceptance_N: float32, of the first drafted token after each pair of tokens.
    """

    name: str
    hidden_layers: tuple[int, ...]
    acceptance_N: np.ndarray

    @property
    def acceptance(self) -> float:
        """Returns the mean acceptance."""
        return float(self.acceptance_N.mean(dtype=np.float64))

    def is_clearly_better(self, other: Reading) -> bool:
        """Returns whether its gain over another reading of the same texts is larger than noise."""
        gain_N = self.acceptance_N - other.acceptance_N
        return bool(gain_N.mean() > max(CLEAR_GAIN, CLEAR_ERRORS * gain_N.std() / np.sqrt(len(gain_N))))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class HeadCheck:
    """Findings of `check_head`; the configured reading comes first."""

    readings: tuple[Reading, ...]

    @property
    def better(self) -> Reading | None:
        """Returns the best other reading that fits and is clearly better, or None."""
        configured, *others = self.readings
        clear = [reading for reading in others if reading.acceptance >= LOW and reading.is_clearly_better(configured)]
        return max(clear, key=lambda reading: reading.acceptance, default=None)

    @property
    def fits(self) -> bool:
        """Returns whether the head's acceptance is at least `LOW` and no other reading is clearly better."""
        return self.better is None and self.readings[0].acceptance >= LOW

    @property
    def sentences(self) -> list[str]:
        """Returns the findings for a user: the acceptance, and warnings in capitals."""
        configured, better = self.readings[0], self.better
        found = [
            f"{configured.acceptance:.0%} of the head's first tokens are accepted "
            f"({len(configured.acceptance_N)} drafts, teacher-forced)"
        ]
        if configured.acceptance < LOW:
            found.append(
                f"WARNING: THE HEAD DOES NOT FIT: {configured.acceptance:.0%} of its first tokens are accepted, where "
                "heads that fit have more than half. Was it trained for this very target (a tuned model differs from its "
                "base), and on prompts like these (with the chat template)?"
            )
        if better is not None:
            found.append(
                f"WARNING: THE HEAD IS READ WRONGLY: with {better.name} {better.acceptance:.0%} are accepted: correct "
                "its config.json"
            )
        return found


def check_head(
    pair: Pair, texts: Sequence[Sequence[int]], *, sampling: Warp | None = None, others: bool = True
) -> HeadCheck:
    """Measures the acceptance of a pair's head under each way to read it.

    Args:
      pair: a pair with a head.
      texts: token ids, such as `write_texts` returns; texts of a single token are left out.
      sampling: the warp of both distributions; default: temperature 1.
      others: whether to measure other readings, which takes more programs.

    Raises:
      ValueError: the pair has no head, or all texts are too short.
    """
    if pair.head is None:
        raise ValueError("the pair has no head that could be checked")
    texts = [text for text in texts if len(text) > 1]
    if not texts:
        raise ValueError("all texts are shorter than 2 tokens, after which a head drafts first: give longer texts")
    warp = pair.full_warp(chain(temperature(1.0)) if sampling is None else sampling)
    ways = {CONFIGURED: _Way(pair.head, pair.head.hidden_layers, pair.draft_params)}
    ways |= _other_ways(pair.head, pair.draft_params) if others else {}
    layers = tuple(sorted({layer for way in ways.values() for layer in way.hidden_layers}))

    def read(weights: Weights, slots: int, tokens_BT: Array, *_: Any) -> dict[str, Array]:
        logits_BTV, hidden = _read_target(pair.target, pair.shards, weights.target, tokens_BT, layers, slots)
        found = {}
        for name, way in ways.items():
            prepared = weights.draft if name == CONFIGURED else way.head.fit_slots(way.head.prepare(way.params), slots)
            found[name] = first_acceptance(
                pair.target,
                way.head,
                pair.shards,
                Weights(target=weights.target, draft=prepared),
                tuple(hidden[layers.index(layer)] for layer in way.hidden_layers),
                logits_BTV,
                tokens_BT,
                for_rows(warp, len(tokens_BT)),
                slots=slots,
            )
        return found

    rows = read_texts(pair, FeatureDrafter(pair.target, pair.head, 1), texts, read)
    return HeadCheck(
        readings=tuple(
            Reading(
                name=name,
                hidden_layers=way.hidden_layers,
                acceptance_N=np.concatenate([row[name][: len(text) - 1] for row, text in zip(rows, texts)]),
            )
            for name, way in ways.items()
        )
    )


def warn_unless_it_fits(pair: Pair, texts: Sequence[Prompt] = EXAMPLES) -> None:
    """Warns if the head's acceptance on a few sample texts is below `LOW`.

    Other readings of its files are measured only then.
    """
    tokens = [text[:CHECKED_TOKENS] for text in encode(pair, texts[:CHECKED_TEXTS])]
    if max(map(len, tokens)) > 1 and not check_head(pair, tokens, others=False).fits:
        warnings.warn("\n".join(check_head(pair, tokens).sentences), stacklevel=3)


def write_texts(
    pair: Pair, prompts: Sequence[Prompt], *, tokens: int = 32, sampling: Warp | None = None, seed: int = 0
) -> list[list[int]]:
    """Returns prompts with the target's own completions, as token ids."""
    sampling = chain(temperature(1.0)) if sampling is None else sampling
    completions = generate(pair, prompts, tokens, draft_length=0, sampling=sampling, seed=seed)
    return [
        [*prompt, *completion.tokens] for prompt, completion in zip(encode(pair, prompts), completions, strict=True)
    ]


class _Way(NamedTuple):
    """A way to read a head; the head's own ``hidden_layers`` are ignored, so that ways share a program."""

    head: FeatureHead
    hidden_layers: tuple[int, ...]
    params: Any


def _other_ways(head: FeatureHead, params: Mapping[str, Any]) -> dict[str, _Way]:
    """Returns other ways to read a head's files, each by a name for messages."""
    config, ways = head.config, {}
    for shift, name in ((-1, "the layers before"), (1, "the layers after")):
        layers = tuple(layer + shift for layer in config.hidden_layers)
        if all(0 <= layer <= config.target_layers for layer in layers):
            ways[f"{name} the configured layers, {layers}"] = _Way(head, layers, params)
    for name, (fields, places) in config.other_readings().items():
        other = dataclasses.replace(head, config=dataclasses.replace(config, **fields))
        other_params = {key: params[places.get(key, key)] for key in params if places.get(key, key) is not None}
        ways[name] = _Way(other, config.hidden_layers, other_params)
    if config.draft_vocab_size is not None:
        own_U = np.arange(config.draft_vocab_size, dtype=np.int32)
        ids_U = np.asarray(to_host(params[DRAFT_IDS]))
        for name, other_U in (("the offsets d2t ignored", own_U), ("d2t as ids instead of offsets", ids_U - own_U)):
            if other_U.min() >= 0 and len(set(other_U.tolist())) == len(own_U) and (other_U != ids_U).any():
                ids = jax.device_put(jnp.asarray(other_U), params[DRAFT_IDS].sharding)
                ways[name] = _Way(head, config.hidden_layers, dict(params) | {DRAFT_IDS: ids})
    return ways


@functools.partial(jax.jit, static_argnames=("target", "shards", "layers", "slots"))
def _read_target(
    target: LayeredModel, shards: DataShards, weights: Any, tokens_BT: Array, layers: tuple[int, ...], slots: int
) -> tuple[Array, tuple[Array, ...]]:
    """Returns the target's logits after every token, and the outputs of its ``layers``."""

    def read(weights, tokens_BT):
        batch = len(tokens_BT)
        start_B, cache = jnp.zeros((batch,), jnp.int32), target.init_cache(batch, slots)
        output = target(weights, tokens_BT, start_B, cache, hidden_layers=layers)
        return output.logits_BTV.astype(jnp.float32), output.hidden

    return shards.map(read, (REPLICATED, BY_ROWS))(weights, tokens_BT)


@functools.partial(jax.jit, static_argnames=("target", "head", "shards", "slots"))
def first_acceptance(
    target: LayeredModel,
    head: FeatureHead,
    shards: DataShards,
    weights: Weights,
    hidden: tuple[Array, ...],
    logits_BTV: Array,
    tokens_BT: Array,
    warp: Warp,
    *,
    slots: int,
) -> Array:
    """Returns the acceptance ``[B, T-1]`` of the first token that is drafted after each pair of tokens."""

    def read(weights, hidden, logits_BTV, tokens_BT, warp):
        cache = target.init_cache(len(tokens_BT), slots), head.init_cache(len(tokens_BT), slots)
        drafted_BNV = first_logits(target, head, weights, tokens_BT, hidden, cache)
        distributions = (jnp.exp(log_probs(warp, x_BNV)) for x_BNV in (drafted_BNV, logits_BTV[:, 1:]))
        return jnp.minimum(*distributions).sum(-1)

    specs = (REPLICATED, BY_ROWS, BY_ROWS, BY_ROWS, BY_ROWS)
    return shards.map(read, specs)(weights, hidden, logits_BTV, tokens_BT, warp)
