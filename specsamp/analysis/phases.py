"""The phases of a round, as programs that can be timed one by one.

Each phase of `Loop.round` runs n times inside one `lax.fori_loop`, so that the cost of dispatching a program does not
count. All phases have the same signature: they take `RoundBuffers`, which hold everything that passes between the phases
of a round, and return them with their own result replaced. The buffers are donated from call to call, so caches are
written in place.

Two things make sure that every iteration does the work (`specsamp.analysis.split` checks it):

* The buffers pass an `optimization_barrier` in every iteration. Nothing that depends on them can be moved out of the
  loop, and every result is stored in them, so nothing can be left out.
* Lengths are restored after a commit, so every iteration does the same work and no cache overflows.

Tokens are drawn inside the drafter, between two calls of its model. The time of drawing is the difference between drafting
with the real sampler, `draft`, and with one that reads a single logit, `draft_model`. The commit alone is so small a loop
that XLA's CPU backend compiles it into one function; in a round each of its kernels is dispatched, and that time is part
of what stays unexplained.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.decoding.data_shards import BY_ROWS, REPLICATED
from specsamp.decoding.drafter import Prefix
from specsamp.decoding.loop import Loop
from specsamp.decoding.sampler import Sampler
from specsamp.decoding.state import DecodeState, Request, Weights
from specsamp.models import compiling
from specsamp.models.int8 import Int8Blocks, Int8Weight, is_int8
from specsamp.models.interface import LanguageModel, Output
from specsamp.models.products import contract
from specsamp.sampling.rng import RoundKeys
from specsamp.sampling.rules import Draft, Verdict
from specsamp.sampling.warp import chain

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundBuffers:
    """Everything that passes between the phases of one round."""

    state: DecodeState
    draft: Draft
    logits_BTV: Array  # float32 [B, K+1, V], of the target
    verdict: Verdict
    hidden: tuple[Array, ...] = ()  # of the target, for drafters that read them
    sink: Any = None  # results that no later phase reads


Phase = Callable[[Loop, Weights, Request, RoundBuffers], RoundBuffers]


def first_buffers(loop: Loop, weights: Weights, request: Request, state: DecodeState) -> RoundBuffers:
    """Runs one round, except for the commit, on a state whose rows are running; keeps what it made.

    ``state`` is donated.
    """
    return _first_buffers(loop, weights, request, dataclasses.replace(state, request=None))


@functools.partial(jax.jit, static_argnames="loop", donate_argnames="state")
def _first_buffers(loop: Loop, weights: Weights, request: Request, state: DecodeState) -> RoundBuffers:
    specs = (REPLICATED, BY_ROWS, BY_ROWS)
    return loop.shards.map(functools.partial(_buffers, loop), specs)(weights, request, state)


def _buffers(loop: Loop, weights: Weights, request: Request, state: DecodeState) -> RoundBuffers:
    proposed, drafter_state, cache = loop.draft(weights, request, state)
    output = loop.score(weights, state, proposed, cache)
    verdict = loop.verify(request, state, proposed, output)
    state = dataclasses.replace(state, cache=output.cache, drafter_state=drafter_state)
    return RoundBuffers(
        state=state,
        draft=proposed,
        logits_BTV=output.logits_BTV,
        verdict=verdict,
        hidden=output.hidden,
        sink=state.lengths_B,
    )


def draft(loop: Loop, weights: Weights, request: Request, buffers: RoundBuffers) -> RoundBuffers:
    """Runs the drafter: calls of its model, warps and draws."""
    result, drafter_state, cache = loop.draft(weights, request, buffers.state)
    return _replace(buffers, draft=result, cache=cache, drafter_state=drafter_state)


def draft_model(loop: Loop, weights: Weights, request: Request, buffers: RoundBuffers) -> RoundBuffers:
    """Runs the drafter without its sampler."""
    state = buffers.state
    keys = RoundKeys(rows_B=request.row_keys_B, starts_B=state.lengths_B)
    sampler = _ReadsOneLogit(warp=chain(), rule=loop.rule, keys=keys)
    result, drafter_state, cache = loop.drafter.propose(
        weights, state.drafter_state, _prefix(state), state.cache, sampler
    )
    last_B = result.tokens_BK[:, -1] if result.tokens_BK.shape[1] else result.num_drafted_B
    return _replace(buffers, cache=cache, drafter_state=drafter_state, sink=last_B)


def score(loop: Loop, weights: Weights, request: Request, buffers: RoundBuffers) -> RoundBuffers:
    """Runs the call of the target."""
    output = loop.score(weights, buffers.state, buffers.draft, buffers.state.cache)
    return _replace(buffers, cache=output.cache, logits_BTV=output.logits_BTV, hidden=output.hidden)


def verify(loop: Loop, weights: Weights, request: Request, buffers: RoundBuffers) -> RoundBuffers:
    """Warps the target's logits and applies the rule."""
    output = Output(logits_BTV=buffers.logits_BTV, cache=buffers.state.cache)
    return _replace(buffers, verdict=loop.verify(request, buffers.state, buffers.draft, output))


def commit(loop: Loop, weights: Weights, request: Request, buffers: RoundBuffers) -> RoundBuffers:
    """Runs the bookkeeping: tokens, lengths, stops, statistics."""
    state = buffers.state
    output = Output(logits_BTV=buffers.logits_BTV, cache=state.cache, hidden=buffers.hidden)
    drafter_state, cache = loop.drafter.commit(
        weights, state.drafter_state, _prefix(state), buffers.draft, buffers.verdict, output, state.cache
    )
    state = dataclasses.replace(state, cache=cache, drafter_state=drafter_state)
    return _stand_still(buffers, loop.commit(request, state, buffers.draft, buffers.verdict, output))


def whole_round(loop: Loop, weights: Weights, request: Request, buffers: RoundBuffers) -> RoundBuffers:
    """Runs a whole round, as the loop compiles it."""
    return _stand_still(buffers, loop.round(weights, request, buffers.state))


def _stand_still(buffers: RoundBuffers, state: DecodeState) -> RoundBuffers:
    """Keeps a committed state, except for its lengths and ends."""
    before = buffers.state
    still = dataclasses.replace(state, lengths_B=before.lengths_B, finish_B=before.finish_B)
    return dataclasses.replace(buffers, state=still, sink=state.lengths_B + state.finish_B)


def _replace(buffers: RoundBuffers, **changes: Any) -> RoundBuffers:
    fields = {field.name for field in dataclasses.fields(DecodeState)}
    state = dataclasses.replace(buffers.state, **{k: v for k, v in changes.items() if k in fields})
    return dataclasses.replace(buffers, state=state, **{k: v for k, v in changes.items() if k not in fields})


def _prefix(state: DecodeState) -> Prefix:
    return Prefix(tokens_BS=state.tokens_BS, lengths_B=state.lengths_B)


class _ReadsOneLogit(Sampler):
    """Reads one logit of each row and draws nothing."""

    def __call__(self, logits_BV: Array, node: Array | int, **_: Any) -> tuple[Array, None]:
        logits_BV = jax.lax.optimization_barrier(logits_BV)
        return (logits_BV[:, 0] > 0).astype(jnp.int32), None


@functools.partial(
    compiling.jit,
    options_of=lambda phase, loop, *_, **__: loop.compiler_options,
    static_argnames=("phase", "loop"),
    donate_argnames="buffers",
)
def repeat(
    phase: Phase, loop: Loop, weights: Weights, request: Request, buffers: RoundBuffers, iterations: Array | int
) -> RoundBuffers:
    """Runs ``phase`` ``iterations`` times, one after the other."""

    def times(weights: Weights, request: Request, buffers: RoundBuffers, iterations: Array | int) -> RoundBuffers:
        def step(_, buffers):
            return phase(loop, weights, request, jax.lax.optimization_barrier(buffers))

        return jax.lax.fori_loop(0, iterations, step, buffers)

    specs = (REPLICATED, BY_ROWS, BY_ROWS, REPLICATED)
    return loop.shards.map(times, specs)(weights, request, buffers, iterations)


@functools.partial(
    compiling.jit, options_of=lambda loop, *_, **__: loop.compiler_options, static_argnames=("loop", "rows")
)
def stream(loop: Loop, matrices: list[Array | Int8Weight], iterations: Array | int, *, rows: int) -> Array:
    """Multiplies ``rows`` rows by every matrix, one after the other: a lower bound of a call of the target.

    Matrices keep the layout they have; each product waits for the one before. The compiler is asked what the
    loop asks of it.
    """

    def step(_: Any, x: Array) -> Array:
        for matrix in matrices:
            rows_out = jax.lax.optimization_barrier(_multiply(x, matrix, rows))
            x = jnp.where(rows_out.ravel()[0] > 0, 1.0, 0.5)
        return x

    return jax.lax.fori_loop(0, iterations, step, jnp.ones((), jnp.float32))


def _multiply(x: Array, matrix: Array | Int8Weight, rows: int) -> Array:
    """Multiplies ``rows`` rows that are ``x`` everywhere; of int8 matrices each is widened anew, as a call does it."""
    if isinstance(matrix, Int8Blocks):
        matrix = jax.tree.map(lambda part: part.reshape(-1, part.shape[-1]), matrix)
        return contract("TD,DF->TF", jnp.full((rows, matrix.shape[0]), x), matrix)
    dtype = jnp.float32 if is_int8(matrix) else matrix.dtype
    rows_in = jnp.full(matrix.shape[:-2] + (rows, matrix.shape[-2]), x, dtype)
    if is_int8(matrix):
        rows_in, values = jax.lax.optimization_barrier((rows_in, matrix.values))
        matrix = values.astype(dtype)
    return rows_in @ matrix


def matrices_of(model: LanguageModel, weights: Any) -> list[Array | Int8Weight]:
    """Returns the matrices that a call of the model reads; if it does not say, all leaves with two axes or more.

    Of experts it is as many as one token chooses, whichever they are. On a mesh, the parts that one device holds:
    products of parts need no collective.
    """
    said = model.streamed(weights)
    matrices = said if said is not None else [leaf for leaf in jax.tree.leaves(weights) if jnp.ndim(leaf) >= 2]

    def spread(leaf):
        return isinstance(leaf, Array) and len(leaf.sharding.device_set) > 1

    def here(tree):
        return jax.tree.map(lambda leaf: leaf.addressable_shards[0].data if spread(leaf) else leaf, tree)

    matrices = here(matrices)
    for stack, share in model.chosen(weights, 1):
        stack = here(stack)
        count = max(round(share * stack.shape[0]), 1)
        matrices += [jax.tree.map(lambda y, i=i: y[i], stack) for i in range(count)]
    return matrices
