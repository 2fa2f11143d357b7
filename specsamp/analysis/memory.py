"""What the decoding loop takes beside weights and caches, as the compiler counts it.

The loop is compiled for abstract arguments, so nothing is allocated: `LoopMemory.temp_bytes` is all
that `Loop.run` needs beyond its arguments, of which the state is donated and becomes the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.decoding.drafters import ModelDrafter, NoDrafter
from specsamp.decoding.loop import Loop, decode_window
from specsamp.decoding.types import Request, Rule, Weights
from specsamp.models.config import TransformerConfig
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.rng import row_keys
from specsamp.sampling.warp import Warp, for_rows

# One of B, K and V is turned at a time, from 4, 4 and 8192; K = 0 is the autoregressive loop.
GRID = ((1, 4, 8192), (4, 4, 8192), (8, 4, 8192), (4, 0, 8192), (4, 8, 8192), (4, 4, 4096), (4, 4, 32768))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopMemory:
    """One point of the grid."""

    batch: int
    draft_length: int
    vocab_size: int
    slots: int
    temp_bytes: int  # beyond the arguments
    logits_bytes: int  # 4 B (K+1) V
    cache_bytes: int  # of target and drafter: what temp_bytes would hold if they were copied


def memory_grid(
    target: TransformerConfig,
    draft: TransformerConfig,
    rule: Rule,
    sampling: Warp,
    *,
    slots: int,
    grid: Iterable[tuple[int, int, int]] = GRID,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[LoopMemory, ...]:
    """`loop_memory` at every ``(B, K, V)`` of ``grid``, for models that differ in V alone."""
    points = []
    for batch, draft_length, vocab_size in grid:
        progress(f"compiling: B = {batch}, K = {draft_length}, V = {vocab_size}")

        def sized(config):
            return TransformerLM.here(dataclasses.replace(config, vocab_size=vocab_size))

        drafter = ModelDrafter(sized(draft), draft_length, decode_window()) if draft_length else NoDrafter()
        loop = Loop(target=sized(target), drafter=drafter, rule=rule, window=decode_window())
        points.append(loop_memory(loop, sampling, batch=batch, slots=slots))
    return tuple(points)


def loop_memory(loop: Loop, sampling: Warp, *, batch: int, slots: int) -> LoopMemory:
    """Compiles ``loop.run`` for ``batch`` rows and ``slots`` slots; ``sampling`` has scalar numbers."""
    target, draft = loop.target, loop.drafter.model if isinstance(loop.drafter, ModelDrafter) else None
    weights = jax.eval_shape(lambda: Weights(target=_prepared(target, slots), draft=_prepared(draft, slots)))
    request = jax.eval_shape(lambda: _request(sampling, batch))
    prompt = jax.ShapeDtypeStruct((batch, min(16, slots)), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    state = jax.eval_shape(lambda *arguments: loop.prefill(*arguments, slots=slots), weights, request, *prompt)
    compiled = Loop.run.lower(loop, weights, request, state, jax.ShapeDtypeStruct((), jnp.int32)).compile()
    rows, caches = loop.drafter.K + 1, jax.tree.leaves((state.cache, state.drafter_state))
    return LoopMemory(
        batch=batch,
        draft_length=loop.drafter.K,
        vocab_size=loop.target.vocab_size,
        slots=slots,
        temp_bytes=compiled.memory_analysis().temp_size_in_bytes,
        logits_bytes=4 * batch * rows * loop.target.vocab_size,
        cache_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in caches),
    )


def _prepared(model: TransformerLM | None, slots: int) -> Any:
    return None if model is None else model.prepare(model.init(jax.random.key(0)), slots)


def _request(sampling: Warp, batch: int) -> Request:
    sampling_B = jax.tree.map(jnp.asarray, for_rows(sampling, batch))
    zeros_B = jnp.zeros(batch, jnp.int32)
    return Request(
        sampling=sampling_B,
        draft_sampling=sampling_B,
        row_keys_B=row_keys(0, zeros_B, zeros_B),
        limits_B=zeros_B,
        stop_ids=jnp.full(4, -1, jnp.int32),
    )
