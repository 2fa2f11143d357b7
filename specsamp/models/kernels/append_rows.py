"""Writes the tokens of a call into a cache in place: only tiles that hold a new slot are read and
written.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specsamp.jax_names import pl, pltpu
from specsamp.models.kernels.common import einsum_in_float32, in_hbm

Array = jax.Array

NAME = "append_rows"  # of the kernel in compiled programs
MAX_TOKENS = 128  # of a call; with more tokens the time is that of the kernel's products


def append_rows(
    caches: tuple[Array, ...], new: tuple[Array, ...], start_B: Array, *, interpret: bool = False
) -> tuple[Array, ...]:
    """Returns the caches ``[B, M, S, H]`` with T slots of each sequence written from its own start,
    on one device.

    Donated caches are written in place. A new entry that is not finite spoils the same entry of all
    new tokens of its row, unlike `KVCache.append`. Slots outside of the cache are dropped. Requires
    S, a multiple of 32.

    Args:
      caches: in HBM; all of one shape and dtype.
      new: for each cache ``[B, M, T, H]``.
    """
    (batch, kv_heads, num_slots, size), length = caches[0].shape, new[0].shape[2]
    tile = tile_slots(caches[0].dtype.itemsize)
    num_tiles = min(most_tiles(length, tile), num_slots // tile)
    first = functools.partial(_first_slot, tile=tile, last=num_slots - num_tiles * tile)
    of_cache = pl.BlockSpec(
        tuple(map(pl.Element, (1, kv_heads, num_tiles * tile, size))),
        lambda row, start_B: (row, 0, first(start_B[row]), 0),
    )
    of_new = pl.BlockSpec((1, kv_heads, new[0].shape[2], size), lambda row, start_B: (row, 0, 0, 0))
    return pl.pallas_call(
        functools.partial(_kernel, length=length, first=first),
        out_shape=[jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch,),
            in_specs=[of_new] * len(new) + [of_cache] * len(caches),
            out_specs=[of_cache] * len(caches),
        ),
        input_output_aliases={1 + len(new) + i: i for i in range(len(caches))},
        interpret=interpret,
        name=NAME,
    )(start_B, *new, *[in_hbm(cache, interpret=interpret) for cache in caches])


def tile_slots(itemsize: int) -> int:
    """Returns the number of slots that memory moves together."""
    return 32 // itemsize


def most_tiles(length: int, tile: int) -> int:
    """Returns the most tiles that so many tokens can touch."""
    return (length + tile - 2) // tile + 1


def _first_slot(start: Array, *, tile: int, last: int) -> Array:
    """Returns the first slot of the tiles that hold the tokens of a row."""
    return pl.multiple_of(jnp.clip(start & -tile, 0, last), tile)


def _kernel(start_B, *refs, length, first):
    """Writes the tokens of a row over the old entries of their tiles."""
    count = len(refs) // 3
    start, slots = start_B[pl.program_id(0)], refs[-1].shape[2]
    first = first(start)
    for new, old, out in zip(refs[:count], refs[count : 2 * count], refs[2 * count :]):
        _, kv_heads, tokens, _ = new.shape
        # The token for each slot of the tiles is moved there by a product with zeros and ones,
        # which is exact.
        token_MSX = (
            first - start + jax.lax.broadcasted_iota(jnp.int32, (kv_heads, slots, tokens), 1)
        )
        is_token_MSX = token_MSX == jax.lax.broadcasted_iota(jnp.int32, token_MSX.shape, 2)
        # Exact; TPU v4 has no int8 products.
        rows = new[0].astype(jnp.bfloat16) if new.dtype == jnp.int8 else new[0]
        moved = einsum_in_float32("msx,mxh->msh", is_token_MSX.astype(rows.dtype), rows)
        token_MSH = first - start + jax.lax.broadcasted_iota(jnp.int32, moved.shape, 1)
        is_new = (token_MSH >= 0) & (token_MSH < length)
        out[0] = jnp.where(is_new, moved, old[0].astype(jnp.float32)).astype(out.dtype)
