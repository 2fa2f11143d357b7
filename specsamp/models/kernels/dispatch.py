"""The kernels of a model: attention over caches, writes to them, experts, norms, rotations, warps
and reduced vocabularies; also on a mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import PartitionSpec

from specsamp import validate
from specsamp.models.cache import PAIRED_SIZE, LayerCache
from specsamp.models.config import RecurrentConfig, TransformerConfig
from specsamp.models.interface import DeviceLayout, Kernels
from specsamp.models.kernels.append_rows import MAX_TOKENS, append_rows
from specsamp.models.kernels.common import (
    LANES,
    MAX_SMALL,
    WARPS,
    in_one_kernel,
    stream_steps,
)
from specsamp.models.kernels.decode_attention import MAX_ROWS, SeenSlots, decode_attention
from specsamp.models.kernels.delta_step import delta_step
from specsamp.models.kernels.expand_rows import expand_rows
from specsamp.models.kernels.mix_experts import mix_experts, part_width
from specsamp.models.positions import align_distances
from specsamp.models.recurrent import RecurrentCache
from specsamp.models.visibility import Visibility

Array = jax.Array

ATTENTION = ("auto", "plain", "kernel")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PallasKernels(Kernels):
    """Says how a model calls kernels; static.

    Calls of many tokens, which read prompts, have kernels for norms alone; so have all caches whose
    slots are no multiple of 128. Heads of 64 entries have a `specsamp.models.cache.PairedKVCache`.

    Attributes:
      layout: of the model; over a mesh each device calls the kernels for its own heads.
      interpret: runs the kernels on the CPU, slowly, for tests.
    """

    layout: DeviceLayout = DeviceLayout()
    interpret: bool = False

    @property
    def cores(self) -> int:
        """Returns how many cores a device has: on TPU v4 and v5p two."""
        return getattr(self.layout.device, "num_cores", None) or 1

    def for_heads(self, head_size: int) -> PallasKernels | None:
        if head_size % LANES and head_size != PAIRED_SIZE:
            say_once(
                f"attention is not a kernel: heads of {head_size} entries are neither "
                f"{PAIRED_SIZE} nor a multiple of {LANES}"
            )
            return None
        return self

    def take(self, num_slots: int, length: int, group: int = 1) -> bool:
        """Returns whether kernels do a call of ``length`` tokens, with ``group`` queries for each
        kv head.
        """
        if num_slots % LANES:
            say_once(f"attention is not a kernel: {num_slots} slots are no multiple of {LANES}")
        return num_slots % LANES == 0 and length <= MAX_TOKENS and group * length <= MAX_ROWS

    def attend(
        self,
        q_BNTH: Array,
        cache: LayerCache,
        visible: Visibility,
        *,
        scale: float,
        distances_BNTS: Array | None,
        cap: float | None,
        sinks_N: Array | None,
    ) -> Array:
        """Computes `LayerCache.attend`, and reads the cache as far as it is alive."""
        attend = functools.partial(
            decode_attention, scale=scale, cap=cap, cores=self.cores, interpret=self.interpret
        )
        kv_heads = PartitionSpec(None, "kv_heads"), cache.entries_BMSH[0].shape[:2]
        of_heads = of_cache = self.layout.spec(*kv_heads)
        if self.layout.part_shape(*kv_heads)[1] == 1:  # devices with the same kv head share queries
            of_heads = self.layout.spec(PartitionSpec(None, "heads"), q_BNTH.shape[:2])
        in_specs = (of_heads, of_cache, PartitionSpec(), of_heads, of_cache, of_heads)
        attend = self.layout.per_device(attend, in_specs, of_heads)
        if distances_BNTS is not None and visible.block is not None:
            distances_BNTS = align_distances(distances_BNTS, visible)
        return attend(
            q_BNTH,
            cache.entries_BMSH,
            SeenSlots.of(visible),
            distances_BNTS,
            cache.scales_BM1S,
            None if sinks_N is None else sinks_N[None],
        )

    def write(
        self, caches: tuple[Array, ...], new: tuple[Array, ...], start_B: Array
    ) -> tuple[Array, ...]:
        """Writes keys and values ``[B, M, T, H]``, and scales ``[B, M, 1, T]``, in place, in slots
        ``start_B ..`` of their arrays.
        """
        append = functools.partial(append_rows, interpret=self.interpret)
        split = self.layout.spec(PartitionSpec(None, "kv_heads"), new[0].shape[:2])
        append = self.layout.per_device(append, (split, split, PartitionSpec()), split)
        return append(caches, new, start_B)

    def take_small(self, x: Array) -> bool:
        """Returns whether operations on ``[..., T, X]`` are done by one kernel: each alone would
        cost what its start costs.
        """
        *rest, length, size = x.shape
        padded = math.prod(rest) * -(-length // 8) * 8 * size  # to whole registers
        is_few = padded <= MAX_SMALL or 1 < stream_steps(x.shape) <= MAX_TOKENS
        return is_few and size % LANES == 0

    def fuse(self, function: Callable, operands: tuple, axes: tuple[str | None, ...]) -> Any:
        """Computes a function of arrays and trees of arrays; ``axes`` split axis 1 of the first
        operands, and of the results.
        """
        compute = functools.partial(in_one_kernel, function, interpret=self.interpret)
        specs = [
            self.layout.spec(PartitionSpec(None, axis), x.shape[:2])
            for axis, x in zip(axes, operands)
        ]
        rest = [PartitionSpec()] * (len(operands) - len(specs))
        return self.layout.per_device(
            compute, (*specs, *rest), tuple(specs) if len(specs) > 1 else specs[0]
        )(*operands)

    def row_by_row(self, function: Callable, x: Array, numbers: Any) -> Array:
        """Computes a function of ``[..., X, Y]`` and a tree of ``[..., 1, 1]``, row by row; a
        layout splits the first axis.
        """

        def compute(*operands):
            flat = jax.tree.map(lambda each: each.reshape(-1, *each.shape[-2:]), operands)
            made = in_one_kernel(
                function, *flat, interpret=self.interpret, name=WARPS, steps=len(flat[0])
            )
            return made.reshape(operands[0].shape)

        rows = self.layout.spec(PartitionSpec("rows"), x.shape[:1])
        return self.layout.per_device(compute, (rows, rows), rows)(x, numbers)

    def expand(self, logits: Array, ranks_1V: Array, first_J: Array) -> Array:
        """Returns logits ``[..., V]`` of logits ``[..., U]``; a layout splits the first axis."""

        def compute(logits, ranks_1V, first_J):
            flat_RU = logits.reshape(-1, logits.shape[-1]).astype(jnp.float32)
            made_RV = expand_rows(flat_RU, ranks_1V, first_J, interpret=self.interpret)
            return made_RV.reshape(*logits.shape[:-1], -1)

        rows, whole = self.layout.spec(PartitionSpec("rows"), logits.shape[:1]), PartitionSpec()
        compute = self.layout.per_device(compute, (rows, whole, whole), rows)
        return compute(logits, ranks_1V, first_J)

    def take_experts(self, tokens: int, part: tuple[int, int, int], dtype: jnp.dtype) -> bool:
        """Returns whether a kernel mixes experts with matrices ``[E', F, D]`` on a device for so
        many tokens.
        """
        _, inner, width = part
        fits = width % (LANES // 2) == 0 and part_width(inner, width, dtype.itemsize) is not None
        if not fits:
            say_once(
                f"experts are not a kernel: a device has matrices of {inner} x {width} in {dtype}"
            )
        return fits and tokens <= MAX_TOKENS

    def mix_experts(
        self,
        config: TransformerConfig,
        x_RD: Array,
        logits_RE: Array,
        stacked: dict[str, Any],
        first: Array,
    ) -> Array:
        """Routes tokens, and returns the sum of the results of the experts ``first ..`` of this
        device, ``[R, D]`` float32.
        """
        return mix_experts(config, x_RD, logits_RE, stacked, first, interpret=self.interpret)

    def take_delta(self, shape: RecurrentConfig) -> bool:
        """Returns whether a kernel does steps of the gated delta rule; each device has the value
        heads of its key heads.
        """
        fits = shape.key_size % LANES == shape.value_size % LANES == 0
        counts = shape.num_key_heads, shape.num_value_heads
        specs = [self.layout.spec(PartitionSpec("kv_heads"), (count,)) for count in counts]
        fits &= specs[0] == specs[1]
        if not fits:
            say_once(f"the gated delta rule is not a kernel for {shape}")
        return fits

    def step_delta(
        self,
        config: TransformerConfig,
        x_BMTX: Array,
        start_B: Array,
        vectors: tuple[Array, Array, Array],
        cache: RecurrentCache,
    ) -> tuple[Array, RecurrentCache]:
        """Computes `specsamp.models.recurrent.mix`, and writes the cache in place."""
        step = functools.partial(delta_step, config, interpret=self.interpret)
        heads = self.layout.spec(PartitionSpec("kv_heads"), x_BMTX.shape[1:2])
        of_cache = PartitionSpec(None, *heads)
        of_all = of_cache, of_cache, PartitionSpec()
        in_specs = of_cache, PartitionSpec(), (heads, heads, PartitionSpec()), of_all
        step = self.layout.per_device(step, in_specs, (PartitionSpec(None, None, *heads), *of_all))
        *vectors, scale_V = vectors
        arrays = cache.state_BNKV, cache.inputs_BMWX, cache.position_B
        mixed_BTX, state_BNKV, inputs_BMWX, position_B = step(
            x_BMTX, start_B, (*vectors, scale_V[None]), arrays
        )
        return mixed_BTX, RecurrentCache(
            state_BNKV=state_BNKV, inputs_BMWX=inputs_BMWX, position_B=position_B
        )


def choose_kernels(attention: str, backend: str | None = None) -> PallasKernels | None:
    """Returns the kernels for a value of `ATTENTION`; "auto" has kernels on a TPU, see
    `specsamp.mesh.sharded.with_attention`.

    Args:
      backend: the backend that programs are compiled for; None: the default backend.

    Raises:
      ValueError: an unknown value, or "kernel" without a TPU.
    """
    backend = backend or jax.default_backend()
    validate.choice("attention", attention, ATTENTION)
    if attention == "kernel" and backend != "tpu":
        raise ValueError(f"attention 'kernel' is for TPUs, and this is a {backend}: choose plain")
    return PallasKernels() if attention != "plain" and backend == "tpu" else None


@functools.cache
def say_once(text: str) -> None:
    """Warns, once in a process."""
    logging.warning(text)
