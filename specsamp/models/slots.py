"""Reads, writes and moves slots of a cache at a different offset in each row.

Up to `MAX_UNROLLED_ROWS` rows are handled one by one, more rows by ``vmap``: on a TPU a scatter or a gather is a loop
over rows and heads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specsamp.models.compiling import MAX_UNROLLED_ROWS

Array = jax.Array

SLOTS_AXIS = 2


def write_slots(cache_BMSH: Array, new_BMTH: Array, start_B: Array, axis: int = SLOTS_AXIS) -> Array:
    """Writes T slots of each sequence from slot ``start_B``; requires ``start_B + T <= S``.

    XLA shifts an update that would pass the end to earlier slots; so the loop's buffers have headroom.

    Args:
      axis: of the slots, 2, or 3 for transposed keys.
    """
    batch, slots = cache_BMSH.shape[0], cache_BMSH.shape[axis]
    zero = jnp.zeros((), start_B.dtype)

    def place(row, start):
        return (row, zero, start, zero) if axis == SLOTS_AXIS else (row, zero, zero, start)

    if (batch, new_BMTH.shape[axis]) == (1, 1) and slots > 1:
        # A single slot of a single sequence is written together with a neighbour. Otherwise XLA's CPU backend fuses the
        # update into its reader and into the carry, and copies the cache for each of them (eight copies per layer and
        # step; tests/decoding/test_compiled.py).
        first = jnp.minimum(start_B[0], slots - 2)
        two = tuple(2 if i == axis else n for i, n in enumerate(new_BMTH.shape))
        old_BM2H = jax.lax.dynamic_slice(cache_BMSH, place(zero, first), two)
        is_new = (jnp.arange(2) + first == start_B[0]).reshape([2 if i == axis else 1 for i in range(4)])
        return jax.lax.dynamic_update_slice(cache_BMSH, jnp.where(is_new, new_BMTH, old_BM2H), place(zero, first))
    if batch <= MAX_UNROLLED_ROWS:
        for b in range(batch):
            at = place(jnp.full((), b, start_B.dtype), start_B[b])
            cache_BMSH = jax.lax.dynamic_update_slice(cache_BMSH, new_BMTH[b : b + 1], at)
        return cache_BMSH

    def write(cache, new, start):
        return jax.lax.dynamic_update_slice(cache, new, place(zero, start)[1:])

    return jax.vmap(write)(cache_BMSH, new_BMTH, start_B)


def move_slots(cache_BMSH: Array, start_B: Array, rows_BT: Array, num_rows: int, axis: int = SLOTS_AXIS) -> Array:
    """Moves slots ``start_B + rows_BT`` of each sequence to ``start_B ..``; all are read before any is written.

    Args:
      rows_BT: ``[B, T]`` int32, T of the block's slots in increasing order. Entries after the kept slots are arbitrary.
      num_rows: slots of the block, ``start_B + num_rows <= S``.
      axis: of the slots, 2, or 3 for transposed keys.
    """
    return write_slots(cache_BMSH, read_moved(cache_BMSH, start_B, rows_BT, num_rows, axis), start_B, axis)


def read_moved(cache_BMSH: Array, start_B: Array, rows_BT: Array, num_rows: int, axis: int = SLOTS_AXIS) -> Array:
    """Reads slots ``start_B + rows_BT`` of each sequence; see `move_slots`."""

    def read(row, start):
        return jax.lax.dynamic_slice_in_dim(row, start, num_rows, axis)

    if len(start_B) <= MAX_UNROLLED_ROWS:
        block_BMRH = jnp.concatenate([read(cache_BMSH[b : b + 1], start_B[b]) for b in range(len(start_B))])
    else:
        block_BMRH = jax.vmap(lambda row, start: read(row[None], start)[0])(cache_BMSH, start_B)
    rows_BT = jnp.clip(rows_BT, 0, num_rows - 1)
    index = rows_BT[:, None, :, None] if axis == SLOTS_AXIS else rows_BT[:, None, None, :]
    return jnp.take_along_axis(block_BMRH, index, axis=axis)
