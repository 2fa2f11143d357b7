"""Products that accumulate in float32, in the forward and the backward pass; their precision; and
the soft cap.

JAX transposes a product of bfloat16 operands with a float32 result into products of a float32 and a
bfloat16 operand. It transposes a product with a bfloat16 result into products that accumulate in
bfloat16 on some backends. Neither uses matrix units: on a CPU with such units a training step took
nine times as long.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.arrays import pad_axis
from specsamp.models import few_rows
from specsamp.models.int8 import Int8Blocks, Int8Weight, is_int8

Array = jax.Array

# Entries of an `Int8Blocks` that are widened at a time: 2 MB of float32, which stay in a CPU's
# cache.
WIDENED_ENTRIES = 2**19
WHOLE = 4  # a matrix of at most this many blocks is widened at once
WIDE = 16  # with more outputs for each summed entry, such as a vocabulary, blocks are columns


def contract(
    spec: str,
    x: Array,
    y: Array | Int8Weight,
    *,
    dtype: jnp.dtype | None = None,
    copies: int | None = None,
) -> Array:
    """Computes ``einsum(spec, x, y)`` in the dtype of ``x``, accumulated in float32, returned as
    ``dtype`` (as ``x``).

    ``y`` may be a float32 parameter: it is rounded for the product, but its gradient is not.
    Cotangents are rounded to the dtype of ``x``. Every index of one operand must be in the other
    operand or in the result. The scale of an int8 weight multiplies the sums before they are
    rounded; int8 weights have no gradient. A TPU multiplies a single row together with a row of
    zeros: alone it would not use the matrix unit.

    Args:
      copies: of ``x``, along its first axis.
    """
    dtype = x.dtype if dtype is None else jnp.dtype(dtype)
    return _in_two_rows(spec, x, y, lambda x, y: _product(spec, x, y, dtype, copies))


def _in_two_rows(
    spec: str, x: Array, y: Array | Int8Weight, multiply: Callable[[Array, Any], Array]
) -> Array:
    """Returns ``multiply(x, y)``; on a TPU, a single row has a row of zeros behind it."""
    row = _only_row(spec, x, y)
    if row is None:
        return multiply(x, y)
    of_x, of_result = row

    def multiply_two_rows(x: Array, y: Array | Int8Weight) -> Array:
        product = multiply(pad_axis(x, 1, of_x), y)
        return jax.lax.slice_in_dim(product, 0, 1, axis=of_result)

    return jax.lax.platform_dependent(x, y, tpu=multiply_two_rows, default=multiply)


def _only_row(spec: str, x: Array, y: Array | Int8Weight) -> tuple[int, int] | None:
    """Returns the axis of ``x``, and of the result, of the only row of a product with a weight,
    which has no batch axis "B".

    None: there are more rows, or the kernel of few rows multiplies.
    """
    inputs, result = spec.split("->")
    of_x, of_y = inputs.split(",")
    rows = [axis for axis in of_x if axis not in of_y]
    sizes = dict(zip(of_x, x.shape, strict=True))
    is_weight = "B" not in of_y and rows
    if not is_weight or any(sizes[axis] > 1 for axis in rows):
        return None
    if few_rows.takes(spec, x, y.values if is_int8(y) else y):
        return None
    return of_x.index(rows[-1]), result.index(rows[-1])


def _product(
    spec: str, x: Array, y: Array | Int8Weight, dtype: jnp.dtype, copies: int | None
) -> Array:
    if is_int8(y):
        return (_int8_sums(spec, x, y, copies) * _scale_of_output(spec, y.scale)).astype(dtype)
    x = _copied(x, copies)
    return _contract(spec, dtype, jax.config.jax_default_matmul_precision, x, y)


def contract_slice(
    spec: str, x: Array, stacked: Array | Int8Weight, at: Array, *, dtype: jnp.dtype
) -> Array:
    """Computes `contract` with the entry ``at`` of the first axis of ``stacked``, which is read in
    place.

    Unlike in `contract`, an int8 entry has no optimization barrier with x: a compiler cannot
    convert it ahead of the loop, and with a barrier the slice would be copied first. CPUs copy it
    anyway.
    """
    entry = jax.tree.map(lambda y: jax.lax.dynamic_index_in_dim(y, at, keepdims=False), stacked)
    if not is_int8(entry) or isinstance(entry, Int8Blocks):
        return contract(spec, x, entry, dtype=dtype)

    def multiply(x: Array, entry: Int8Weight) -> Array:
        precision = jax.config.jax_default_matmul_precision
        sums = _einsum(spec, precision, x, entry.values.astype(x.dtype), jnp.float32)
        return (sums * _scale_of_output(spec, entry.scale)).astype(dtype)

    return _in_two_rows(spec, x, entry, multiply)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _contract(spec, dtype, precision, x, y):
    if few_rows.takes(spec, x, y):
        return few_rows.multiply(x, y).astype(dtype)
    return _einsum(spec, precision, x, y.astype(x.dtype), dtype)


def _forward(spec, dtype, precision, x, y):  # of what has a gradient
    return _einsum(spec, precision, x, y.astype(x.dtype), dtype), (x, y)


def _backward(spec, dtype, precision, operands, cotangent):
    x, y = operands
    inputs, result = spec.split("->")
    of_x, of_y = inputs.split(",")
    cotangent = cotangent.astype(x.dtype)
    return (
        _einsum(f"{result},{of_y}->{of_x}", precision, cotangent, y.astype(x.dtype), x.dtype),
        _einsum(f"{of_x},{result}->{of_y}", precision, x, cotangent, y.dtype),
    )


_contract.defvjp(_forward, _backward)


def _copied(x: Array, copies: int | None) -> Array:
    return x if copies is None else jnp.broadcast_to(x, (copies, *x.shape[1:]))


def _int8_sums(spec: str, x: Array, y: Int8Weight, copies: int | None) -> Array:
    if few_rows.takes(spec, x, y.values):
        return few_rows.multiply(x, y.values)
    # Tied to x, so that the compiler does not convert the matrix ahead of a loop and keep both.
    x, values = jax.lax.optimization_barrier((x, y.values))
    x = _copied(x, copies)  # before the barrier they would be written to memory

    def multiply(x: Array, values: Array) -> Array:
        return _einsum(
            spec, jax.config.jax_default_matmul_precision, x, values.astype(x.dtype), jnp.float32
        )

    if not isinstance(y, Int8Blocks) or y.size <= WHOLE * WIDENED_ENTRIES:
        return multiply(x, values)

    def add_rows(start: Array | int, size: int, sums: Array) -> Array:
        """Adds the products of a block of rows; all sums are read and written for each block."""
        x_block, block = (
            jax.lax.dynamic_slice_in_dim(z, start, size, axis) for z, axis in ((x, -1), (values, 0))
        )
        return sums + multiply(x_block, block)

    def put_columns(start: Array | int, size: int, sums: Array) -> Array:
        """Computes the products of a block of columns; each sum is written once."""
        block = jax.lax.dynamic_slice_in_dim(values, start, size, 1)
        return jax.lax.dynamic_update_slice_in_dim(sums, multiply(x, block), start, -1)

    summed, outputs = values.shape
    sums = jnp.zeros((*x.shape[:-1], outputs), jnp.float32)
    is_wide = outputs > WIDE * summed
    add, total = (put_columns, outputs) if is_wide else (add_rows, summed)
    size = max(total // -(-y.size // WIDENED_ENTRIES), 1)
    sums = jax.lax.fori_loop(0, total // size, lambda i, sums: add(i * size, size, sums), sums)
    rest = total % size
    return add(total - rest, rest, sums) if rest else sums


def _einsum(spec, precision, x, y, dtype):
    return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=jnp.float32).astype(
        dtype
    )


def _scale_of_output(spec: str, scale: Array) -> Array:
    """Returns the scale of the second operand with the axes of the result; it has one entry along
    summed axes.
    """
    inputs, result = spec.split("->")
    axes = inputs.split(",")[1]
    size = dict(zip(axes, scale.shape, strict=True))
    scale = jnp.einsum(f"{axes}->{''.join(axis for axis in result if axis in axes)}", scale)
    return scale.reshape([size.get(axis, 1) for axis in result])


def soft_cap(x: Array, cap: float) -> Array:
    """Soft-caps ``x``: ``cap * tanh(x / cap)`` (Gemma 2, arXiv 2408.00118)."""
    return cap * jnp.tanh(x / cap)


def full_precision(dtype: str) -> contextlib.AbstractContextManager:
    """Makes float32 products exact on devices that round operands by default; keeps a setting of
    the user.
    """
    if dtype == "float32" and jax.config.jax_default_matmul_precision is None:
        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()
