"""Reading prompts: the state in which `specsamp.decoding.loop.Loop` begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from specsamp.decoding.drafter import hooks_of
from specsamp.decoding.state import DecodeState, Finish, RequestBatch, Stats, Weights
from specsamp.decoding.tokens import gather_tokens
from specsamp.models.interface import check_logits
from specsamp.sampling.rules import Meter

if TYPE_CHECKING:
    from specsamp.decoding.loop import Loop

Array = jax.Array


def first_state(
    loop: Loop,
    weights: Weights,
    request: RequestBatch,
    tokens_BP: Array,
    lengths_B: Array,
    *,
    slots: int,
    num_samples: int,
    chunk: int | None = None,
) -> DecodeState:
    """Reads the prompts of one data shard and copies the result to ``num_samples`` rows each.

    Arguments and errors are those of `Loop.prefill`.
    """
    padded_length = tokens_BP.shape[1]
    with jax.named_scope("prefill"):
        cache, drafter_state = _read_prompts(loop, weights, tokens_BP, lengths_B, slots, chunk)

    def copy(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.repeat(x, num_samples, axis=0), tree)

    tokens_RS = jnp.pad(copy(tokens_BP), ((0, 0), (0, slots - padded_length)))
    return _begin(loop, request, tokens_RS, copy(lengths_B), copy(cache), copy(drafter_state))


def next_state(
    loop: Loop,
    weights: Weights,
    request: RequestBatch,
    state: DecodeState | None,
    tokens_BS: Array,
    start_B: Array,
    lengths_B: Array,
    *,
    chunk: int,
) -> DecodeState:
    """Reads what follows the first ``start_B`` tokens of rows that were decoded before.

    Arguments are those of `Loop.extend`.
    """
    read = _reader(loop, weights, lengths_B)
    if state is None:
        memories = loop.target.init_cache(*tokens_BS.shape), loop.drafter.init(*tokens_BS.shape)
    else:
        memories = state.cache, state.drafter_state
        adaptive = state.adaptive_state
        if adaptive is not None and adaptive.seen_B is not None:  # a paused drafter has read less than the target
            start_B = jnp.minimum(start_B, jnp.maximum(adaptive.seen_B, 0))

    def read_chunk(index: Array, memories: tuple[Any, Any]) -> tuple[Any, Any]:
        at_B = start_B + index * chunk
        return read(gather_tokens(tokens_BS, at_B, chunk), at_B, *memories)

    with jax.named_scope("prefill"):
        chunks = -(-jnp.max(lengths_B - start_B) // chunk)
        memories = jax.lax.fori_loop(0, chunks, read_chunk, memories)
    return _begin(loop, request, tokens_BS, lengths_B, *memories)


def _begin(
    loop: Loop, request: RequestBatch, tokens_BS: Array, lengths_B: Array, cache: Any, drafter_state: Any
) -> DecodeState:
    """Returns the state of rows of which nothing has been emitted yet."""
    batch, adaptive = len(lengths_B), request.adaptive

    def empty(dtype: Any) -> Array:
        return jnp.zeros(tokens_BS.shape, dtype)

    meter = None
    if loop.rule.metered:
        meter = Meter(variation=empty(jnp.float32), extra=empty(jnp.float32))
    return DecodeState(
        tokens_BS=tokens_BS,
        lengths_B=lengths_B,
        finish_B=jnp.where(lengths_B < request.limits_B, Finish.RUNNING, Finish.LENGTH).astype(jnp.int32),
        from_draft_BS=empty(bool),
        log_probs_BS=empty(jnp.float32) if loop.keep_log_probs else None,
        rounds_BS=empty(jnp.int32) if loop.keep_rounds else None,
        cache=cache,
        drafter_state=drafter_state,
        meter=meter,
        stats=Stats.zeros(batch, loop.depth, adaptive is not None),
        request=request,
        warp_state=request.sampling.init(tokens_BS, lengths_B, loop.target.vocab_size),
        draft_warp_state=request.draft_sampling.init(tokens_BS, lengths_B, loop.target.vocab_size),
        adaptive_state=None if adaptive is None else adaptive.begin(lengths_B, hooks_of(loop.drafter).falls_behind),
    )


def _reader(loop: Loop, weights: Weights, lengths_B: Array) -> Callable[..., tuple[Any, Any]]:
    """Returns what feeds a chunk of the prompts to target and drafter."""

    def read(tokens_BT: Array, start: Array | int, cache: Any, drafter_state: Any) -> tuple[Any, Any]:
        start_B = jnp.full_like(lengths_B, start) if jnp.ndim(start) == 0 else start
        with jax.named_scope("target"):
            output = loop.target(weights.target, tokens_BT, start_B, cache, hidden_layers=loop.drafter.hidden_layers)
        check_logits("target", loop.target, output)
        with jax.named_scope("draft"):
            drafter_state, cache = loop.drafter.read(
                weights, drafter_state, tokens_BT, start_B, lengths_B, output, output.cache
            )
        return cache, drafter_state

    return read


def _read_prompts(
    loop: Loop, weights: Weights, tokens_BP: Array, lengths_B: Array, slots: int, chunk: int | None
) -> tuple[Any, Any]:
    """Feeds the prompts to target and drafter, ``chunk`` tokens at a time; returns the cache and the drafter's state."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1; got {chunk}")
    batch, padded_length = tokens_BP.shape

    read = _reader(loop, weights, lengths_B)
    memories = loop.target.init_cache(batch, slots), loop.drafter.init(batch, slots)
    if chunk is None or chunk >= padded_length:
        return read(tokens_BP, 0, *memories)

    def read_chunk(index: Array, memories: tuple[Any, Any]) -> tuple[Any, Any]:
        tokens_BT = jax.lax.dynamic_slice_in_dim(tokens_BP, index * chunk, chunk, axis=1)
        return read(tokens_BT, index * chunk, *memories)

    whole = padded_length // chunk
    memories = jax.lax.fori_loop(0, whole, read_chunk, memories)
    rest_BT = tokens_BP[:, whole * chunk :]
    return read(rest_BT, whole * chunk, *memories) if rest_BT.shape[1] else memories
