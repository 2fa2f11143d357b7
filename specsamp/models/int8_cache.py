"""A cache of keys and values in int8, with a scale for each token and head.

A score is a product with the int8 key times the key's scale; a probability is multiplied by the scale of its value before
it meets the int8 value. So no cache is ever widened, and what is read are bytes. Tokens are rounded when they are written,
and a call attends to its own tokens as they are stored: else a distribution would depend on how a text is cut into calls.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specsamp.models.cache import attend_to_slots
from specsamp.models.int8 import quantise
from specsamp.models.slots import SLOTS_AXIS, move_slots, write_slots

Array = jax.Array
SLOTS_OF_SCALES = 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8KVCache:
    """A `LayerCache` in int8, of either layout of a model; scales ``[B, M, 1, S]`` are float32."""

    keys_BMSH: Array
    values_BMSH: Array
    key_scales_BM1S: Array
    value_scales_BM1S: Array

    @classmethod
    def zeros(cls, batch: int, kv_heads: int, slots: int, head_size: int, dtype: Any) -> Self:
        """Makes an empty cache, each array a buffer of its own; ``dtype`` is that of what is written."""
        shape, of_scales = (batch, kv_heads, slots, head_size), (batch, kv_heads, 1, slots)
        return cls(
            keys_BMSH=jnp.zeros(shape, jnp.int8),
            values_BMSH=jnp.zeros(shape, jnp.int8),
            key_scales_BM1S=jnp.zeros(of_scales, jnp.float32),
            value_scales_BM1S=jnp.zeros(of_scales, jnp.float32),
        )

    @classmethod
    def logical_axes(cls) -> Self:
        """Returns the logical axis names of every array, each a `PartitionSpec`."""
        axes = PartitionSpec("batch", "kv_heads", "slots", "head")
        of_scales = PartitionSpec("batch", "kv_heads", None, "slots")
        return cls(keys_BMSH=axes, values_BMSH=axes, key_scales_BM1S=of_scales, value_scales_BM1S=of_scales)

    @property
    def num_slots(self) -> int:
        return self.values_BMSH.shape[SLOTS_AXIS]

    def append(self, k_BMTH: Array, v_BMTH: Array, start_B: Array) -> Self:
        keys, values = quantise(k_BMTH, (3,)), quantise(v_BMTH, (3,))

        def write_scales(scales_BM1S, new_BMT1):
            return write_slots(scales_BM1S, new_BMT1.swapaxes(2, 3), start_B, axis=SLOTS_OF_SCALES)

        return type(self)(
            keys_BMSH=write_slots(self.keys_BMSH, keys.values, start_B),
            values_BMSH=write_slots(self.values_BMSH, values.values, start_B),
            key_scales_BM1S=write_scales(self.key_scales_BM1S, keys.scale),
            value_scales_BM1S=write_scales(self.value_scales_BM1S, values.scale),
        )

    def attend(self, q_BNTH, visible, *, scale, bias_BNTS=None, cap=None) -> Array:
        scales = self.key_scales_BM1S, self.value_scales_BM1S
        return attend_to_slots(q_BNTH, self.keys_BMSH, "BMSH", self.values_BMSH, visible, scale, bias_BNTS, cap, scales)

    def compact(self, start_B: Array, rows_BT: Array, num_rows: int) -> Self:
        def move(array, axis):
            return move_slots(array, start_B, rows_BT, num_rows, axis=axis)

        return type(self)(
            keys_BMSH=move(self.keys_BMSH, SLOTS_AXIS),
            values_BMSH=move(self.values_BMSH, SLOTS_AXIS),
            key_scales_BM1S=move(self.key_scales_BM1S, SLOTS_OF_SCALES),
            value_scales_BM1S=move(self.value_scales_BM1S, SLOTS_OF_SCALES),
        )
