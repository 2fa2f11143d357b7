"""Reading prompts: the state in which `specsamp.decoding.loop.Loop` begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from specsamp.decoding.state import DecodeState, Finish, Request, Stats, Weights
from specsamp.models.interface import check_logits

if TYPE_CHECKING:
    from specsamp.decoding.loop import Loop

Array = jax.Array


def first_state(
    loop: Loop,
    weights: Weights,
    request: Request,
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
    batch, padded_length = tokens_BP.shape
    with jax.named_scope("prefill"):
        cache, drafter_state = _read_prompts(loop, weights, tokens_BP, lengths_B, slots, chunk)

    def copy(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.repeat(x, num_samples, axis=0), tree)

    def empty(dtype: Any) -> Array:
        return jnp.zeros((batch * num_samples, slots), dtype)

    tokens_RP, lengths_B = copy(tokens_BP), copy(lengths_B)
    return DecodeState(
        tokens_BS=jnp.pad(tokens_RP, ((0, 0), (0, slots - padded_length))),
        lengths_B=lengths_B,
        finish_B=jnp.where(lengths_B < request.limits_B, Finish.RUNNING, Finish.LENGTH).astype(jnp.int32),
        from_draft_BS=empty(bool),
        log_probs_BS=empty(jnp.float32) if loop.keep_log_probs else None,
        rounds_BS=empty(jnp.int32) if loop.keep_rounds else None,
        cache=copy(cache),
        drafter_state=copy(drafter_state),
        stats=Stats.zeros(batch * num_samples, loop.drafter.max_accepted),
        request=request,
        warp_state=request.sampling.init(tokens_RP, lengths_B, loop.target.vocab_size),
        draft_warp_state=request.draft_sampling.init(tokens_RP, lengths_B, loop.target.vocab_size),
    )


def _read_prompts(
    loop: Loop, weights: Weights, tokens_BP: Array, lengths_B: Array, slots: int, chunk: int | None
) -> tuple[Any, Any]:
    """Feeds the prompts to target and drafter, ``chunk`` tokens at a time; returns the cache and the drafter's state."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1; got {chunk}")
    batch, padded_length = tokens_BP.shape

    def read(tokens_BT: Array, start: Array | int, cache: Any, drafter_state: Any) -> tuple[Any, Any]:
        start_B = jnp.full_like(lengths_B, start)
        output = loop.target(weights.target, tokens_BT, start_B, cache, hidden_layers=loop.drafter.hidden_layers)
        check_logits("target", loop.target, output)
        drafter_state, cache = loop.drafter.read(
            weights, drafter_state, tokens_BT, start_B, lengths_B, output, output.cache
        )
        return cache, drafter_state

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
