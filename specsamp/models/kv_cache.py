"""The key/value cache: one pair of arrays per layer, written at every row's own offset.

Layout ``[B, M, S, H]``: for a TPU the compiler estimates six times the cycles and twice the traffic
for ``[B, S, M, H]``. Layers are separate arrays because a cache stacked over layers is copied in and
out of a loop. Taking tokens back moves lengths only; stale slots are masked by position and
overwritten later.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specsamp.models.config import TransformerConfig

Array = jax.Array

LOGICAL_AXES = ("batch", "kv_heads", "slots", "head")

# Row by row, unrolled, is the cheapest way to write up to about this many rows; beyond it the program
# grows too large and the compiler gets a loop over the rows instead.
MAX_UNROLLED_ROWS = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of all layers."""

    keys: tuple[Array, ...]  # per layer [B, M, S, H]
    values: tuple[Array, ...]  # per layer [B, M, S, H]

    @classmethod
    def zeros(cls, config: TransformerConfig, batch: int, slots: int) -> KVCache:
        shape = (batch, config.num_kv_heads, slots, config.head_size)
        # Each its own buffer: donating one buffer twice is an error.
        fill = lambda: tuple(jnp.zeros(shape, config.compute_dtype) for _ in range(config.num_layers))
        return cls(keys=fill(), values=fill())


def write_rows(cache_BMSH: Array, new_BMTH: Array, start_B: Array) -> Array:
    """Writes T slots of each row from that row's own start; requires ``start_B + T <= S``.

    (An update that would pass the end is moved back by XLA and overwrites earlier slots: hence the
    headroom of the loop's buffers.)
    """
    batch, _, slots, _ = cache_BMSH.shape
    zero = jnp.zeros((), start_B.dtype)
    if new_BMTH.shape[:3:2] == (1, 1) and slots > 1:
        # A single slot of a single row is rewritten together with a neighbour. Written alone, XLA's CPU
        # backend fuses the update into its reader and into the carry, and copies the cache for each
        # (eight copies per layer and step; tests/decoding/test_compiled.py).
        at = (zero, zero, jnp.minimum(start_B[0], slots - 2), zero)
        old_BM2H = jax.lax.dynamic_slice(cache_BMSH, at, new_BMTH.shape[:2] + (2,) + new_BMTH.shape[3:])
        here = (jnp.arange(2) + at[2] == start_B[0])[None, None, :, None]
        return jax.lax.dynamic_update_slice(cache_BMSH, jnp.where(here, new_BMTH, old_BM2H), at)
    if batch <= MAX_UNROLLED_ROWS:
        for b in range(batch):
            at = (jnp.full((), b, start_B.dtype), zero, start_B[b], zero)
            cache_BMSH = jax.lax.dynamic_update_slice(cache_BMSH, new_BMTH[b : b + 1], at)
        return cache_BMSH
    write = lambda cache, new, start: jax.lax.dynamic_update_slice(cache, new, (zero, start, zero))
    return jax.vmap(write)(cache_BMSH, new_BMTH, start_B)
