"""Writes the tokens of a call into a cache in place: only tiles that hold a new slot are read and written."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specsamp.models.kernels.common import einsum_in_float32, in_hbm

Array = jax.Array

NAME = "append_rows"  # of the kernel in compiled programs
MAX_TOKENS = 128  # of a call; with more tokens the time is that of the kernel's products


def append_rows(
    caches: tuple[Array, ...], new: tuple[Array, ...], start_B: Array, *, interpret: bool = False
) -> tuple[Array, ...]:
    """Returns the caches ``[B, M, S, H]`` with T slots of each sequence written from its own start, on one device.

    Donated caches are written in place. A new entry that is not finite spoils the same entry of all new tokens in its
    tile, unlike `KVCache.append`. Requires ``start_B + T <= S``, S a multiple of 32.

    Args:
      caches: in HBM; all of one shape and dtype.
      new: for each cache ``[B, M, T, H]``.
    """
    (batch, kv_heads, num_slots, size), length = caches[0].shape, new[0].shape[2]
    tile = tile_slots(caches[0].dtype.itemsize)
    num_tiles = (length + tile - 2) // tile + 1  # the most that the tokens can touch
    # Padded to whole tiles of tokens; the padding is not written.
    new = [jnp.pad(x, ((0, 0), (0, 0), (0, -length % tile), (0, 0))) for x in new]
    place = functools.partial(_tile_of_step, length=length, tile=tile, num_slots=num_slots)

    def index(row, step, start_B):
        return row, 0, place(start_B[row], step), 0

    of_cache = pl.BlockSpec((1, kv_heads, tile, size), index)
    of_new = pl.BlockSpec((1, kv_heads, new[0].shape[2], size), lambda row, step, start_B: (row, 0, 0, 0))
    return pl.pallas_call(
        functools.partial(_kernel, length=length, place=place),
        out_shape=[jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, num_tiles),
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


def _tile_of_step(start: Array, step: Array, *, length: int, tile: int, num_slots: int) -> Array:
    """Returns the tile of a step. The last tile may come several times, with the same result."""
    last = jnp.minimum((start + length - 1) // tile, num_slots // tile - 1)
    return jnp.minimum(start // tile + step, last)


def _kernel(start_B, *refs, length, place):
    """Writes the tokens of one tile over the old entries."""
    count = len(refs) // 3
    start, tile = start_B[pl.program_id(0)], refs[-1].shape[2]
    first = place(start, pl.program_id(1)) * tile
    for new, old, out in zip(refs[:count], refs[count : 2 * count], refs[2 * count :]):
        _, kv_heads, tokens, _ = new.shape
        # The token for each slot of the tile is moved there by a product with zeros and ones, which is exact.
        token_MSX = first - start + jax.lax.broadcasted_iota(jnp.int32, (kv_heads, tile, tokens), 1)
        is_token_MSX = token_MSX == jax.lax.broadcasted_iota(jnp.int32, token_MSX.shape, 2)
        rows = new[0].astype(jnp.bfloat16) if new.dtype == jnp.int8 else new[0]  # exact; TPU v4 has no int8 products
        moved = einsum_in_float32("msx,mxh->msh", is_token_MSX.astype(rows.dtype), rows)
        token_MSH = first - start + jax.lax.broadcasted_iota(jnp.int32, moved.shape, 1)
        is_new = (token_MSH >= 0) & (token_MSH < length)
        out[0] = jnp.where(is_new, moved.astype(out.dtype), old[0])
