"""Table models and exact distributions: small enough to enumerate, and sensitive to cache bugs."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from scipy.special import log_softmax

from specsamp import Loop, Pair
from specsamp.decoding.state import RequestBatch, Weights
from specsamp.models.interface import LanguageModel, LayeredModel, Output
from specsamp.models.slots import cut_slots, move_slots
from specsamp.models.visibility import ancestor_slots
from specsamp.sampling.warp import for_rows, log_probs
from support.byte_tokenizer import ByteTokenizer
from support.enumeration import autoregressive

ORDER = 3  # tokens of context
BYTES = 257  # the vocabulary of a ByteTokenizer
COMPILED = collections.Counter()  # programs that were compiled in this process, by name


def count_compilation(event, seconds, *, fun_name="", **_):
    COMPILED[fun_name] += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(count_compilation)


def compiled_programs():
    """Returns the numbers of compiled programs of the loop and of prefill."""
    return COMPILED["jit(_run)"], COMPILED["jit(prefill)"]


@dataclasses.dataclass(frozen=True)
class TableLM(LanguageModel):
    """Looks logits up by the last three tokens; tokens before the current call are in the cache.

    Weights are a table ``[V+1, V+1, V+1, V]``; index V stands for "before the text".
    """

    vocab_size: int
    max_positions: int | None = None

    takes_trees = True

    def init_cache(self, batch, slots):
        return jnp.zeros((batch, slots), jnp.int32)

    def __call__(self, weights, tokens_BT, start_B, cache, *, hidden_layers=(), block=None):
        def write(row, new, start):
            return jax.lax.dynamic_update_slice(row, new, (start,))

        cache = jax.vmap(write)(cache, tokens_BT, start_B)
        positions_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1])[None, :]
        slots_BTN = None if block is None else ancestor_slots(block, ORDER)
        context = []
        for back in range(ORDER - 1, -1, -1):
            at_BT = positions_BT - back if block is None else slots_BTN[..., ORDER - 1 - back]
            seen_BT = jnp.take_along_axis(cache, jnp.maximum(at_BT, 0), axis=1)
            context.append(jnp.where(at_BT >= 0, seen_BT, self.vocab_size))
        return Output(logits_BTV=weights[tuple(context)], cache=cache)

    def compact(self, cache, start_B, rows_BT, num_rows):
        return move_slots(cache, start_B, rows_BT, num_rows, axis=1)

    def cut_cache(self, cache, num_kept, first_B, count, room):
        return cut_slots(cache, num_kept, first_B, count, room, axis=1)


@dataclasses.dataclass(frozen=True)
class LayeredTableLM(LayeredModel):
    """A stack of table models: each layer adds logits from its own table and cache.

    Weights are ``[layers, V+1, V+1, V+1, V]``; the stream holds tokens and logits. A layer's cache
    has the tokens that this layer was run for, so that an early exit writes only its own layers.
    """

    vocab_size: int
    num_layers: int = 2
    max_positions: int | None = None

    takes_trees = True

    @property
    def width(self):
        return self.vocab_size + 1

    def first(self, num_layers):
        return dataclasses.replace(self, num_layers=num_layers)

    def init_cache(self, batch, slots):
        return tuple(
            TableLM(self.vocab_size).init_cache(batch, slots) for _ in range(self.num_layers)
        )

    def embed(self, weights, tokens_BT, start_B, cache, *, block=None):
        tokens_BT1 = tokens_BT[..., None].astype(jnp.float32)
        return jnp.pad(tokens_BT1, ((0, 0), (0, 0), (0, self.vocab_size))), cache

    def layers(self, weights, x_BTD, start_B, cache, first, last, *, hidden_layers=(), block=None):
        tokens_BT = x_BTD[..., 0].astype(jnp.int32)
        caches = list(cache)
        hidden = {}
        for i in range(first, last):
            output = TableLM(self.vocab_size)(
                weights[i], tokens_BT, start_B, caches[i], block=block
            )
            x_BTD, caches[i] = x_BTD.at[..., 1:].add(output.logits_BTV), output.cache
            hidden[i] = x_BTD
        return x_BTD, tuple(caches), tuple(hidden[i] for i in hidden_layers)

    def unembed(self, weights, x_BTD):
        return x_BTD[..., 1:]

    def compact(self, cache, start_B, rows_BT, num_rows):
        return tuple(
            TableLM(self.vocab_size).compact(layer, start_B, rows_BT, num_rows) for layer in cache
        )


def random_table(seed, vocab_size, scale=1.0):
    shape = (vocab_size + 1,) * ORDER + (vocab_size,)
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


def near(table, seed, scale):
    """Returns a table close to this one: a good draft."""
    return table + scale * jnp.asarray(
        np.random.default_rng(seed).normal(size=table.shape), jnp.float32
    )


def prefix_tables(table, warp, prompt, depth, penalised=None):
    """Returns the distributions of a `TableLM` after every continuation of ``prompt`` shorter than
    ``depth``.

    Args:
      penalised: a function of logits ``[V]``, prompt and text, whose result is warped; for warps
        with a state.

    Returns:
      Tables as in support.enumeration, of one scenario.
    """
    vocab_size, logits = table.shape[-1], np.asarray(table)
    texts = [list(itertools.product(range(vocab_size), repeat=length)) for length in range(depth)]

    def row(text):
        context_V = logits[tuple(([vocab_size] * ORDER + [*prompt, *text])[-ORDER:])]
        return (
            context_V
            if penalised is None
            else penalised(context_V.astype(np.float64), prompt, text)
        )

    rows = np.float32([row(text) for of_length in texts for text in of_length])
    tables = log_softmax(np.asarray(log_probs(warp, rows), np.float64), -1)[None]
    return np.split(tables, np.cumsum([len(of_length) for of_length in texts])[:-1], axis=1)


def joint_distribution(table, warp, prompt, length, penalised=None):
    """Returns the distribution of the next ``length`` tokens, ``[V] * length`` float64, by
    enumeration; see `prefix_tables`.
    """
    joint = autoregressive(prefix_tables(table, warp, prompt, length, penalised), length)
    return joint.reshape((table.shape[-1],) * length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run on table models; its rows are prompt-major."""

    state: object
    prompt_lengths: np.ndarray

    def emitted(self, length):
        """Returns the first ``length`` emitted tokens of each row."""
        tokens = np.asarray(self.state.tokens_BS)
        return np.take_along_axis(
            tokens, self.prompt_lengths[:, None] + np.arange(length)[None, :], axis=1
        )


def prefill(
    loop,
    target,
    draft,
    prompts,
    budgets,
    sampling,
    *,
    draft_sampling=None,
    samples=1,
    seed=0,
    stop_ids=(-1,),
    prompt_ids=None,
    padded_length=None,
    slots=None,
):
    """Returns the state of ``loop`` after prefill of these prompts, as `generate` would make it."""
    lengths = np.array([len(p) for p in prompts], np.int32)
    budgets = np.broadcast_to(np.asarray(budgets, np.int32), lengths.shape)
    padded = np.full((len(prompts), padded_length or lengths.max()), 1, np.int32)
    for row, prompt in zip(padded, prompts):
        row[: len(prompt)] = prompt

    def repeat(x):
        return np.repeat(np.asarray(x, np.int32), samples)

    def warps(warp):
        return jax.tree.map(lambda x: np.repeat(x, samples, axis=0), for_rows(warp, len(prompts)))

    request = RequestBatch.create(
        sampling=warps(sampling),
        draft_sampling=None if draft_sampling is None else warps(draft_sampling),
        limits=repeat(lengths + budgets),
        seed=seed,
        prompt_ids=repeat(range(len(prompts)) if prompt_ids is None else prompt_ids),
        sample_ids=np.tile(np.arange(samples), len(prompts)),
        stop_ids=stop_ids,
    )
    slots = slots or max(int((lengths + budgets).max()) + loop.headroom, padded.shape[1])
    weights = Weights(target=target, draft=draft)
    return loop.prefill(
        weights,
        request,
        jnp.asarray(padded),
        jnp.asarray(lengths),
        slots=slots,
        num_samples=samples,
    )


def decode(
    loop,
    target,
    draft,
    prompts,
    budgets,
    sampling,
    *,
    samples=1,
    slice_rounds=2**30,
    adaptive=None,
    **options,
):
    """Runs ``loop`` until no row is running; ``options`` as of `prefill`."""
    if adaptive is not None:
        loop = dataclasses.replace(loop, adaptive=adaptive.for_batch(len(prompts) * samples))
    state = prefill(loop, target, draft, prompts, budgets, sampling, samples=samples, **options)
    while True:
        state = loop.run(Weights(target=target, draft=draft), state, slice_rounds)
        if not bool(jnp.any(state.running_B)):
            return Run(
                state=state, prompt_lengths=np.repeat([len(prompt) for prompt in prompts], samples)
            )


def texts(state):
    """Returns the tokens of each row, with its prompt."""
    return [
        row[:length].tolist()
        for row, length in zip(np.asarray(state.tokens_BS), np.asarray(state.lengths_B))
    ]


def table_loop(rule, drafter, vocab_size=3, loop=Loop, **options):
    return loop(target=TableLM(vocab_size), drafter=drafter, rule=rule, **options)


def chi_square(samples, distribution):
    """Returns Pearson's statistic of ``samples [N, L]`` against a joint distribution, and its
    degrees of freedom.
    """
    cells = np.ravel_multi_index(samples.T, distribution.shape)
    observed = np.bincount(cells, minlength=distribution.size)
    expected = distribution.ravel() * len(samples)
    possible = expected > 0
    if observed[~possible].any():
        return np.inf, 1
    assert expected[possible].min() > 4, "cells too thin for Pearson's statistic: draw more"
    statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    return statistic, possible.sum() - 1


FALSE_ALARM = 1e-5
# At this value, the mistakes of test_mutants.py are far out; 0.01 would take nine times the
# samples.
DETECTED_TV = 0.03
POWER = 0.99


def power(degrees, samples, groups):
    """Returns the probability that a TV error of `DETECTED_TV` in one of ``groups`` tests shows."""
    shift = 4 * DETECTED_TV**2 * samples  # a TV error e moves the statistic by at least 4 e^2 N
    return scipy.stats.ncx2.sf(scipy.stats.chi2.isf(FALSE_ALARM / groups, degrees), degrees, shift)


@functools.cache
def samples_for(degrees, groups):
    """Returns the fewest samples, in steps of a thousand, that give `p_value` its power."""
    return next(n for n in itertools.count(1_000, 1_000) if power(degrees, n, groups) > POWER)


def p_value(groups, powered=True):
    """Returns the p-value of the worst of several (samples, distribution), corrected for their
    number.

    Unless ``powered`` is false, checks that a TV error of `DETECTED_TV` in one of them would show.
    """
    worst = 1.0
    for samples, distribution in groups:
        statistic, degrees = chi_square(samples, distribution)
        seen = power(degrees, len(samples), len(groups))
        assert seen > POWER or not powered, f"power {seen} at TV {DETECTED_TV}: draw more"
        worst = min(worst, scipy.stats.chi2.sf(statistic, degrees))
    return min(worst * len(groups), 1.0)


@dataclasses.dataclass(frozen=True)
class CountingLM(LanguageModel):
    """Writes the successor of its last token, a -> b -> c ..., without randomness."""

    vocab_size: int = BYTES
    max_positions: int | None = 64
    stumbles_at: int = -1  # the token whose successor it predicts wrongly

    def init_cache(self, batch, slots):
        return jnp.zeros((batch, 1))

    def __call__(self, weights, tokens_BT, start_B, cache, *, hidden_layers=()):
        step = jnp.where(tokens_BT == self.stumbles_at, 2, 1)
        logits_BTV = 20.0 * jax.nn.one_hot((tokens_BT + step) % self.vocab_size, self.vocab_size)
        return Output(logits_BTV=logits_BTV, cache=cache)


def counting_pair(**draft):
    return Pair(
        target=CountingLM(),
        target_params=(),
        draft=CountingLM(**draft),
        draft_params=(),
        tokenizer=ByteTokenizer(),
    )


def table_pair(vocab_size=12, noise=0.5, max_positions=None, **options):
    table = random_table(3, vocab_size)
    model = TableLM(vocab_size, max_positions)
    draft_params = near(table, 4, noise)
    return Pair(
        target=model, target_params=table, draft=model, draft_params=draft_params, **options
    )
