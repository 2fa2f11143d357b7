"""The key/value cache: one pair of arrays per layer, written at every row's own offset.

Layout ``[B, M, S, H]``: for a TPU the compiler estimates six times the cycles and twice the traffic
for ``[B, S, M, H]``. A CPU wants keys as ``[B, M, H, S]``: with few queries its products are three
times as slow when both sides contract their last axis. Layers are separate arrays because a cache
stacked over layers is copied in and out of a loop. Taking tokens back moves lengths only; stale slots
are masked by position and overwritten later.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specsamp.models.compiling import MAX_UNROLLED_ROWS
from specsamp.models.config import TransformerConfig

Array = jax.Array

SLOTS_AXIS = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of all layers."""

    keys: tuple[Array, ...]  # per layer [B, M, S, H], or [B, M, H, S]
    values: tuple[Array, ...]  # per layer [B, M, S, H]
    tokens_BS: Array | None = None  # int32, of models that embed n-grams

    @classmethod
    def zeros(cls, config: TransformerConfig, batch: int, slots: int, transposed_keys: bool = False) -> KVCache:
        heads, size = config.num_kv_heads, config.head_size

        # Each its own buffer: donating one buffer twice is an error.
        def fill(*shape):
            return tuple(jnp.zeros(shape, config.compute_dtype) for _ in range(config.num_layers))

        keys = fill(batch, heads, size, slots) if transposed_keys else fill(batch, heads, slots, size)
        tokens_BS = jnp.zeros((batch, slots), jnp.int32) if config.ngram_rows else None
        return cls(keys=keys, values=fill(batch, heads, slots, size), tokens_BS=tokens_BS)

    @classmethod
    def logical_axes(cls, config: TransformerConfig, transposed_keys: bool = False) -> KVCache:
        """The logical axis names of every array of `zeros`, each a `PartitionSpec`."""
        values = PartitionSpec("batch", "kv_heads", "slots", "head")
        keys = PartitionSpec("batch", "kv_heads", "head", "slots") if transposed_keys else values

        def per_layer(axes):
            return (axes,) * config.num_layers

        tokens_BS = PartitionSpec("batch", "slots") if config.ngram_rows else None
        return cls(keys=per_layer(keys), values=per_layer(values), tokens_BS=tokens_BS)


def write_slots(cache_BMSH: Array, new_BMTH: Array, start_B: Array, axis: int = SLOTS_AXIS) -> Array:
    """Writes T slots of each row from that row's own start; requires ``start_B + T <= S``.

    Args:
      axis: of the slots, 2, or 3 for transposed keys.

    (An update that would pass the end is moved back by XLA and overwrites earlier slots: hence the
    headroom of the loop's buffers.)
    """
    batch, slots = cache_BMSH.shape[0], cache_BMSH.shape[axis]
    zero = jnp.zeros((), start_B.dtype)

    def place(row, start):
        return (row, zero, start, zero) if axis == SLOTS_AXIS else (row, zero, zero, start)

    if (batch, new_BMTH.shape[axis]) == (1, 1) and slots > 1:
        # A single slot of a single row is rewritten together with a neighbour. Written alone, XLA's CPU
        # backend fuses the update into its reader and into the carry, and copies the cache for each
        # (eight copies per layer and step; tests/decoding/test_compiled.py).
        first = jnp.minimum(start_B[0], slots - 2)
        two = tuple(2 if i == axis else n for i, n in enumerate(new_BMTH.shape))
        old_BM2H = jax.lax.dynamic_slice(cache_BMSH, place(zero, first), two)
        here = (jnp.arange(2) + first == start_B[0]).reshape([2 if i == axis else 1 for i in range(4)])
        return jax.lax.dynamic_update_slice(cache_BMSH, jnp.where(here, new_BMTH, old_BM2H), place(zero, first))
    if batch <= MAX_UNROLLED_ROWS:
        for b in range(batch):
            at = place(jnp.full((), b, start_B.dtype), start_B[b])
            cache_BMSH = jax.lax.dynamic_update_slice(cache_BMSH, new_BMTH[b : b + 1], at)
        return cache_BMSH

    def write(cache, new, start):
        return jax.lax.dynamic_update_slice(cache, new, place(zero, start)[1:])

    return jax.vmap(write)(cache_BMSH, new_BMTH, start_B)
