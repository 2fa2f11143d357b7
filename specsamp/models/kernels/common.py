"""What all kernels use: arrays in the memory of the device, and products on matrix units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.jax_names import pl, pltpu

LANES = 128  # entries of the last axis that a TPU keeps together
SMALL = "small"  # the name in compiled programs of the kernels of `in_one_kernel`
WARPS = "warps"  # and of the warps of a row
PAIRED_SIZE = 64  # of heads whose keys and values share the rows of `PairedKVCache`
MAX_SMALL = 2**17  # entries of their first operand; with more, XLA's operations take as long


def in_hbm(x: jax.Array, *, interpret: bool) -> jax.Array:
    """Keeps ``x`` in the memory of the device, so that the kernel alone decides what is fetched on
    chip.
    """
    return x if interpret else pltpu.with_memory_space_constraint(x, pltpu.HBM)


def einsum_in_float32(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes ``einsum(spec, x, y)`` of one floating dtype, summed in float32.

    Products of float32 keep every bit. For bfloat16 matrix units have no higher precision, and
    refuse the option.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32, precision=precision)


def in_one_kernel(
    function: Callable, *operands: Any, interpret: bool, name: str = SMALL, steps: int | None = None
) -> Any:
    """Computes a function of arrays, and of trees of arrays, in one kernel, with all arrays on
    chip.

    Of several steps each takes an equal part of the leading axis of all arrays.
    """
    arrays, tree = jax.tree.flatten(operands)
    shapes, of_results = jax.tree.flatten(jax.eval_shape(function, *operands))

    def kernel(*refs):
        given = jax.tree.unflatten(tree, [ref[...] for ref in refs[: len(arrays)]])
        for ref, result in zip(refs[len(arrays) :], jax.tree.leaves(function(*given)), strict=True):
            ref[...] = result

    def part(x):
        return pl.BlockSpec(
            (x.shape[0] // steps, *x.shape[1:]), lambda i: (i, *(0,) * (x.ndim - 1))
        )

    options = {}
    if steps is not None:
        options = {
            "grid": (steps,),
            "in_specs": [*map(part, arrays)],
            "out_specs": [*map(part, shapes)],
        }
        # On both cores of a chip.
        options["compiler_params"] = pltpu.CompilerParams(dimension_semantics=("parallel",))
    results = pl.pallas_call(kernel, out_shape=shapes, interpret=interpret, name=name, **options)(
        *arrays
    )
    return jax.tree.unflatten(of_results, results)
