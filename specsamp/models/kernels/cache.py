"""A cache whose attention and whose writes are kernels, on one device or on the shards of a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec

from specsamp import validate
from specsamp.models.cache import KVCache, LayerCache
from specsamp.models.int8_cache import Int8KVCache
from specsamp.models.interface import MeshLayout
from specsamp.models.kernels.append_rows import MAX_TOKENS, append_rows
from specsamp.models.kernels.common import LANES
from specsamp.models.kernels.decode_attention import MAX_ROWS, SeenSlots, decode_attention
from specsamp.models.slots import write_pair

Array = jax.Array

ATTENTION = ("plain", "kernel")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """Says how a model's caches call kernels; static.

    Attributes:
      layout: of the model over a mesh, each of whose devices calls the kernels for its own heads; None: one device.
      interpret: runs the kernels on the CPU, slowly, for tests.
    """

    layout: MeshLayout | None = None
    interpret: bool = False

    def wrap(self, cache: LayerCache, head_size: int) -> LayerCache:
        """Returns the cache (or the names of its axes) with kernels; itself if they do not take such heads."""
        if head_size % LANES:
            _say_once(f"attention is not a kernel: heads of {head_size} entries are no multiple of {LANES}")
            return cache
        return KernelCache(cache=cache, kernels=self)

    def per_device(self, function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """Returns a kernel applied on each device to its part of the arrays."""
        function = functools.partial(function, interpret=self.interpret)
        return function if self.layout is None else self.layout.per_device(function, in_specs, out_specs)

    def heads_spec(self, heads: int, kv_heads: int) -> PartitionSpec:
        """Returns how queries are split: as far as kv heads are, and further if a device has a single kv head."""
        if self.layout is None:
            return PartitionSpec()
        of_kv = self.kv_heads_spec(kv_heads)
        _, on_device = NamedSharding(self.layout.mesh, of_kv).shard_shape((1, kv_heads))
        return self.layout.spec(PartitionSpec(None, "heads"), (1, heads)) if on_device == 1 else of_kv

    def kv_heads_spec(self, kv_heads: int) -> PartitionSpec:
        """Returns how caches are split."""
        if self.layout is None:
            return PartitionSpec()
        return self.layout.spec(PartitionSpec(None, "kv_heads"), (1, kv_heads))


def choose_kernels(attention: str, backend: str | None = None) -> Kernels | None:
    """Returns the kernels that a word of `ATTENTION` stands for.

    Args:
      attention: "kernel", or "plain", which is the default everywhere until a TPU has run the kernels.
      backend: that programs are compiled for; None: the default one.

    Raises:
      ValueError: an unknown word, or "kernel" where there is no TPU.
    """
    backend = backend or jax.default_backend()
    validate.choice("attention", attention, ATTENTION)
    if attention == "kernel" and backend != "tpu":
        raise ValueError(f"attention 'kernel' is for TPUs, and this is a {backend}: choose plain")
    return Kernels() if attention == "kernel" else None


@functools.cache
def _say_once(text: str) -> None:
    logging.warning(text)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCache:
    """A `LayerCache` that is read as far as it is alive and written where it lies.

    Calls of many tokens, which read prompts, are those of the cache within; so are all calls of a cache whose slots
    are no multiple of 128.
    """

    cache: KVCache | Int8KVCache
    kernels: Kernels = dataclasses.field(metadata=dict(static=True))

    @property
    def num_slots(self) -> int:
        return self.cache.num_slots

    def append(self, k_BMTH: Array, v_BMTH: Array, start_B: Array) -> Self:
        write = self._write if self._takes(k_BMTH.shape[2]) else write_pair
        return dataclasses.replace(self, cache=self.cache.append(k_BMTH, v_BMTH, start_B, write))

    def attend(self, q_BNTH, visible, *, scale, bias_BNTS=None, cap=None) -> Array:
        (_, heads, length, _), cache = q_BNTH.shape, self.cache
        kv_heads = cache.keys_BMSH.shape[1]
        if not self._takes(length) or heads // kv_heads * length > MAX_ROWS:
            return cache.attend(q_BNTH, visible, scale=scale, bias_BNTS=bias_BNTS, cap=cap)
        of_heads, of_cache = self.kernels.heads_spec(heads, kv_heads), self.kernels.kv_heads_spec(kv_heads)
        attend = functools.partial(decode_attention, scale=scale, cap=cap)
        in_specs = (of_heads, of_cache, of_cache, PartitionSpec(), of_heads, of_cache)
        attend = self.kernels.per_device(attend, in_specs, of_heads)
        scales_BM1S = cache.scales_BM1S if isinstance(cache, Int8KVCache) else None
        return attend(q_BNTH, cache.keys_BMSH, cache.values_BMSH, SeenSlots.of(visible), bias_BNTS, scales_BM1S)

    def compact(self, start_B: Array, rows_BT: Array, num_rows: int) -> Self:
        write = self._write if self._takes(rows_BT.shape[1]) else write_pair
        return dataclasses.replace(self, cache=self.cache.compact(start_B, rows_BT, num_rows, write))

    def _write(self, caches: tuple[Array, Array], new: tuple[Array, Array], start_B: Array) -> tuple[Array, Array]:
        """Writes keys and values as `write_pair` does, in place."""
        split = (self.kernels.kv_heads_spec(new[0].shape[1]),) * 2
        return self.kernels.per_device(append_rows, (split, split, PartitionSpec()), split)(caches, new, start_B)

    def _takes(self, length: int) -> bool:
        """Returns whether calls of ``length`` tokens are those of kernels."""
        if self.num_slots % LANES:
            _say_once(f"attention is not a kernel: {self.num_slots} slots are no multiple of {LANES}")
        return self.num_slots % LANES == 0 and length <= MAX_TOKENS
