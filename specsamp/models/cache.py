"""The memory of a model between calls: a cache for each layer, and the caches of all layers.

Attention calls the `LayerCache` of its layer, which alone knows the order of axes, the precision and the kernels.
Layers have separate arrays because an array stacked over layers is copied in and out of a loop. Taking tokens
back moves lengths only; stale slots are masked by position and overwritten later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specsamp.models.products import contract, soft_cap
from specsamp.models.slots import SLOTS_AXIS, move_slots, read_moved, write_pair, write_slots
from specsamp.models.visibility import Visibility

Array = jax.Array

AXES = {"B": "batch", "M": "kv_heads", "S": "slots", "H": "head", "1": None}  # logical axes, by letters of names


class LayerCache(Protocol):
    """Keeps the keys and values of one layer; a pytree whose every leaf leads with the batch.

    Nothing in it may become NaN: slots that are not seen are masked by their scores, not by their values.
    """

    @property
    def num_slots(self) -> int:
        """Returns S."""

    def append(self, k_BMTH: Array, v_BMTH: Array, start_B: Array) -> Self:
        """Writes T tokens of each row in slots ``start_B ..``; requires ``start_B + T <= S``."""

    def attend(
        self,
        q_BNTH: Array,
        visible: Visibility,
        *,
        scale: float,
        bias_BNTS: Array | None = None,
        cap: float | None = None,
    ) -> Array:
        """Returns each query's mean of the values, weighted by the softmax of its scores, ``[B, N, T, H]``.

        Args:
          visible: the slots each query sees.
          scale: of the scores, bias included.
          bias_BNTS: float32, added to the products of queries and keys.
          cap: soft cap of the scores, see `soft_cap`.
        """

    def compact(self, start_B: Array, rows_BT: Array, num_rows: int) -> Self:
        """Moves slots ``start_B + rows_BT`` to ``start_B ..``, see `specsamp.models.slots.move_slots`."""


class SlotCache:
    """Base of the caches of a layer: dataclasses of arrays whose names end with the letters of their `AXES`."""

    @classmethod
    def zeros(cls, batch: int, kv_heads: int, slots: int, head_size: int, dtype: Any) -> Self:
        """Makes an empty cache. No two arrays share a buffer: donating a buffer twice is an error."""
        sizes = {"B": batch, "M": kv_heads, "S": slots, "H": head_size, "1": 1}
        arrays = {}
        for field in dataclasses.fields(cls):
            shape = [sizes[letter] for letter in field.name.rpartition("_")[2]]
            arrays[field.name] = jnp.zeros(shape, field.metadata.get("dtype", dtype))
        return cls(**arrays)

    @classmethod
    def logical_axes(cls) -> Self:
        """Returns the logical axis names of every array, each a `PartitionSpec`."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: PartitionSpec(*(AXES[letter] for letter in name.rpartition("_")[2])) for name in names})

    @property
    def num_slots(self) -> int:
        return self.values_BMSH.shape[SLOTS_AXIS]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache(SlotCache):
    """A `LayerCache` of keys and values as they are; ``write`` writes both, see `write_pair`.

    For ``[B, S, M, H]`` the compiler estimates six times the cycles and twice the traffic on a TPU.
    """

    keys_BMSH: Array
    values_BMSH: Array

    def append(self, k_BMTH: Array, v_BMTH: Array, start_B: Array, write: Callable = write_pair) -> Self:
        keys_BMSH, values_BMSH = write((self.keys_BMSH, self.values_BMSH), (k_BMTH, v_BMTH), start_B)
        return type(self)(keys_BMSH=keys_BMSH, values_BMSH=values_BMSH)

    def attend(self, q_BNTH, visible, *, scale, bias_BNTS=None, cap=None) -> Array:
        return attend_to_slots(q_BNTH, self.keys_BMSH, "BMSH", self.values_BMSH, visible, scale, bias_BNTS, cap)

    def compact(self, start_B: Array, rows_BT: Array, num_rows: int, write: Callable = write_pair) -> Self:
        moved = (read_moved(x, start_B, rows_BT, num_rows) for x in (self.keys_BMSH, self.values_BMSH))
        return self.append(*moved, start_B, write)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TransposedKVCache(SlotCache):
    """A `LayerCache` for CPUs, with keys ``[B, M, H, S]``.

    With few queries a CPU's products take three times as long when both sides contract their last axis.
    """

    keys_BMHS: Array
    values_BMSH: Array

    def append(self, k_BMTH: Array, v_BMTH: Array, start_B: Array) -> Self:
        return type(self)(
            keys_BMHS=write_slots(self.keys_BMHS, k_BMTH.swapaxes(2, 3), start_B, axis=3),
            values_BMSH=write_slots(self.values_BMSH, v_BMTH, start_B),
        )

    def attend(self, q_BNTH, visible, *, scale, bias_BNTS=None, cap=None) -> Array:
        return attend_to_slots(q_BNTH, self.keys_BMHS, "BMHS", self.values_BMSH, visible, scale, bias_BNTS, cap)

    def compact(self, start_B: Array, rows_BT: Array, num_rows: int) -> Self:
        return type(self)(
            keys_BMHS=move_slots(self.keys_BMHS, start_B, rows_BT, num_rows, axis=3),
            values_BMSH=move_slots(self.values_BMSH, start_B, rows_BT, num_rows),
        )


def attend_to_slots(
    q_BNTH: Array,
    keys: Array,
    keys_axes: str,
    values_BMSH: Array,
    visible: Visibility,
    scale: float,
    bias_BNTS: Array | None,
    cap: float | None,
    scales_BM1S: tuple[Array, Array] | None = None,
) -> Array:
    """Computes `LayerCache.attend` from arrays.

    Args:
      keys: with the axes ``keys_axes``, BMSH or BMHS.
      scales_BM1S: float32, that keys and values have still to be multiplied by; None: they are what they are.
    """
    (batch, heads, length, size), (_, kv_heads, slots, _) = q_BNTH.shape, values_BMSH.shape
    # Queries that share a kv head are extra rows of one product.
    rows_shape = (batch, kv_heads, heads // kv_heads * length)
    q_BMRH = q_BNTH.reshape(*rows_shape, size)
    scores = contract(f"BMRH,{keys_axes}->BMRS", q_BMRH, keys, dtype=jnp.float32)
    if scales_BM1S is not None:
        scores = scores * scales_BM1S[0]
    scores = scores.reshape(batch, heads, length, slots)
    if bias_BNTS is not None:
        scores = scores + bias_BNTS
    scores = scores * scale
    if cap is not None:
        scores = soft_cap(scores, cap)
    scores = jnp.where(visible.mask(slots)[:, None], scores, -jnp.inf)
    probs = jax.nn.softmax(scores, axis=-1)
    if scales_BM1S is not None:
        probs = (probs.reshape(*rows_shape, slots) * scales_BM1S[1]).reshape(scores.shape)
    probs = probs.astype(q_BNTH.dtype)
    mixed_BMRH = contract("BMRS,BMSH->BMRH", probs.reshape(*rows_shape, slots), values_BMSH)
    return mixed_BMRH.reshape(batch, heads, length, size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerCache:
    """The caches of all layers; every leaf leads with the batch."""

    layers: tuple[LayerCache, ...]
    tokens_BS: Array | None = None  # int32, the tokens themselves, of models that embed n-grams

    def compact(self, start_B: Array, rows_BT: Array, num_rows: int) -> Self:
        """Moves slots ``start_B + rows_BT`` of everything to ``start_B ..``, see `move_slots`."""
        tokens_BS = self.tokens_BS
        if tokens_BS is not None:
            tokens_BS = move_slots(tokens_BS[:, None, :, None], start_B, rows_BT, num_rows)[:, 0, :, 0]
        layers = tuple(layer.compact(start_B, rows_BT, num_rows) for layer in self.layers)
        return type(self)(layers=layers, tokens_BS=tokens_BS)
