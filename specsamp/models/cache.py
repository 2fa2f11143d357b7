"""Key-value caches: the cache of a layer, in several layouts, and the caches of all layers.

Attention calls the `LayerCache` of its layer and does not depend on the order of axes, the
precision or the kernels. Layers have separate arrays because an array stacked over layers is copied
in and out of a loop. Removing tokens changes lengths only; stale slots are masked by position and
overwritten later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specsamp.arrays import pad_axis
from specsamp.models.config import TransformerConfig
from specsamp.models.int8 import quantise
from specsamp.models.interface import Kernels
from specsamp.models.positions import align_distances
from specsamp.models.products import contract, soft_cap
from specsamp.models.slots import SLOTS_AXIS, cut_slots, read_moved, write_slots
from specsamp.models.visibility import Visibility
from specsamp.pytrees import pytree

Array = jax.Array

# By letters of names.
LOGICAL_AXES = {"B": "batch", "M": "kv_heads", "S": "slots", "H": "head", "1": None}
LOGICAL_AXES |= {"N": "kv_heads", "K": None, "V": None, "W": None, "X": None}  # of states
KERNEL_SLOTS = 128  # kernels read caches of a multiple of so many slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCache:
    """The keys and values of one layer, in arrays whose names end with the letters of their axes,
    keys first.

    Derived classes declare the arrays and fill them in `of`. No entry may become NaN: for masked
    slots only the scores are masked, and their values are still multiplied by 0.
    """

    kernels: Kernels | None = dataclasses.field(default=None, metadata=dict(static=True))

    @classmethod
    def of(cls, k_BMTH: Array, v_BMTH: Array) -> Self:
        """Returns a cache of T slots with these keys and values."""
        raise NotImplementedError

    @classmethod
    def zeros(
        cls, layer: TransformerConfig, batch: int, slots: int, kernels: Kernels | None = None
    ) -> Self:
        """Returns the empty cache of a layer of this shape. Every array has its own buffer, since
        donating a buffer twice is an error.
        """
        shape = batch, layer.num_kv_heads, slots, layer.head_size
        tokens = jax.ShapeDtypeStruct(shape, layer.compute_dtype)
        arrays = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(cls.of, tokens, tokens)
        )
        return dataclasses.replace(arrays, kernels=kernels)

    @classmethod
    def logical_axes(cls, kernels: Kernels | None = None) -> Self:
        """Returns the logical axis names of every array, each a `PartitionSpec`."""
        specs = {
            name: PartitionSpec(*(LOGICAL_AXES[axis] for axis in axes))
            for name, axes in cls._axes().items()
        }
        return cls(**specs, kernels=kernels)

    @classmethod
    def _axes(cls) -> dict[str, str]:
        """Returns the letters of the axes of every array, by its name."""
        names = [field.name for field in dataclasses.fields(cls) if field.name != "kernels"]
        return {name: name.rpartition("_")[2] for name in names}

    def _arrays(self, axes: str) -> dict[str, Array]:
        """Returns the arrays with these axes, by name."""
        return {name: getattr(self, name) for name, own in self._axes().items() if own == axes}

    @property
    def entries_BMSH(self) -> tuple[Array, ...]:
        """Returns keys and values, or the one array that holds both; of transposed keys the values
        alone.
        """
        return tuple(self._arrays("BMSH").values())

    @property
    def num_slots(self) -> int:
        return self.entries_BMSH[-1].shape[SLOTS_AXIS]

    @property
    def scales_BM1S(self) -> tuple[Array, ...] | None:
        """Returns the scales of int8 keys and values, float32; None for other dtypes."""
        return tuple(self._arrays("BM1S").values()) or None

    def append(self, k_BMTH: Array, v_BMTH: Array, start_B: Array) -> Self:
        """Writes T tokens of each sequence in slots ``start_B ..``; see
        `specsamp.models.slots.write_slots`.
        """
        return self._write(self.of(k_BMTH, v_BMTH), start_B)

    def compact(self, start_B: Array, rows_BT: Array, num_rows: int) -> Self:
        """Moves slots ``start_B + rows_BT`` to ``start_B ..``, see
        `specsamp.models.slots.move_slots`.
        """
        moved = self._map(lambda x, axis: read_moved(x, start_B, rows_BT, num_rows, axis))
        return self._write(moved, start_B)

    def cut(self, num_kept: int, first_B: Array, count: int, room: int) -> Self:
        """Returns a smaller cache, see `specsamp.models.slots.cut_slots`; with kernels, of whole
        blocks of slots.
        """
        room += 0 if self.kernels is None else -(num_kept + count + room) % KERNEL_SLOTS
        return self._map(lambda x, axis: cut_slots(x, num_kept, first_B, count, room, axis))

    def _map(self, function: Callable[..., Array], *others: LayerCache) -> Self:
        """Computes a function of each array, of those of other caches with its name, and of its
        axis of slots.
        """
        arrays = {
            name: function(*(getattr(cache, name) for cache in (self, *others)), axes.index("S"))
            for name, axes in self._axes().items()
        }
        return dataclasses.replace(self, **arrays)

    def _write(self, new: LayerCache, start_B: Array) -> Self:
        """Writes the slots of a smaller cache in slots ``start_B ..``."""
        if self.kernels is None or not self.kernels.take(self.num_slots, new.num_slots):
            return self._map(lambda old, new, axis: write_slots(old, new, start_B, axis), new)
        named = self._axes()
        old, added = (tuple(getattr(x, name) for name in named) for x in (self, new))
        arrays = self.kernels.write(old, added, start_B)
        return dataclasses.replace(self, **dict(zip(named, arrays, strict=True)))

    def attend(
        self,
        q_BNTH: Array,
        visible: Visibility,
        *,
        scale: float,
        distances_BNTS: Array | None = None,
        cap: float | None = None,
        sinks_N: Array | None = None,
    ) -> Array:
        """Returns each query's mean of the values, weighted by the softmax of its scores, ``[B, N,
        T, H]``.

        Args:
          visible: the mask of slots for each query.
          scale: factor of all scores, including ``distances_BNTS``.
          distances_BNTS: float32, scores by reversed distance (see `specsamp.models.positions`),
            added to the products.
          cap: soft cap of the scores, see `soft_cap`.
          sinks_N: float32, of each query head the score of a slot without a value, which takes its
            share of the softmax (gpt-oss, arXiv 2508.10925); None: there are none.
        """
        (batch, heads, length, size), (_, kv_heads, slots, _) = (
            q_BNTH.shape,
            self.entries_BMSH[-1].shape,
        )
        group = heads // kv_heads
        if (
            self.kernels is not None
            and self.kernels.take(slots, length, group)
            and not visible.needs_mask
        ):
            return self.kernels.attend(
                q_BNTH,
                self,
                visible,
                scale=scale,
                distances_BNTS=distances_BNTS,
                cap=cap,
                sinks_N=sinks_N,
            )
        # Queries that share a kv head are extra rows of one product.
        rows_shape, scales_BM1S = (batch, kv_heads, group * length), self.scales_BM1S
        keys, keys_axes = next(iter(self._axes().items()))
        q_BMRH = q_BNTH.reshape(*rows_shape, size)
        scores = contract(f"BMRH,{keys_axes}->BMRS", q_BMRH, getattr(self, keys), dtype=jnp.float32)
        if scales_BM1S is not None:
            scores = scores * scales_BM1S[0]
        scores = scores.reshape(batch, heads, length, slots)
        if distances_BNTS is not None:
            scores = scores + align_distances(distances_BNTS, visible)
        scores = scores * scale
        if cap is not None:
            scores = soft_cap(scores, cap)
        scores = jnp.where(visible.mask(slots)[:, None], scores, -jnp.inf)
        probs = softmax_with_sinks(scores, sinks_N)
        if scales_BM1S is not None:
            probs = (probs.reshape(*rows_shape, slots) * scales_BM1S[1]).reshape(scores.shape)
        probs_BMRS = probs.astype(q_BNTH.dtype).reshape(*rows_shape, slots)
        return contract("BMRS,BMSH->BMRH", probs_BMRS, self.entries_BMSH[-1]).reshape(q_BNTH.shape)


def softmax_with_sinks(scores_BNTS: Array, sinks_N: Array | None) -> Array:
    """Returns the softmax over the slots, less the share of each head's sink; None: no sinks."""
    probs_BNTS = jax.nn.softmax(scores_BNTS, axis=-1)
    if sinks_N is None:
        return probs_BNTS
    total_BNT1 = jax.nn.logsumexp(scores_BNTS, axis=-1, keepdims=True)
    return probs_BNTS * jax.nn.sigmoid(total_BNT1 - sinks_N[None, :, None, None])


@pytree
class KVCache(LayerCache):
    """A `LayerCache` of keys and values ``[B, M, S, H]``.

    For ``[B, S, M, H]`` the compiler estimates six times the cycles and twice the traffic on a TPU.
    """

    keys_BMSH: Array
    values_BMSH: Array

    @classmethod
    def of(cls, k_BMTH: Array, v_BMTH: Array) -> Self:
        return cls(keys_BMSH=k_BMTH, values_BMSH=v_BMTH)


@pytree
class TransposedKVCache(LayerCache):
    """A `LayerCache` for CPUs, with keys ``[B, M, H, S]``.

    With few queries, CPU products that contract the last axis of both sides take three times as
    long.
    """

    keys_BMHS: Array
    values_BMSH: Array

    @classmethod
    def of(cls, k_BMTH: Array, v_BMTH: Array) -> Self:
        return cls(keys_BMHS=k_BMTH.swapaxes(2, 3), values_BMSH=v_BMTH)


@pytree
class Int8KVCache(LayerCache):
    """A `LayerCache` in int8, with a scale for each token and head; for either weight order.

    The scale of a key multiplies its score, and the scale of a value multiplies its probability
    before the product with the int8 values. So the cache is never converted to a wider dtype. A
    call also attends to its own tokens in rounded form: otherwise a distribution would depend on
    how a sequence is split into calls.
    """

    keys_BMSH: Array
    values_BMSH: Array
    key_scales_BM1S: Array
    value_scales_BM1S: Array

    @classmethod
    def of(cls, k_BMTH: Array, v_BMTH: Array) -> Self:
        keys, values = quantise(k_BMTH, (3,)), quantise(v_BMTH, (3,))
        scales = dict(
            key_scales_BM1S=keys.scale.swapaxes(2, 3), value_scales_BM1S=values.scale.swapaxes(2, 3)
        )
        return cls(keys_BMSH=keys.values, values_BMSH=values.values, **scales)


@pytree
class PairedKVCache(LayerCache):
    """A `LayerCache` for kernels and heads of 64 entries: a row holds a key and behind it its
    value.

    A TPU keeps rows of 128 entries, so that two arrays of 64 would be half empty.
    """

    apart = KVCache

    pairs_BMSH: Array

    @classmethod
    def of(cls, k_BMTH: Array, v_BMTH: Array) -> Self:
        apart = cls.apart.of(k_BMTH, v_BMTH)
        return cls(pairs_BMSH=jnp.concatenate(apart.entries_BMSH, axis=3), **apart._arrays("BM1S"))

    def attend(self, q_BNTH: Array, visible: Visibility, **options: Any) -> Array:
        """See `LayerCache.attend`. The zeros of a query meet values; of the mean of rows the values
        are returned.
        """
        size = q_BNTH.shape[3]
        return super().attend(pad_axis(q_BNTH, size), visible, **options)[..., size:]


@pytree
class PairedInt8KVCache(PairedKVCache):
    """A `PairedKVCache` in int8, with the scales of `Int8KVCache`."""

    apart = Int8KVCache

    key_scales_BM1S: Array
    value_scales_BM1S: Array


PAIRED_SIZE = 64  # of heads whose keys and values share rows
CACHES = {  # by whether keys and values are pairs, and by `TransformerConfig.cache_dtype`
    (False, None): KVCache,
    (False, "int8"): Int8KVCache,
    (True, None): PairedKVCache,
    (True, "int8"): PairedInt8KVCache,
}


def kind_of_cache(
    layer: TransformerConfig, kernels: Kernels | None
) -> tuple[type[LayerCache], Kernels | None]:
    """Returns the class of a layer's cache, and the kernels for its heads."""
    kernels = kernels and kernels.for_heads(layer.head_size)
    is_paired = kernels is not None and layer.head_size == PAIRED_SIZE
    return CACHES[is_paired, layer.cache_dtype], kernels


@pytree
class TokenCache(LayerCache):
    """The tokens themselves, int32, of models that embed n-grams; without attention."""

    tokens_BS: Array


@pytree
class TransformerCache:
    """The caches of all layers; the leading axis of every leaf is the batch."""

    layers: tuple[LayerCache, ...]
    tokens: TokenCache | None = None

    def compact(self, start_B: Array, rows_BT: Array, num_rows: int) -> Self:
        """Moves slots ``start_B + rows_BT`` of all arrays to ``start_B ..``, see `move_slots`."""
        return self._map(lambda part: part.compact(start_B, rows_BT, num_rows))

    def cut(self, num_kept: int, first_B: Array, count: int, room: int) -> Self:
        """Returns a smaller cache, see `specsamp.models.slots.cut_slots`."""
        return self._map(lambda part: part.cut(num_kept, first_B, count, room))

    def _map(self, function: Callable[[LayerCache], LayerCache]) -> Self:
        return jax.tree.map(function, self, is_leaf=lambda x: isinstance(x, LayerCache))
