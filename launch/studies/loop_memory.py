"""Counts the memory that the decoding loop takes beside weights and caches, from the compiled program.

The loop is compiled for abstract arguments, so nothing is allocated. `LoopMemory.temp_bytes` is all that `Loop.run` needs
beyond its arguments; of these the state is donated and becomes the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from specsamp.analysis.report import Table
from specsamp.decoding.drafters import ModelDrafter, NoDrafter
from specsamp.decoding.loop import Loop, decode_window
from specsamp.decoding.state import Request, Weights
from specsamp.models.config import TransformerConfig
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp

# One of B, K and V varies at a time, around 4, 4 and 8192; K = 0 is the autoregressive loop.
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
    """Returns `loop_memory` at every ``(B, K, V)`` of ``grid``; the models differ in V alone."""
    points = []
    for batch, draft_length, vocab_size in grid:
        progress(f"compiling: B = {batch}, K = {draft_length}, V = {vocab_size}")

        def sized(config):
            return TransformerLM.for_backend(dataclasses.replace(config, vocab_size=vocab_size))

        draft_model = sized(draft) if draft_length else None
        drafter = ModelDrafter(draft_model, draft_length, decode_window()) if draft_model else NoDrafter()
        loop = Loop(target=sized(target), drafter=drafter, rule=rule, window=decode_window())
        points.append(loop_memory(loop, sampling, batch=batch, slots=slots, draft=draft_model))
    return tuple(points)


def loop_memory(
    loop: Loop, sampling: Warp, *, batch: int, slots: int, draft: TransformerLM | None = None
) -> LoopMemory:
    """Compiles ``loop.run`` for ``batch`` rows and ``slots`` slots; ``sampling`` has scalar numbers."""

    def prepare() -> Weights:
        key = jax.random.key(0)
        target = loop.target.prepare(loop.target.init(key))
        draft_weights = loop.drafter.prepare(None if draft is None else draft.init(key))
        return Weights(target=loop.target.fit_slots(target, slots), draft=loop.drafter.fit_slots(draft_weights, slots))

    weights = jax.eval_shape(prepare)
    request = jax.eval_shape(lambda: Request.create(sampling=sampling, limits=[slots] * batch))
    prompt = jax.ShapeDtypeStruct((batch, min(16, slots)), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    state = jax.eval_shape(lambda *arguments: loop.prefill(*arguments, slots=slots), weights, request, *prompt)
    state = dataclasses.replace(state, request=None)
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = Loop.run_request.lower(loop, weights, request, state, rounds).compile()
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


def memory_table(grid: Iterable[LoopMemory]) -> Table:
    """Returns a table of the points of a grid, in MB."""

    def megabytes(size: int) -> str:
        return f"{size / 1e6:.2f}"

    return Table(
        title="Memory of the loop beside weights and state, MB, as compiled",
        header=("B, K, V", "loop", "B(K+1)V floats", "ratio", "caches, in the state"),
        rows=[
            (
                f"{point.batch}, {point.draft_length}, {point.vocab_size}",
                megabytes(point.temp_bytes),
                megabytes(point.logits_bytes),
                f"{point.temp_bytes / point.logits_bytes:.1f}",
                megabytes(point.cache_bytes),
            )
            for point in grid
        ],
    )
