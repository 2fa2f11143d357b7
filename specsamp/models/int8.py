"""Weights in int8, with a scale for each output channel of their product.

    values = round(weight / scale),   scale = max |weight| of the channel / 127

A scale is constant along the summed axes of a product, so it multiplies the product's output, in
float32, and only the int8 matrix is read from memory (`specsamp.models.products.contract`).
bfloat16 represents all int8 numbers exactly. In a tied embedding, a row is a channel, both for a
lookup and for a logit.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp import validate
from specsamp.arrays import pad_axis

Array = jax.Array

# The axes that a product sums over, by the name of the parameter, with its module where two have
# the same name; the other axes are output channels. All other parameters are not matrices of
# products.
SUMMED_AXES = {
    name: axes
    for axes, names in {
        (0,): ("up", "gate", "down", "fc", "linear"),  # [D, F], [F, D]
        (0, 1): ("attention/output", "recurrence/output"),  # [N, H, D]
        # Tables [V, D], of which a logit is one channel; and [N, D, H].
        (1,): ("embedding", "output_embedding", "output", "query", "key", "value", "relative")
        + ("attention/gate", "recurrence/gate", "experts/down")  # [E, F, D]
        + tuple(f"ngrams_{order}" for order in range(2, 6)),
        (2,): ("experts/up", "experts/gate"),  # [E, F, D]
    }.items()
    for name in names
}
# Tables of relative keys are made from this matrix once, so it is not rounded.
NOT_READ = ("relative",)

SIDES = ("target", "draft")
LANES = 128  # entries in a row of a TPU's tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8:
    """The sides of a pair, from `SIDES`, that have weights and caches in int8; a head counts as the
    draft.
    """

    weights: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()

    def __post_init__(self):
        for field in dataclasses.fields(self):
            sides = getattr(self, field.name)
            if not (validate.is_list(sides) and set(sides) <= set(SIDES)):
                raise ValueError(
                    f"{field.name} in int8 must be a tuple of {' and '.join(SIDES)}; got {sides!r}"
                )

    def of(self, side: str) -> dict[str, str | None]:
        """Returns the fields of this side's `TransformerConfig`."""
        asked = {"weight_dtype": self.weights, "cache_dtype": self.caches}
        return {name: "int8" if side in sides else None for name, sides in asked.items()}


FLOAT = Int8()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Weight:
    """A matrix in int8; or its description, such as a sharding for each array."""

    # int8; the first leaf, whose shape Linen compares with the one that a module declares.
    values: Any
    scale: Any  # float32, of the same rank, 1 along the axes that a product sums over

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def size(self) -> int:
        return self.values.size

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Blocks(Int8Weight):
    """An int8 matrix whose product widens a block at a time, see `specsamp.models.cpu_weights`."""


def is_int8(x: Any) -> bool:
    """Returns whether ``x`` is an `Int8Weight`, which is one leaf for functions that use names of
    weights.
    """
    return isinstance(x, Int8Weight)


def summed_axes(name: str) -> tuple[int, ...] | None:
    """Returns the axes that a product with the parameter sums over; None: it is not a matrix of a
    product.

    Args:
      name: such as ``layer_0/attention/query``.
    """
    parts = name.split("/")
    return SUMMED_AXES.get("/".join(parts[-2:]), SUMMED_AXES.get(parts[-1]))


def is_stored_in_int8(name: str) -> bool:
    """Returns whether models with int8 weights store this parameter in int8."""
    return summed_axes(name) is not None and name.split("/")[-1] not in NOT_READ


def quantise(weight: Array | np.ndarray, axes: tuple[int, ...]) -> Int8Weight:
    """Returns the nearest int8 weight, as arrays of JAX or of NumPy like ``weight``; computed in
    float32.

    Args:
      weight: of any floating dtype.
      axes: the axes that a product sums over.
    """
    return (
        _quantise(np, weight, axes)
        if isinstance(weight, np.ndarray)
        else _quantise_on_device(weight, axes)
    )


def _quantise(xp: Any, weight: Any, axes: tuple[int, ...]) -> Int8Weight:
    # Products instead of quotients: compilers turn some quotients into products, which round
    # differently than NumPy.
    weight = weight.astype(xp.float32)
    scale = xp.abs(weight).max(axis=axes, keepdims=True) * np.float32(1 / 127)
    # Scales below the least normal number may have no finite reciprocal: such columns become zero.
    # NaN and infinity stay for later checks.
    scale = xp.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale)
    return Int8Weight(xp.clip(xp.rint(weight * (1 / scale)), -127, 127).astype(xp.int8), scale)


@functools.partial(jax.jit, static_argnums=1)
def _quantise_on_device(weight: Array, axes: tuple[int, ...]) -> Int8Weight:
    return _quantise(jnp, weight, axes)


def dequantise(weight: Int8Weight) -> Array | np.ndarray:
    """Returns the float32 matrix of an int8 weight."""
    return weight.values.astype(np.float32) * weight.scale


def take_rows(table: Array | Int8Weight, ids: Array) -> Array:
    """Looks rows up in a table ``[V, D]``; an int8 table gives float32."""
    if is_int8(table):
        return table.values[ids].astype(jnp.float32) * table.scale[ids]
    return table[ids]


def whole_tiles(width: int) -> int:
    """Returns the width of rows of a table that are padded to whole tiles of a TPU."""
    return -(-width // LANES) * LANES


def pad_rows(table: Array | Int8Weight) -> Array | Int8Weight:
    """Returns a table ``[V, D]`` with zeros behind each row, so that rows are whole tiles.

    Otherwise a TPU stores the table by columns, and copies all of it to look up two rows. (Tables
    that are also multiplied stay as they are.)
    """
    if is_int8(table):
        return dataclasses.replace(table, values=pad_rows(table.values))
    return pad_axis(table, whole_tiles(table.shape[1]) - table.shape[1])


def decode_weights(params: Any, dtype: jnp.dtype, weight_dtype: str | None) -> Any:
    """Converts parameters to ``dtype``, or matrices to int8 if ``weight_dtype`` is "int8"; keeps
    int8 weights.
    """

    def convert(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if is_int8(x) or name.split("/")[-1] in NOT_READ:
            return x
        if weight_dtype == "int8" and is_stored_in_int8(name):
            return quantise(x, summed_axes(name))
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map_with_path(convert, params, is_leaf=is_int8)
