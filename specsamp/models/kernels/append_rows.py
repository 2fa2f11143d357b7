"""Writes the tokens of a call into a cache where it lies: only tiles that hold a new slot are read and written."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specsamp.models.kernels.common import in_hbm, product

Array = jax.Array

NAME = "append_rows"  # of the kernel in compiled programs
TILE = 32  # slots that are moved together; whole tiles of memory in every dtype
MAX_TOKENS = 128  # of a call; beyond, it is bound by its products


def append_rows(
    caches: tuple[Array, ...], new: tuple[Array, ...], start_B: Array, *, interpret: bool = False
) -> tuple[Array, ...]:
    """Returns the caches ``[B, M, S, H]`` with T slots of each row written from that row's own start, on one device.

    Where the caches are donated, in place. Requires ``start_B + T <= S``, S a multiple of `TILE`.

    Args:
      caches: in HBM; all of one shape and dtype.
      new: for each cache ``[B, M, T, H]``.
    """
    (batch, kv_heads, num_slots, size), length = caches[0].shape, new[0].shape[2]
    num_tiles = (length + TILE - 2) // TILE + 1  # that the slots can touch, wherever they start
    # Whole tiles of tokens: zeros behind them are written nowhere.
    new = [jnp.pad(x, ((0, 0), (0, 0), (0, -length % TILE), (0, 0))) for x in new]

    def index(row, tile, start_B):
        return row, 0, _tile(start_B[row], tile, length, num_slots), 0

    of_cache = pl.BlockSpec((1, kv_heads, TILE, size), index)
    of_new = pl.BlockSpec((1, kv_heads, new[0].shape[2], size), lambda row, tile, start_B: (row, 0, 0, 0))
    return pl.pallas_call(
        functools.partial(_kernel, length=length, num_slots=num_slots),
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


def _tile(start: Array, tile: Array, length: int, num_slots: int) -> Array:
    """Returns which tile a step is for. The last one may come several times: each time it becomes the same."""
    last = jnp.minimum((start + length - 1) // TILE, num_slots // TILE - 1)
    return jnp.minimum(start // TILE + tile, last)


def _kernel(start_B, *refs, length, num_slots):
    """Writes the tokens that belong into one tile, over what the tile held."""
    count = len(refs) // 3
    row, tile = pl.program_id(0), pl.program_id(1)
    start = start_B[row]
    first = _tile(start, tile, length, num_slots) * TILE
    for new, old, out in zip(refs[:count], refs[count : 2 * count], refs[2 * count :]):
        _, kv_heads, tokens, _ = new.shape
        # Which token a slot of the tile receives: moved there by a product with zeros and ones, which is exact.
        token_MSX = first - start + jax.lax.broadcasted_iota(jnp.int32, (kv_heads, TILE, tokens), 1)
        is_token_MSX = token_MSX == jax.lax.broadcasted_iota(jnp.int32, token_MSX.shape, 2)
        moved = product("msx,mxh->msh", is_token_MSX.astype(new.dtype), new[0])
        token_MSH = first - start + jax.lax.broadcasted_iota(jnp.int32, moved.shape, 1)
        is_new = (token_MSH >= 0) & (token_MSH < length)
        out[0] = jnp.where(is_new, moved.astype(out.dtype), old[0])
