"""Compares each kernel of `specsamp.models.kernels` with its plain form, on a chip or interpreted.

for check in CHECKS:
    print(check.name, check.difference(PallasKernels()), "of at most", check.near)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.decoding.trees import TreeShape
from specsamp.models.cache import CACHES, PAIRED_SIZE
from specsamp.models.config import ExpertsConfig, RecurrentConfig, TransformerConfig, tiny
from specsamp.models.experts import BIAS_AXES, STACKED_AXES, Experts, mix_experts, route
from specsamp.models.heads import kernel_tables
from specsamp.models.int8 import quantise
from specsamp.models.kernels import append_rows, common, decode_attention, delta_step, expand_rows
from specsamp.models.kernels import mix_experts as experts_kernel
from specsamp.models.kernels.dispatch import PallasKernels
from specsamp.models.modules import normalise
from specsamp.models.positions import Rotary, apply_rope
from specsamp.models.recurrent import RecurrentCache, mix
from specsamp.models.slots import write_slots
from specsamp.models.visibility import BlockVisibility, Visibility
from specsamp.sampling.warp import (
    chain,
    greedy,
    log_probs,
    min_p,
    temperature,
    top_k,
    top_p,
    with_kernels,
)

Array = jax.Array

SIZE = common.LANES  # of a head
TREE = TreeShape.of_widths(2, 2)
VOCABULARY = 5003  # folds with padding
# Largest difference over the largest entry of the plain form. Another order of sums makes 1e-6 in
# float32 and 0.006 in bfloat16; a query that sees a slot too many makes 0.01 and more.
NEAR = {"float32": 1e-3, "bfloat16": 0.02}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """One call of a kernel.

    Attributes:
      kernel: its name in compiled programs.
      what: what is special about this call.
      draw: returns the operands.
      compute: computes arrays from kernels and the operands; from None and the operands, the
        plain form.
      near: the largest difference that rounding explains; 0 for a kernel that only moves entries.
    """

    kernel: str
    what: str
    draw: Callable[[], tuple]
    compute: Callable[..., Any]
    near: float

    @property
    def name(self) -> str:
        """Returns the kernel and the speciality of the call."""
        return f"{self.kernel}, {self.what}"

    def difference(self, kernels: PallasKernels) -> float:
        """Returns the largest difference from the plain form, over its largest entry; NaN if any
        result is NaN.

        Products of the plain form and of the kernels are exact to float32.
        """
        operands = self.draw()

        def leaves_of(kernels):
            made = jax.jit(functools.partial(self.compute, kernels))(*operands)
            return [np.asarray(x, np.float32) for x in jax.tree.leaves(made)]

        with jax.default_matmul_precision("highest"):
            pairs = zip(leaves_of(kernels), leaves_of(None), strict=True)
        ratios = [np.abs(ours - plain).max() / np.abs(plain).max() for ours, plain in pairs]
        return float(np.max(ratios))


def _drawn(*shape: int, seed: int, dtype: str = "float32") -> Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def _ragged(slots: int, length: int) -> Array:
    """Returns the first slots of three rows: the last possible one, one behind another across a
    tile, and 0.
    """
    return jnp.asarray([slots - length, 31, 0], jnp.int32)


def _attention(
    what: str,
    *,
    length: int,
    slots: int,
    kv_heads: int,
    group: int,
    dtype: str = "float32",
    size: int = SIZE,
    in_int8: bool = False,
    has_distances: bool = False,
    has_sinks: bool = False,
    tree: TreeShape | None = None,
    window: int | None = None,
    is_block: bool = False,
    cap: float | None = None,
) -> KernelCheck:
    """Attends with ``group`` queries for each kv head and token; those of a block see each other
    both ways.
    """
    heads = kv_heads * group

    def draw():
        q_BNTH = _drawn(3, heads, length, size, seed=1, dtype=dtype)
        entries = (_drawn(3, kv_heads, slots, size, seed=seed, dtype=dtype) for seed in (2, 3))
        distances_BNTS = 10 * _drawn(3, heads, length, slots, seed=4) if has_distances else None
        return q_BNTH, *entries, _ragged(slots, length), distances_BNTS

    def compute(kernels, q_BNTH, k_BMSH, v_BMSH, start_B, distances_BNTS):
        block = None if tree is None else tree.block(start_B)
        visible = Visibility(start_B=start_B, num_queries=length, window=window, block=block)
        if is_block:
            first_B1 = start_B[:, None]
            visible = BlockVisibility(anchors_BA=first_B1, first_BA=first_B1, block_size=length)
        is_paired = kernels is not None and size == PAIRED_SIZE
        cache = CACHES[is_paired, "int8" if in_int8 else None].of(k_BMSH, v_BMSH)
        cache = dataclasses.replace(cache, kernels=kernels)
        return cache.attend(
            q_BNTH,
            visible,
            scale=0.1,
            distances_BNTS=distances_BNTS,
            cap=cap,
            sinks_N=_drawn(heads, seed=5) if has_sinks else None,
        )

    return KernelCheck(
        kernel=decode_attention.NAME, what=what, draw=draw, compute=compute, near=NEAR[dtype]
    )


def _rows(dtype: str, length: int) -> KernelCheck:
    """Writes tokens of ragged rows into two caches, and of int8 their scales."""
    slots = 384

    def draw():
        def two(count):
            made = [(20 * _drawn(3, 2, count, SIZE, seed=seed)).astype(dtype) for seed in (1, 2)]
            return (*made, *[_drawn(3, 2, 1, count, seed=3)] * (dtype == "int8"))

        return two(slots), two(length), _ragged(slots, length)

    def compute(kernels, old, new, start_B):
        if kernels is not None:
            return kernels.write(old, new, start_B)
        return tuple(
            write_slots(cache, rows, start_B, append_rows.slots_axis(cache.shape))
            for cache, rows in zip(old, new, strict=True)
        )

    what = f"{length} tokens in {dtype}"
    return KernelCheck(kernel=append_rows.NAME, what=what, draw=draw, compute=compute, near=0.0)


def _experts(
    what: str, *, dtype: str, tokens: int, in_int8: bool = False, width: int = 1024, **more: Any
) -> KernelCheck:
    """Mixes two of four experts, in several parts of their width."""
    experts = ExpertsConfig(num_experts=4, experts_per_token=2, width=768, **more)
    config = TransformerConfig(
        vocab_size=64,
        width=width,
        num_layers=1,
        num_heads=8,
        dtype=dtype,
        gated=True,
        activation="silu",
        experts=experts,
    )

    def draw():
        stacked = {
            name: _drawn(4, 768, width, seed=seed, dtype=dtype) / 32
            for seed, name in enumerate(STACKED_AXES)
        }
        if in_int8:
            axes = {"gate": (2,), "up": (2,), "down": (1,)}
            stacked = {name: quantise(x, axes[name]) for name, x in stacked.items()}
        if experts.bias:
            stacked |= {name: _drawn(4, 768, seed=i) for i, name in enumerate(BIAS_AXES)}
        return _drawn(tokens, width, seed=3, dtype=dtype), _drawn(tokens, 4, seed=4), stacked

    def compute(kernels, x_RD, logits_RE, stacked):
        if kernels is not None:
            return kernels.mix_experts(config, x_RD, logits_RE, stacked, jnp.int32(0))
        return mix_experts(config, Experts.inner_spec, x_RD, route(logits_RE, experts), stacked)

    return KernelCheck(
        kernel=experts_kernel.NAME, what=what, draw=draw, compute=compute, near=NEAR[dtype]
    )


def _delta(dtype: str, length: int) -> KernelCheck:
    """Reads tokens of a new sequence, of one whose state moves on, and of one whose state stays."""
    recurrent = RecurrentConfig(
        num_key_heads=2, num_value_heads=4, key_size=SIZE, value_size=SIZE, attention_layers=(1,)
    )
    config = tiny(positions="rotary", dtype=dtype, recurrent=recurrent)
    parts = sum(size for _, size in recurrent.projections.values())

    def draw():
        drawn = functools.partial(_drawn, dtype=dtype)
        vectors = drawn(2, 4, 4 * SIZE, seed=1), drawn(2, 2, 2, seed=2) - 2, drawn(SIZE, seed=3)
        empty = RecurrentCache.zeros(config, 3)
        cache = RecurrentCache(
            state_BNKV=_drawn(*empty.state_BNKV.shape, seed=4),
            inputs_BMWX=drawn(*empty.inputs_BMWX.shape, seed=5),
            position_B=jnp.full(3, 64),
        )
        return (
            drawn(3, 2, length, parts, seed=6),
            jnp.asarray([0, 64 + 60, 64 + 40]),
            vectors,
            cache,
        )

    def compute(kernels, *operands):
        return (mix if kernels is None else kernels.step_delta)(config, *operands)

    return KernelCheck(
        kernel=delta_step.NAME,
        what=f"{length} tokens in {dtype}",
        draw=draw,
        compute=compute,
        near=NEAR[dtype],
    )


def _norms_and_rotation(dtype: str) -> KernelCheck:
    """Normalises and rotates queries and keys, as attention does."""
    config = TransformerConfig(vocab_size=64, width=1024, num_layers=1, num_heads=8, dtype=dtype)

    def draw():
        heads = (_drawn(2, count, 5, SIZE, seed=1, dtype=dtype) for count in (8, 2))
        angles = Rotary(size=SIZE, base=1e4).angles(jnp.arange(10).reshape(2, 5))
        return *heads, 1 + 0.1 * _drawn(SIZE, seed=2), *angles

    def turn(q_BNTH, k_BMTH, scale_H, *angles):
        return tuple(apply_rope(normalise(config, x, scale_H), *angles) for x in (q_BNTH, k_BMTH))

    def compute(kernels, *operands):
        if kernels is not None:
            return kernels.fuse(turn, operands, ("heads", "kv_heads"))
        return turn(*operands)

    what = f"norms and rotation in {dtype}"
    return KernelCheck(kernel=common.SMALL, what=what, draw=draw, compute=compute, near=NEAR[dtype])


def _expanded(what: str, *, size: int, rows: int) -> KernelCheck:
    """Expands a reduced vocabulary; some ids follow each other, the others are drawn."""

    def draw():
        drawn = np.random.default_rng(size).choice(VOCABULARY, size // 2, replace=False)
        ids_U = np.union1d(np.arange(size // 4), drawn)
        ranks_V = np.full(VOCABULARY, size, np.int32)
        ranks_V[ids_U] = np.arange(len(ids_U))
        return _drawn(rows, size, seed=1), *kernel_tables(ranks_V, size)

    def compute(kernels, logits_RU, ranks_1V, first_J):
        if kernels is not None:
            return jnp.exp(kernels.expand(logits_RU, ranks_1V, first_J))
        return jnp.exp(jnp.take(logits_RU, ranks_1V[0], axis=-1, mode="fill", fill_value=-jnp.inf))

    return KernelCheck(kernel=expand_rows.NAME, what=what, draw=draw, compute=compute, near=0.0)


def _warps(what: str, *warps: Any) -> KernelCheck:
    """Warps rows of a vocabulary with ties; the law of each row is compared."""

    def compute(kernels, logits_BV):
        return jnp.exp(log_probs(with_kernels(chain(*warps), kernels), logits_BV))

    def draw():
        return (jnp.round(24 * _drawn(3, VOCABULARY, seed=1)) / 8,)

    return KernelCheck(
        kernel=common.WARPS, what=what, draw=draw, compute=compute, near=NEAR["float32"]
    )


# Every kernel has an entry.
CHECKS = (
    _attention(
        "scores by distance",
        length=5,
        slots=1280,
        kv_heads=4,
        group=3,
        has_distances=True,
        cap=30.0,
    ),
    _attention(
        "one token in bfloat16", length=1, slots=2048, kv_heads=8, group=4, dtype="bfloat16"
    ),
    _attention(
        "a block, one group of heads",
        length=17,
        slots=2048,
        kv_heads=1,
        group=6,
        dtype="bfloat16",
        is_block=True,
    ),
    _attention(
        "a window in int8", length=33, slots=1024, kv_heads=2, group=2, window=40, in_int8=True
    ),
    _attention(
        "distances in int8",
        length=5,
        slots=2048,
        kv_heads=4,
        group=1,
        dtype="bfloat16",
        in_int8=True,
        has_distances=True,
    ),
    _attention(
        "heads of 64, with sinks",
        length=5,
        slots=640,
        kv_heads=2,
        group=4,
        size=PAIRED_SIZE,
        has_sinks=True,
    ),
    _attention("a tree", length=TREE.K + 1, slots=512, kv_heads=2, group=2, tree=TREE),
    _rows("float32", 5),
    _rows("bfloat16", 1),
    _rows("bfloat16", 128),
    _rows("int8", 34),
    _experts("float32", dtype="float32", tokens=5),
    _experts("bfloat16", dtype="bfloat16", tokens=40),
    _experts("int8", dtype="bfloat16", tokens=5, in_int8=True),
    _experts("biased and clamped", dtype="bfloat16", tokens=5, width=960, bias=True, limit=0.5),
    _delta("float32", 5),
    _delta("bfloat16", 17),
    _norms_and_rotation("float32"),
    _norms_and_rotation("bfloat16"),
    _expanded("eleven rows", size=900, rows=11),
    _expanded("less than a block", size=100, rows=2),
    _expanded("a single row", size=300, rows=1),
    _warps("greedy", greedy()),
    _warps(
        "filters",
        temperature([0.3, 0.8, 1.0]),
        top_k([5, 4000, 1]),
        top_p([0.3, 1.0, 0.9]),
        min_p(0.01),
    ),
)
