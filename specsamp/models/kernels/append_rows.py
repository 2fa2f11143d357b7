"""Writes the tokens of a call into a cache in place: only tiles that hold a new slot are read and
written.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specsamp.arrays import pad_axis
from specsamp.jax_names import pl, pltpu
from specsamp.models.kernels.common import LANES, einsum_in_float32, in_hbm, iota

Array = jax.Array

NAME = "append_rows"  # of the kernel in compiled programs
MAX_TOKENS = 128  # of a call; with more tokens the time is that of the kernel's products


def append_rows(
    caches: tuple[Array, ...], new: tuple[Array, ...], start_B: Array, *, interpret: bool
) -> tuple[Array, ...]:
    """Returns the caches ``[B, M, S, H]``, or scales ``[B, M, 1, S]``, with T slots of each
    sequence written from its own start, on one device.

    Donated caches are written in place. A new entry that is not finite spoils the same entry of all
    new tokens of its row, unlike `KVCache.append`. Slots outside of the cache are dropped. Requires
    S, a multiple of 128.

    Args:
      caches: in HBM.
      new: for each cache ``[B, M, T, H]``, or ``[B, M, 1, T]``.
    """
    firsts, of_caches, of_new, padded = [], [], [], []
    for cache, x in zip(caches, new, strict=True):
        axis = slots_axis(cache.shape)
        tile, width = window(cache.shape, cache.dtype.itemsize, x.shape[axis])
        first = functools.partial(_first_slot, tile=tile, last=cache.shape[axis] - width)
        firsts.append(first)
        sizes = [1, *cache.shape[1:]]
        sizes[axis] = width
        of_caches.append(
            pl.BlockSpec(
                tuple(map(pl.Element, sizes)),
                lambda row, start_B, first=first, axis=axis: (
                    (row, 0, first(start_B[row]), 0)
                    if axis == 2
                    else (row, 0, 0, first(start_B[row]))
                ),
            )
        )
        if axis == 3:
            x = pad_axis(x, width - x.shape[3])
        padded.append(x)
        of_new.append(pl.BlockSpec((1, *x.shape[1:]), lambda row, start_B: (row, 0, 0, 0)))
    return pl.pallas_call(
        functools.partial(_kernel, length=new[0].shape[slots_axis(caches[0].shape)], firsts=firsts),
        out_shape=[jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(len(start_B),),
            in_specs=of_new + of_caches,
            out_specs=of_caches,
        ),
        # On both cores of a chip.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        input_output_aliases={1 + len(new) + i: i for i in range(len(caches))},
        interpret=interpret,
        name=NAME,
    )(start_B, *padded, *[in_hbm(cache, interpret=interpret) for cache in caches])


def slots_axis(shape: tuple[int, ...]) -> int:
    """Returns the axis of the slots: of scales the last one."""
    return 3 if shape[2] == 1 else 2


def window(shape: tuple[int, ...], itemsize: int, length: int) -> tuple[int, int]:
    """Returns the slots that memory moves together, and those that are moved for T tokens."""
    axis = slots_axis(shape)
    tile = LANES if axis == 3 else 32 // itemsize
    most_tiles = (length + tile - 2) // tile + 1
    return tile, min(most_tiles * tile, shape[axis])


def _first_slot(start: Array, *, tile: int, last: int) -> Array:
    """Returns the first slot of the tiles that hold the tokens of a row."""
    return pl.multiple_of(jnp.clip(start & -tile, 0, last), tile)


def _kernel(start_B, *refs, length, firsts):
    """Writes the tokens of a row over the old entries of their tiles."""
    count = len(refs) // 3
    start = start_B[pl.program_id(0)]
    news, olds, outs = refs[:count], refs[count : 2 * count], refs[2 * count :]
    for first, new, old, out in zip(firsts, news, olds, outs, strict=True):
        before = start - first(start)  # slots of the window before the first token
        write = _write_scales if slots_axis(old.shape) == 3 else _write_entries
        out[0] = write(old[0], new[0], before, length)


def _write_entries(old_MSH: Array, new_MTH: Array, before: Array, length: int) -> Array:
    """Moves the token for each slot there by a product with zeros and ones, which is exact."""
    (kv_heads, slots, _), tokens = old_MSH.shape, new_MTH.shape[1]
    is_int8 = old_MSH.dtype == jnp.int8
    parts = 4 if is_int8 else 1  # of a word, which holds that many neighbouring slots

    def token(shape, part):
        """Returns the tokens of every fourth slot."""
        return iota(shape, 1) * parts + part - before

    each = [token((kv_heads, slots // parts, tokens), part) for part in range(parts)]
    token_MST = jnp.concatenate(each, axis=1)
    is_token_MST = token_MST == iota(token_MST.shape, 2)
    # Exact; TPU v4 has no int8 products.
    rows = new_MTH.astype(jnp.bfloat16) if is_int8 else new_MTH
    moved_MSH = einsum_in_float32("mst,mth->msh", is_token_MST.astype(rows.dtype), rows)
    words = pltpu.bitcast(old_MSH, jnp.int32) if is_int8 else old_MSH.astype(jnp.float32)
    for part, moved in enumerate(jnp.split(moved_MSH, parts, axis=1)):
        token_MXH = token(words.shape, part)
        is_new = (token_MXH >= 0) & (token_MXH < length)
        if is_int8:
            byte = jnp.int32(255) << 8 * part
            moved = words & ~byte | moved.astype(jnp.int32) << 8 * part & byte
        words = jnp.where(is_new, moved, words)
    return pltpu.bitcast(words, jnp.int8) if is_int8 else words.astype(old_MSH.dtype)


def _write_scales(old_M1S: Array, new_M1S: Array, before: Array, length: int) -> Array:
    """Rolls the tokens, which are the first entries, to their slots."""
    moved_M1S = pltpu.roll(new_M1S, before & old_M1S.shape[2] - 1, 2)
    token_M1S = iota(old_M1S.shape, 2) - before
    return jnp.where((token_M1S >= 0) & (token_M1S < length), moved_M1S, old_M1S)
