"""What all kernels use: arrays in the memory of the device, and products on matrix units."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.jax_names import pl, pltpu

LANES = 128  # entries of the last axis that a TPU keeps together
SMALL = "small"  # the name in compiled programs of the kernels of `in_one_kernel`
WARPS = "warps"  # and of the warps of a row
MAX_SMALL = 2**19  # entries of their first operand on chip, in whole registers
ROWS = 32  # of a step, if the rows of a stream are more


def in_hbm(x: jax.Array, *, interpret: bool) -> jax.Array:
    """Keeps ``x`` in the memory of the device, so that the kernel alone decides what is fetched on
    chip.
    """
    return x if interpret else pltpu.with_memory_space_constraint(x, pltpu.HBM)


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    """Returns the index along an axis, int32."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def einsum_in_float32(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes ``einsum(spec, x, y)`` of one floating dtype, summed in float32.

    Products of float32 keep every bit. For bfloat16 matrix units have no higher precision, and
    refuse the option.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32, precision=precision)


def widen(entries_MSH: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns int8 entries in a floating dtype, exactly, the slots in the order of `slot_of`.

    A word holds one byte of four neighbouring slots; shifts within words move nothing between
    registers, which a conversion slot by slot does.
    """
    count, slots, size = entries_MSH.shape
    words = pltpu.bitcast(entries_MSH, jnp.int32)
    words_MGWH = words.reshape(count, slots // LANES, LANES // 4, size)
    raised = [words_MGWH << 24 - 8 * byte for byte in range(3)] + [words_MGWH]
    wide = [(part >> 24).astype(jnp.float32).astype(dtype) for part in raised]
    return jnp.stack(wide, axis=2).reshape(entries_MSH.shape)


def slot_of(place: jax.Array) -> jax.Array:
    """Returns the slot, of each `LANES`, at a place of `widen`."""
    return (place & 31) * 4 + (place >> 5 & 3)


def by_place(x_RS: jax.Array) -> jax.Array:
    """Returns columns of slots in the order of `slot_of`, by gathers within registers."""
    rows, slots = x_RS.shape
    shape = max(rows, 2), LANES  # single rows cannot be gathered
    slot_RL = slot_of(iota(shape, 1))
    parts = [
        jnp.take_along_axis(
            jnp.broadcast_to(x_RS[:, first : first + LANES], shape),
            slot_RL,
            axis=1,
            mode="promise_in_bounds",
        )[:rows]
        for first in range(0, slots, LANES)
    ]
    return jnp.concatenate(parts, axis=1)


def stream_steps(shape: tuple[int, ...]) -> int:
    """Returns the steps of a kernel over an array; a stream ``[1, R, D]`` may have several."""
    is_large = len(shape) == 3 and shape[0] == 1 and math.prod(shape) > MAX_SMALL
    return pl.cdiv(shape[1], ROWS) if is_large else 1


def in_one_kernel(
    function: Callable, *operands: Any, interpret: bool, name: str = SMALL, steps: int | None = None
) -> Any:
    """Computes a function of arrays, and of trees of arrays, in one kernel, with all arrays on
    chip.

    Of several steps each takes an equal part of the leading axis of all arrays. Of a stream
    ``[1, R, D]`` that is too large (`stream_steps`) each takes `ROWS` rows.
    """
    arrays, tree = jax.tree.flatten(operands)
    shapes, of_results = jax.tree.flatten(jax.eval_shape(function, *operands))

    def kernel(*refs):
        given = jax.tree.unflatten(tree, [ref[...] for ref in refs[: len(arrays)]])
        for ref, result in zip(refs[len(arrays) :], jax.tree.leaves(function(*given)), strict=True):
            ref[...] = result

    first = arrays[0].shape
    axis, size = (1, ROWS) if steps is None else (0, first[0] // steps)
    options = {}
    if steps is not None or stream_steps(first) > 1:

        def part(x):
            """Takes a part of arrays with the leading axes of the first one, else all."""
            sizes, is_cut = list(x.shape), x.shape[: axis + 1] == first[: axis + 1]
            if is_cut:
                sizes[axis] = size
            place = [is_cut and at == axis for at in range(x.ndim)]
            return pl.BlockSpec(tuple(sizes), lambda i: tuple(i if moves else 0 for moves in place))

        options = {
            "grid": (steps or stream_steps(first),),
            "in_specs": [*map(part, arrays)],
            "out_specs": [*map(part, shapes)],
            # On both cores of a chip.
            "compiler_params": pltpu.CompilerParams(dimension_semantics=("parallel",)),
        }
    results = pl.pallas_call(kernel, out_shape=shapes, interpret=interpret, name=name, **options)(
        *arrays
    )
    return jax.tree.unflatten(of_results, results)
