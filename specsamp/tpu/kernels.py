"""Counts the traffic and the steps of the kernels of `specsamp.models.kernels`; the text of a
program has neither.
"""

import math
from collections.abc import Callable, Sequence

from specsamp.models.experts import expected_steps
from specsamp.models.kernels import (
    append_rows,
    common,
    decode_attention,
    delta_step,
    expand_rows,
    mix_experts,
)
from specsamp.tpu.hlo import Array, Instruction

# Of a call, the arrays that it is given, and the share of the slots that is alive: bytes read from
# HBM, bytes written there, and steps.
Count = Callable[[Instruction, Sequence[Array], float], tuple[float, float, float]]


def kernel_of(op: Instruction) -> Count | None:
    """Returns how to count a custom call; None unless it is one of our kernels."""
    if 'custom_call_target="tpu_custom_call"' not in op.attributes:
        return None
    return next((count for name, count in COUNTS.items() if f"/{name}/" in op.scope), None)


def count_attention(
    op: Instruction, given: Sequence[Array], live: float
) -> tuple[float, float, float]:
    """Reads the live part of keys, values and scores of distances, and all other operands."""
    # Queries come first, then keys and values, apart or as pairs; sinks have one entry a row.
    _, *arrays = (x for x in given if len(x.sizes) == 4 and x.sizes[3] > 1)
    caches = [x for x in arrays if x.sizes == arrays[0].sizes]
    others = arrays[len(caches) :]
    batch, kv_heads, slots, size = caches[0].sizes
    # The last list of the schedule has an entry for each part of the batch; all have the steps of
    # the longest.
    *_, parts = (x.sizes[0] for x in given if len(x.sizes) == 1)
    heads, block = decode_attention.block_shape(
        kv_heads, slots, size * len(caches) // 2, itemsize(caches[0]), parts
    )
    share = decode_attention.fetched_share(live, slots, block)
    read = sum(
        x.bytes * (share if len(x.sizes) == 4 and slots in x.sizes[2:] else 1.0)
        for x in given
        if x.in_hbm
    )
    is_tree = sum(len(x.sizes) == 3 for x in given) > 1
    # The windows of distances of two blocks overlap.
    if len(others) % 2 and not is_tree and others[0].in_hbm:
        read += others[0].bytes * share * (decode_attention.window_width(block, slots) / block - 1)
    steps = kv_heads // heads * parts * math.ceil(batch / parts) * share * slots / block
    return read, op.hbm_bytes, steps


def count_rows(op: Instruction, given: Sequence[Array], live: float) -> tuple[float, float, float]:
    """Reads and writes the tiles that hold new slots, of each cache, and reads the new slots."""
    starts, *rest = given
    new = rest[: len(op.arrays)]
    caches = rest[len(op.arrays) :]
    length = new[0].sizes[append_rows.slots_axis(caches[0].sizes)]
    moved = 0.0
    for cache in caches:
        axis = append_rows.slots_axis(cache.sizes)
        _, width = append_rows.window(cache.sizes, itemsize(cache), length)
        moved += cache.bytes * width / cache.sizes[axis]
    read = sum(x.bytes for x in (starts, *new) if x.in_hbm)
    return moved + read, moved, caches[0].sizes[0]


def count_small(op: Instruction, given: Sequence[Array], live: float) -> tuple[float, float, float]:
    """Reads and writes all; if it has steps, each does an entry of the leading axis, or rows of a
    stream.
    """
    sizes = op.arrays[0].sizes
    steps = max(sizes[0], common.stream_steps(sizes))
    return sum(x.bytes for x in given if x.in_hbm), op.hbm_bytes, steps


def count_expanded(
    op: Instruction, given: Sequence[Array], live: float
) -> tuple[float, float, float]:
    """Reads and writes all, the ranks for every few rows; each step does some of their ids."""
    rows, num_ids = op.arrays[0].sizes
    groups = math.ceil(rows / expand_rows.ROWS)
    first, logits, ranks = (x.bytes * x.in_hbm for x in given)
    steps = math.ceil(num_ids / (expand_rows.BLOCKS * common.LANES))
    return first + logits + groups * ranks, op.hbm_bytes, groups * steps


def count_experts(
    op: Instruction, given: Sequence[Array], live: float
) -> tuple[float, float, float]:
    """Reads the experts that the tokens are expected to choose, and all other operands."""
    *others, gate, up, down = given
    here, inner, width = gate.sizes
    experts = expected_steps(op.scope)
    read = (gate.bytes + up.bytes + down.bytes) * experts / here
    read += sum(x.bytes for x in others if x.in_hbm)
    steps = experts * inner / mix_experts.part_width(inner, width, itemsize(gate))
    return read, op.hbm_bytes, steps


def count_delta(op: Instruction, given: Sequence[Array], live: float) -> tuple[float, float, float]:
    """Reads and writes all; each step does a key head of a sequence."""
    read, written, _ = count_small(op, given, live)
    _, _, inputs, _ = op.arrays
    return read, written, math.prod(inputs.sizes[:2])


def itemsize(x: Array) -> int:
    """Returns the bytes of an entry."""
    return int(x.bytes / math.prod(x.sizes))


COUNTS: dict[str, Count] = {
    decode_attention.NAME: count_attention,
    append_rows.NAME: count_rows,
    expand_rows.NAME: count_expanded,
    mix_experts.NAME: count_experts,
    delta_step.NAME: count_delta,
    common.SMALL: count_small,
    common.WARPS: count_small,
}
