"""A cache of keys and values in int8, with a scale for each token and head.

A score is a product with the int8 key times the key's scale; a probability is multiplied by the scale of its value before
it meets the int8 value. So no cache is ever widened, and what is read are bytes. Tokens are rounded when they are written,
and a call attends to its own tokens as they are stored: else a distribution would depend on how a text is cut into calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from specsamp.models.cache import SlotCache, attend_to_slots
from specsamp.models.int8 import quantise
from specsamp.models.slots import SLOTS_AXIS, read_moved, write_pair, write_slots

Array = jax.Array
SLOTS_OF_SCALES = 3


def _array(dtype: Any) -> Any:
    return dataclasses.field(metadata=dict(dtype=dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8KVCache(SlotCache):
    """A `LayerCache` in int8, for either weight order; ``write`` writes keys and values, as for a `KVCache`."""

    keys_BMSH: Array = _array(jnp.int8)
    values_BMSH: Array = _array(jnp.int8)
    key_scales_BM1S: Array = _array(jnp.float32)
    value_scales_BM1S: Array = _array(jnp.float32)

    @property
    def scales_BM1S(self) -> tuple[Array, Array]:
        """Returns the scales of keys and of values."""
        return self.key_scales_BM1S, self.value_scales_BM1S

    def append(self, k_BMTH: Array, v_BMTH: Array, start_B: Array, write: Callable = write_pair) -> Self:
        keys, values = quantise(k_BMTH, (3,)), quantise(v_BMTH, (3,))
        new_scales_BM1T = [new.scale.swapaxes(2, 3) for new in (keys, values)]
        return self._write((keys.values, values.values), new_scales_BM1T, start_B, write)

    def attend(self, q_BNTH, visible, *, scale, bias_BNTS=None, cap=None) -> Array:
        keys, values = self.keys_BMSH, self.values_BMSH
        return attend_to_slots(q_BNTH, keys, "BMSH", values, visible, scale, bias_BNTS, cap, self.scales_BM1S)

    def compact(self, start_B: Array, rows_BT: Array, num_rows: int, write: Callable = write_pair) -> Self:
        def moved(arrays, axis):
            return tuple(read_moved(array, start_B, rows_BT, num_rows, axis) for array in arrays)

        rows = moved((self.keys_BMSH, self.values_BMSH), SLOTS_AXIS)
        return self._write(rows, moved(self.scales_BM1S, SLOTS_OF_SCALES), start_B, write)

    def _write(
        self, new_BMTH: tuple[Array, Array], new_scales_BM1T: Sequence[Array], start_B: Array, write: Callable
    ) -> Self:
        """Writes tokens that are in int8 already, and their scales."""
        keys_BMSH, values_BMSH = write((self.keys_BMSH, self.values_BMSH), new_BMTH, start_B)
        key_scales, value_scales = (
            write_slots(scales, new, start_B, SLOTS_OF_SCALES)
            for scales, new in zip(self.scales_BM1S, new_scales_BM1T, strict=True)
        )
        return type(self)(
            keys_BMSH=keys_BMSH, values_BMSH=values_BMSH, key_scales_BM1S=key_scales, value_scales_BM1S=value_scales
        )
