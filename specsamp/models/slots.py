"""Reads, writes and moves slots of a cache at a different offset in each row.

A cache is any array with the batch on its first axis, and an axis of slots.

JAX moves a slice that does not fit into an array, so that it would overwrite committed tokens. Here
positions outside of the array are dropped; all writes to caches and to arrays with an entry for
each slot are made here.

Up to `MAX_UNROLLED_ROWS` rows are handled one by one, more rows by ``vmap``: on a TPU a scatter or
a gather is a loop over rows and heads.
"""

import functools

import jax
import jax.numpy as jnp

Array = jax.Array

SLOTS_AXIS = 2
# Up to about this many rows, unrolled code is the cheapest way to read and write at a different
# offset in each row. With more rows the program would grow too large, and the compiler makes a loop
# over the rows.
MAX_UNROLLED_ROWS = 32


def write_slots(
    cache_BMSH: Array, new_BMTH: Array, start_B: Array, axis: int = SLOTS_AXIS
) -> Array:
    """Writes T slots of each sequence from slot ``start_B``; slots outside of the cache are
    dropped.

    Args:
      axis: of the slots.

    Raises:
      ValueError: while tracing, if T exceeds the number of slots.
    """
    batch, slots, length = cache_BMSH.shape[0], cache_BMSH.shape[axis], new_BMTH.shape[axis]
    if length > slots:
        raise ValueError(
            f"{length} tokens were given to a cache of {slots} slots: read fewer tokens per call"
        )
    # A single slot of a single sequence is written together with a neighbour. Otherwise XLA's CPU
    # backend fuses the update into its reader and into the carry, and copies the cache for each of
    # them (eight copies per layer and step; tests/decoding/test_compiled.py).
    width = 2 if (batch, length) == (1, 1) and slots > 1 else length
    shape = tuple(
        width if at == axis else size for at, size in enumerate((1, *cache_BMSH.shape[1:]))
    )

    def write(cache: Array, new: Array, row: int, start: Array, all_fit: bool) -> Array:
        first = jnp.clip(start, 0, slots - width)
        place = _place(row, first, cache.ndim, axis)
        if not all_fit:
            old = jax.lax.dynamic_slice(cache, place, shape)
            # Where not all slots fit, the written block lies elsewhere and its tokens move within
            # it.
            token_T = jnp.arange(width) + first - start
            is_new = _along(((token_T >= 0) & (token_T < length))[None], cache.ndim, axis)
            if length > 1:
                new = jnp.roll(new, start - first, axis)
            new = jnp.where(is_new, new, old)
        return jax.lax.dynamic_update_slice(cache, new, place)

    def write_rows(cache_BMSH: Array, *, all_fit: bool) -> Array:
        if batch <= MAX_UNROLLED_ROWS:
            for row in range(batch):
                cache_BMSH = write(cache_BMSH, new_BMTH[row : row + 1], row, start_B[row], all_fit)
            return cache_BMSH
        each = jax.vmap(
            lambda cache, new, start: write(cache[None], new[None], 0, start, all_fit)[0]
        )
        return each(cache_BMSH, new_BMTH, start_B)

    write_some = functools.partial(write_rows, all_fit=False)
    write_all = functools.partial(write_rows, all_fit=True)

    def choose(cache_BMSH: Array) -> Array:
        all_fit = jnp.all((start_B >= 0) & (start_B <= slots - length))
        return jax.lax.cond(all_fit, write_all, write_some, cache_BMSH)

    if batch == 1:
        return write_some(cache_BMSH)
    # On a TPU XLA lays out a cache anew, in a copy, if several rows read their old slots. On a GPU
    # a conditional would wait for the host.
    return jax.lax.platform_dependent(cache_BMSH, tpu=choose, default=write_some)


def move_slots(
    cache_BMSH: Array, start_B: Array, rows_BT: Array, num_rows: int, axis: int = SLOTS_AXIS
) -> Array:
    """Moves slots ``start_B + rows_BT`` of each sequence to ``start_B ..``; all are read before any
    is written.

    Args:
      rows_BT: ``[B, T]`` int32, T of the block's slots in increasing order. Entries after the kept
        slots are arbitrary.
      num_rows: slots of the block.
      axis: of the slots.
    """
    return write_slots(
        cache_BMSH, read_moved(cache_BMSH, start_B, rows_BT, num_rows, axis), start_B, axis
    )


def read_moved(
    cache_BMSH: Array, start_B: Array, rows_BT: Array, num_rows: int, axis: int = SLOTS_AXIS
) -> Array:
    """Reads slots ``start_B + rows_BT`` of each sequence; see `move_slots`."""

    # JAX would move a block that does not fit.
    first_B = jnp.clip(start_B, 0, cache_BMSH.shape[axis] - num_rows)
    rows_BT = jnp.clip(rows_BT + (start_B - first_B)[:, None], 0, num_rows - 1)

    block_BMRH = read_slots(cache_BMSH, first_B, num_rows, axis)
    return jnp.take_along_axis(block_BMRH, _along(rows_BT, cache_BMSH.ndim, axis), axis=axis)


def read_slots(cache_BMSH: Array, first_B: Array, count: int, axis: int = SLOTS_AXIS) -> Array:
    """Reads ``count`` slots of each sequence from slot ``first_B``, which must lie within the
    cache.
    """

    def read(cache: Array, row: int, first: Array) -> Array:
        # In one slice: XLA would copy whole rows for a slice of a row.
        shape = [1, *cache.shape[1:]]
        shape[axis] = count
        return jax.lax.dynamic_slice(cache, _place(row, first, cache.ndim, axis), shape)

    if len(first_B) <= MAX_UNROLLED_ROWS:
        return jnp.concatenate([read(cache_BMSH, b, first_B[b]) for b in range(len(first_B))])
    return jax.vmap(lambda row, first: read(row[None], 0, first)[0])(cache_BMSH, first_B)


def cut_slots(
    cache_BMSH: Array, num_kept: int, first_B: Array, count: int, room: int, axis: int = SLOTS_AXIS
) -> Array:
    """Returns the first ``num_kept`` slots, ``count`` slots from ``first_B``, and ``room`` slots of
    zeros.
    """
    kept = jax.lax.slice_in_dim(cache_BMSH, 0, num_kept, axis=axis)
    window = read_slots(cache_BMSH, first_B, count, axis)
    empty = jnp.zeros((*window.shape[:axis], room, *window.shape[axis + 1 :]), window.dtype)
    return jnp.concatenate([kept, window, empty], axis)


def _place(row: int, first: Array, ndim: int, axis: int) -> list[Array]:
    """Returns the indices of slot ``first`` of a row."""
    place = [jnp.full((), row, first.dtype)] + [jnp.zeros((), first.dtype)] * (ndim - 1)
    place[axis] = first
    return place


def _along(x_BT: Array, ndim: int, axis: int) -> Array:
    """Returns ``[B, T]`` with T at ``axis`` of a cache, whose other axes are 1."""
    return jnp.expand_dims(x_BT, [at for at in range(1, ndim) if at != axis])
