"""Attention of a few queries over a cache; only blocks of slots that some query sees are fetched.

The grid has a step for each such block, sequence after sequence, so that its length is data;
`_schedule` gives the sequence and the block of each step. The cores of a device share the heads, or
the sequences where they do not divide the heads. The softmax is carried over the blocks of a
sequence as a running maximum, sum and mean (Milakov and Gimelshein, arXiv 1805.02867; Dao et al.,
arXiv 2205.14135), in float32. Scores of relative distances are aligned with the slots on chip;
`specsamp.models.positions.align_distances` is the plain form.
"""

from __future__ import annotations

import functools
import math
from typing import Self

import jax
import jax.numpy as jnp

from specsamp.arrays import pad_axis
from specsamp.jax_names import pl, pltpu
from specsamp.models.kernels.common import (
    LANES,
    by_place,
    einsum_in_float32,
    in_hbm,
    iota,
    slot_of,
    widen,
)
from specsamp.models.products import soft_cap
from specsamp.models.visibility import BlockVisibility, Visibility, positions_of, seen_after
from specsamp.pytrees import pytree

Array = jax.Array

NAME = "decode_attention"  # of the kernel in compiled programs
# Bytes of keys in a step. With fewer, a step computes for longer than it fetches; with more, more
# dead slots are fetched.
STEP_BYTES = 2**18
# Slots; of keys that share rows with their values at most twice as many.
MAX_BLOCK, MIN_BLOCK = 512, 256
MAX_ROWS = 1024  # of queries per kv head; memory on chip grows with them
UNSEEN = -1e30  # a score whose exponential is 0; the difference of two infinities would be NaN


@pytree
class SeenSlots:
    """The slots that the queries of a call see: `Visibility.mask` as bounds, without an array of
    all slots.

    Query t of row b sees the slots ``bounds_BT2[b, t, 0] .. bounds_BT2[b, t, 1]`` and, in a tree,
    the slots ``start_B[b] + r`` where ``tree_BTR[b, t, r]`` is 1.
    """

    bounds_BT2: Array  # int32; the first bound may be negative
    last_B: Array  # int32, the last slot that any query sees
    start_B: Array  # int32, the slot of the first query, or that of the first node of a tree
    tree_BTR: Array | None = None  # float32, 0 or 1, with R a multiple of 128

    @classmethod
    def of(cls, visible: Visibility | BlockVisibility) -> Self:
        """Returns the slots that `specsamp.models.visibility.Visibility.mask` marks."""
        if isinstance(visible, BlockVisibility):
            return cls._of_block(visible)
        positions_BT = positions_of(visible.start_B, visible.num_queries, visible.block)
        block, window = visible.block, visible.window
        first_BT = jnp.zeros_like(positions_BT) if window is None else positions_BT - (window - 1)
        last_BT, start_B, tree_BTR = positions_BT, visible.start_B, None
        if block is not None:
            last_BT = jnp.broadcast_to(block.start_B[:, None] - 1, first_BT.shape)
            start_B, seen_BTR = block.start_B, block.visible_BTR
            if window is not None:
                seen_BTR &= seen_after(block) < window
            tree_BTR = pad_axis(seen_BTR.astype(jnp.float32), -seen_BTR.shape[-1] % LANES)
        return cls(
            bounds_BT2=jnp.stack([first_BT, last_BT], axis=-1),
            last_B=visible.start_B + visible.num_queries - 1,
            start_B=start_B,
            tree_BTR=tree_BTR,
        )

    @classmethod
    def _of_block(cls, visible: BlockVisibility) -> Self:
        """Returns the slots that the rows of one block see: its rows are a tree's."""
        size, anchors_B = visible.block_size, visible.anchors_BA[:, 0]
        first_B = jnp.zeros_like(anchors_B)
        if visible.window is not None:
            first_B = anchors_B - visible.window
        rows_b = jnp.arange(size)
        columns_R = jnp.arange(size + -size % LANES)
        last_b1 = jnp.full((size, 1), size - 1) if visible.both_ways else rows_b[:, None]
        seen_bR = (columns_R[None] <= last_b1).astype(jnp.float32)
        start_B = visible.first_BA[:, 0]
        bounds_B12 = jnp.stack([first_B, anchors_B - 1], axis=-1)[:, None]
        return cls(
            bounds_BT2=jnp.repeat(bounds_B12, size, axis=1),
            last_B=start_B + size - 1,
            start_B=start_B,
            tree_BTR=jnp.broadcast_to(seen_bR, (len(start_B), *seen_bR.shape)),
        )

    def blocks(self, size: int, num_slots: int) -> tuple[Array, Array]:
        """Returns the first and the last block of ``size`` slots that any query of each row sees,
        int32 ``[B]``.
        """
        first_B = jnp.clip(self.bounds_BT2[:, :, 0].min(axis=1), 0, num_slots - 1)
        return first_B // size, jnp.clip(self.last_B, 0, num_slots - 1) // size


def decode_attention(
    q_BNTH: Array,
    entries_BMSH: tuple[Array, ...],
    seen: SeenSlots,
    distances_BNTS: Array | None,
    scales_BM1S: tuple[Array, ...] | None,
    sinks_1N: Array | None,
    *,
    scale: float,
    cap: float | None,
    cores: int,
    interpret: bool,
) -> Array:
    """Computes `specsamp.models.cache.LayerCache.attend` on one device; returns ``[B, N, T, H]``.

    Args:
      entries_BMSH: keys and values, or one array that is both; in HBM, where they stay; S and H are
        multiples of 128.
      seen: every query sees a slot.
      scale, distances_BNTS, cap, sinks_1N: see `LayerCache.attend`; in a tree the scores are
        aligned with the slots.
      scales_BM1S: float32, of keys and values in int8; None: for other dtypes.
      cores: of the device; they share the heads, or the sequences if they do not divide the heads.
      interpret: runs on the CPU.
    """
    (batch, heads, length, size), (_, kv_heads, num_slots, _) = q_BNTH.shape, entries_BMSH[0].shape
    # Queries that share a kv head are rows of one product.
    group, rows = heads // kv_heads, heads // kv_heads * length
    size_of_key = size * len(entries_BMSH) // 2
    itemsize = entries_BMSH[0].dtype.itemsize
    fits = kv_heads * LANES * size_of_key * itemsize <= STEP_BYTES
    parts = min(cores, batch) if kv_heads % cores and fits else 1
    of_heads, block = block_shape(kv_heads, num_slots, size_of_key, itemsize, parts)
    first_B, last_B = seen.blocks(block, num_slots)
    counts_P, row_X, block_X = _schedule(first_B, last_B, num_slots // block, parts)

    part = functools.partial(_part_of_step, parts)
    of_cache = part(of_heads, block, size, heads_axis=True, slots_axis=2)
    of_rows = part(of_heads, rows, size, heads_axis=True)
    keep = functools.partial(in_hbm, interpret=interpret)
    operands = {
        "q": (q_BNTH.reshape(batch, kv_heads, rows, size), of_rows),
        **{
            name: (keep(entries), of_cache)
            for name, entries in zip(("keys", "values"), entries_BMSH)
        },
        "bounds": (jnp.tile(seen.bounds_BT2, (1, group, 1)), part(rows, 2)),
    }
    if seen.tree_BTR is not None:
        operands["tree"] = (
            jnp.tile(seen.tree_BTR, (1, group, 1)),
            part(rows, seen.tree_BTR.shape[-1]),
        )
    if distances_BNTS is not None:
        is_chain = seen.tree_BTR is None
        of_distances = _part_of_distances(parts, of_heads, rows, block, length, num_slots, is_chain)
        operands["distances"] = (
            distances_BNTS.reshape(batch, kv_heads, rows, num_slots),
            of_distances,
        )
    for name, scales in zip(("key_scales", "value_scales"), scales_BM1S or ()):
        operands[name] = keep(scales), part(of_heads, 1, block, heads_axis=True, slots_axis=3)
    if sinks_1N is not None:
        sinks_1MR1 = jnp.repeat(sinks_1N, length, axis=1).reshape(1, kv_heads, rows, 1)
        operands["sinks"] = sinks_1MR1, part(of_heads, rows, 1, rows_axis=False, heads_axis=True)
    options = dict(scale=scale, cap=cap, length=length, num_slots=num_slots)
    out_BMRH = pl.pallas_call(
        functools.partial(_kernel, parts=parts, names=tuple(operands), **options),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, rows, size), q_BNTH.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(max(kv_heads // of_heads, parts), counts_P.max()),
            in_specs=[of_operand for _, of_operand in operands.values()],
            out_specs=of_rows,
            scratch_shapes=[
                pltpu.VMEM((of_heads, rows, width), jnp.float32) for width in (1, 1, size)
            ],
        ),
        # `SeenSlots.blocks` and `_window` keep every index in bounds.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True
        ),
        interpret=interpret,
        name=NAME,
    )(
        row_X,
        block_X,
        first_B,
        last_B,
        seen.start_B,
        counts_P,
        *[operand for operand, _ in operands.values()],
    )
    return out_BMRH.reshape(q_BNTH.shape)


def _part_of_step(
    parts: int,
    *sizes: int,
    rows_axis: bool = True,
    heads_axis: bool = False,
    slots_axis: int | None = None,
) -> pl.BlockSpec:
    """Returns the part of an operand that a step fetches: of its sequence, heads and slots where it
    has them.
    """

    def index(outer, step, row_X, block_X, *_):
        group, at = _place(outer, step, row_X, parts)
        place = [row_X[at] if rows_axis else 0] + [0] * len(sizes)
        if heads_axis:
            place[1] = group
        if slots_axis is not None:
            place[slots_axis] = block_X[at]
        return tuple(place)

    return pl.BlockSpec((1, *sizes), index)


def _place(outer: Array, step: Array, row_X: Array, parts: int) -> tuple[Array, Array]:
    """Returns the group of heads of an outer step of the grid, and the index of its step in the
    schedule of all parts.
    """
    return (outer, step) if parts == 1 else (0, outer * (row_X.shape[0] // parts) + step)


def _part_of_distances(
    parts: int, of_heads: int, rows: int, block: int, length: int, num_slots: int, is_chain: bool
) -> pl.BlockSpec:
    """Returns the part of scores by distance that a step fetches: of a tree by slot, of a chain as
    in `_window`.
    """
    if not is_chain:
        return _part_of_step(parts, of_heads, rows, block, heads_axis=True, slots_axis=3)
    width = window_width(block, num_slots)

    def index(outer, step, row_X, block_X, first_B, last_B, start_B, *_):
        group, at = _place(outer, step, row_X, parts)
        row = row_X[at]
        first, _ = _window(start_B[row] + length, block_X[at], block, width, num_slots)
        return row, group * of_heads, 0, first

    return pl.BlockSpec(tuple(map(pl.Element, (1, of_heads, rows, width))), index)


def block_shape(
    kv_heads: int, num_slots: int, size: int, itemsize: int, parts: int = 1
) -> tuple[int, int]:
    """Returns the kv heads and the slots of a step, for keys of ``size`` entries.

    Several heads are at least two groups, for the cores of a chip, unless ``parts`` of the batch
    are.
    """
    most = max(min(kv_heads // 2, STEP_BYTES // (MIN_BLOCK * size * itemsize)), 1)
    of_heads = max(count for count in range(1, most + 1) if kv_heads % count == 0)
    of_heads = of_heads if parts == 1 else kv_heads
    wanted = min(
        max(STEP_BYTES // (of_heads * size * itemsize), MIN_BLOCK),
        MAX_BLOCK * max(LANES // size, 1),
    )
    return of_heads, max(
        slots for slots in range(LANES, wanted + 1, LANES) if num_slots % slots == 0
    )


def fetched_share(live: float, num_slots: int, block: int) -> float:
    """Returns the share of keys, values and biases that a call fetches, if it sees the first slots,
    a share ``live``.
    """
    return max(math.ceil(live * num_slots / block), 1) * block / num_slots


def _schedule(
    first_B: Array, last_B: Array, num_blocks: int, parts: int
) -> tuple[Array, Array, Array]:
    """Returns the number of steps of each part of the batch; and the sequence and the block of each
    step, of all parts.

    Parts have room for equally many steps. Those behind the last one of a part are that one again.
    """
    rows_B = jnp.arange(len(first_B), dtype=jnp.int32)
    is_here_PB = (rows_B * parts // len(first_B))[None] == jnp.arange(parts)[:, None]
    ends_PB = jnp.cumsum(
        jnp.where(is_here_PB, (last_B - first_B + 1)[None], 0), axis=1, dtype=jnp.int32
    )
    counts_P = ends_PB[:, -1]
    steps_X = jnp.arange(-(-len(first_B) // parts) * num_blocks, dtype=jnp.int32)
    steps_PX = jnp.minimum(steps_X[None], counts_P[:, None] - 1)
    row_PX = jnp.sum(steps_PX[:, :, None] >= ends_PB[:, None], axis=2, dtype=jnp.int32)
    # The last step of a sequence is for its last block.
    is_row_PXB = row_PX[:, :, None] == rows_B[None, None]
    offset_PX = jnp.sum(
        jnp.where(is_row_PXB, (last_B[None] + 1 - ends_PB)[:, None], 0), axis=2, dtype=jnp.int32
    )
    return counts_P, row_PX.reshape(-1), (steps_PX + offset_PX).reshape(-1)


def window_width(block: int, num_slots: int) -> int:
    """Returns how many distances a step fetches: at most 128 queries need two tiles more than the
    slots of a block.
    """
    return min(block + 2 * LANES, num_slots)


def _window(
    end: Array, block: Array, count: int, width: int, num_slots: int
) -> tuple[Array, Array]:
    """Returns the first column of reversed distances that a step fetches, and how far behind it
    slot 0 of its block is.

    ``end`` is the slot behind the last query, for which the column of a slot is ``num_slots - end +
    slot``.
    """
    wanted = num_slots - end + count * block
    first = pl.multiple_of(jnp.minimum(wanted & -LANES, num_slots - width), LANES)
    return first, wanted - first


def _align(distances_MRX: Array, column: Array, count: int, length: int) -> Array:
    """Returns ``count`` columns of each query: from ``column`` on for the last of T, each query
    before one further on.

    What is rolled in from the other side has a negative distance, and is not seen.
    """
    _, rows, width = distances_MRX.shape
    query_RX = iota((rows, width), 0)
    if rows > length:  # queries of several heads
        query_RX = jax.lax.rem(query_RX, length)
    first = column + length - 1  # of the first query
    first = jnp.where(first >= width, first - width, first)
    aligned = []
    for x_RX in distances_MRX:
        x_RX = pltpu.roll(x_RX, jnp.where(first == 0, 0, width - first), 1)
        for bit in range((length - 1).bit_length()):
            x_RX = jnp.where((query_RX >> bit) & 1 == 1, pltpu.roll(x_RX, 1 << bit, 1), x_RX)
        aligned.append(x_RX[:, :count])
    return jnp.stack(aligned)


def _kernel(row_X, block_X, first_B, last_B, start_B, counts_P, *refs, parts, **options):
    """Adds the block of a step to the running softmax of its sequence, unless its part has no more
    steps.
    """
    outer, step = pl.program_id(0), pl.program_id(1)
    _, at = _place(outer, step, row_X, parts)
    add = functools.partial(_add, row_X[at], block_X[at], first_B, last_B, start_B, refs, **options)
    add() if parts == 1 else pl.when(step < counts_P[outer])(add)


def _add(row, block, first_B, last_B, start_B, refs, *, names, scale, cap, length, num_slots):
    operands, (out, maximum, total, mean) = dict(zip(names, refs)), refs[len(names) :]

    @pl.when(block == first_B[row])
    def _():
        if "sinks" in operands:  # a slot that was seen before all others
            maximum[...] = operands["sinks"][0]
            total[...] = jnp.ones(total.shape, jnp.float32)
        else:
            maximum[...] = jnp.full(maximum.shape, UNSEEN, jnp.float32)
            total[...] = jnp.zeros(total.shape, jnp.float32)
        mean[...] = jnp.zeros(mean.shape, jnp.float32)

    queries, keys, values = (
        operands["q"][0],
        operands["keys"][0],
        operands.get("values", operands["keys"])[0],
    )
    is_int8 = "key_scales" in operands
    if is_int8:  # slots are in the order of `widen` from here on
        is_pair, dtype = "values" not in operands, queries.dtype
        keys = widen(keys, dtype)
        values = keys if is_pair else widen(values, dtype)
    scores = einsum_in_float32("mrh,msh->mrs", queries, keys)
    if is_int8:
        scores = scores * _by_place(operands["key_scales"][0])
    if "distances" in operands:
        distances = operands["distances"][0]
        if "tree" not in operands:
            count, width = keys.shape[1], distances.shape[2]
            _, column = _window(start_B[row] + length, block, count, width, num_slots)
            distances = _align(distances, column, count, length)
        scores = scores + (_by_place(distances) if is_int8 else distances)
    scores = scores * scale
    if cap is not None:
        scores = soft_cap(scores, cap)
    tree = operands["tree"][0] if "tree" in operands else None
    count = keys.shape[1]
    bounds_R2 = operands["bounds"][0]
    seen = _seen(block * count, count, bounds_R2, tree, start_B[row], is_int8)
    scores = jnp.where(seen[None], scores, UNSEEN)
    before = maximum[...]
    after = jnp.maximum(before, scores.max(axis=-1, keepdims=True))
    # For a query that has seen no slot yet this adds ones; ``kept`` is 0 at its first slot and
    # removes them.
    weights = jnp.exp(scores - after)
    kept = jnp.exp(before - after)
    maximum[...] = after
    total[...] = total[...] * kept + weights.sum(axis=-1, keepdims=True)
    if is_int8:
        weights = weights * _by_place(operands["value_scales"][0])
    mean[...] = mean[...] * kept + einsum_in_float32(
        "mrs,msh->mrh", weights.astype(queries.dtype), values
    )

    @pl.when(block == last_B[row])
    def _():
        out[0] = (mean[...] / total[...]).astype(out.dtype)


def _by_place(x_MRS: Array) -> Array:
    return jnp.stack([by_place(x_RS) for x_RS in x_MRS])


def _seen(
    first: Array,
    count: int,
    bounds_R2: Array,
    tree_RX: Array | None,
    tree_start: Array,
    is_int8: bool,
) -> Array:
    """Returns ``[R, count]`` bool: whether each query sees each slot from ``first`` on."""

    def slots(shape):
        slot = iota(shape, 1)
        return first + ((slot & -LANES) + slot_of(slot) if is_int8 else slot)

    slots_RS = slots((bounds_R2.shape[0], count))
    seen = (slots_RS >= bounds_R2[:, 0:1]) & (slots_RS <= bounds_R2[:, 1:2])
    if tree_RX is None:
        return seen
    # The tree's columns, each moved to its slot by a product with zeros and ones.
    shape = (tree_RX.shape[1], count)
    moved = slots(shape) == tree_start + iota(shape, 0)
    return seen | (einsum_in_float32("rx,xs->rs", tree_RX, moved.astype(jnp.float32)) > 0.5)
