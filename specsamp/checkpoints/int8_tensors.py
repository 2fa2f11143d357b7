"""Int8 weights in files: each is two tensors, the second with the scales, named with a suffix.

    SCALES          of checkpoints in the format of Hugging Face
    PAIR_SCALES     of pairs, whose files always hold int8: a model decodes with it, or with ``values * scale``

Matrices of a float checkpoint are quantised while they are read, a block at a time: no float copy of a whole matrix is
ever made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from specsamp.checkpoints.safetensors_io import BLOCK_BYTES
from specsamp.checkpoints.tensor_names import TensorSource
from specsamp.models.int8 import Int8Weight, dequantise, is_int8, is_stored_in_int8, quantise, summed_axes

SCALES, PAIR_SCALES = "_scale", ".scale_of_int8"

Read = Callable[[tuple[slice, ...]], np.ndarray]  # of a slice of the parameter, in float32


def apart(leaves: Mapping[str, Any], suffix: str = SCALES) -> dict[str, Any]:
    """Returns values and scales of int8 weights as separate arrays, the scales under the name with the suffix."""
    found = {}
    for name, leaf in leaves.items():
        found |= {name: leaf.values, name + suffix: leaf.scale} if is_int8(leaf) else {name: leaf}
    return found


def together(arrays: Mapping[str, Any], suffix: str = SCALES) -> dict[str, Any]:
    """Returns what `apart` took apart; raises ValueError for an int8 array without scales."""
    scales = {name: arrays[name + suffix] for name in arrays if name + suffix in arrays}
    for name, array in arrays.items():
        if name not in scales and not is_int8(array) and array.dtype == np.int8:
            raise ValueError(f"{name} has no scales")
    return {
        name: Int8Weight(array, scales[name]) if name in scales else array
        for name, array in arrays.items()
        if name.removesuffix(suffix) not in scales or name in scales
    }


def scale_source(name: str, source: TensorSource) -> tuple[TensorSource, dict[str, int]]:
    """Returns the source of a parameter's scales, and the sizes of the letters that a product sums over: 1."""
    ones = {source.axes[axis]: 1 for axis in summed_axes(name)}
    return dataclasses.replace(source, tensor=source.tensor + SCALES), ones


def write_pair_tensors(params: Any) -> dict[str, np.ndarray]:
    """Returns the arrays of a pair's file by path, such as ``layer_0/mlp/up``: matrices of products in int8."""
    leaves = {name: np.asarray(leaf, np.float32) for name, leaf in flatten_dict(params, sep="/").items()}
    axes = {name: summed_axes(name) for name in leaves}
    return apart(
        {name: leaf if axes[name] is None else quantise(leaf, axes[name]) for name, leaf in leaves.items()}, PAIR_SCALES
    )


def read_pair_tensors(tensors: Mapping[str, np.ndarray], *, in_int8: bool) -> dict[str, Any]:
    """Returns the parameters of a pair's file: in float32, or the weights that models decode with in int8.

    Raises:
      ValueError: an int8 array has no scales.
    """

    def read(name: str, leaf: Any) -> Any:
        if not is_int8(leaf):
            return leaf if in_int8 else np.asarray(leaf, np.float32)
        return leaf if in_int8 and is_stored_in_int8(name) else dequantise(leaf)

    return {name: read(name, leaf) for name, leaf in together(tensors, PAIR_SCALES).items()}


def read_int8(place: Int8Weight, axes: tuple[int, ...], read: Read) -> Int8Weight:
    """Quantises a parameter while it is read, each process for the output channels that its devices hold.

    A scale covers all entries that a product sums over. They are read whole also where devices hold parts of them.

    Args:
      place: shape, dtype and sharding of both arrays.
      axes: that a product sums over.
    """
    shape = place.values.shape
    made: dict[tuple, Int8Weight] = {}

    def channels(index: tuple[slice, ...]) -> Int8Weight:
        spans = tuple((0, n) if i in axes else index[i].indices(n)[:2] for i, n in enumerate(shape))
        if spans not in made:
            made[spans] = quantise_in_blocks(spans, axes, read)
        return made[spans]

    def values(index: tuple[slice, ...]) -> np.ndarray:
        return channels(index).values[tuple(part if i in axes else slice(None) for i, part in enumerate(index))]

    def scale(index: tuple[slice, ...]) -> np.ndarray:
        return channels(index).scale

    return Int8Weight(
        jax.make_array_from_callback(shape, place.values.sharding, values).block_until_ready(),
        jax.make_array_from_callback(place.scale.shape, place.scale.sharding, scale).block_until_ready(),
    )


def quantise_in_blocks(spans: tuple[tuple[int, int], ...], axes: tuple[int, ...], read: Read) -> Int8Weight:
    """Returns the int8 weight of a part of a parameter, of NumPy's arrays.

    Args:
      spans: first and last entry along each axis; whole along ``axes``.
    """
    sizes = [last - first for first, last in spans]
    over = max((i for i in range(len(sizes)) if i not in axes), key=sizes.__getitem__)
    values = np.empty(sizes, np.int8)
    scale = np.empty([1 if i in axes else n for i, n in enumerate(sizes)], np.float32)
    step = max(BLOCK_BYTES // (4 * max(math.prod(sizes) // max(sizes[over], 1), 1)), 1)
    first, last = spans[over]
    for start in range(first, last, step):
        part = slice(start, min(start + step, last))
        block = quantise(read(tuple(part if i == over else slice(*span) for i, span in enumerate(spans))), axes)
        here = (slice(None),) * over + (slice(part.start - first, part.stop - first),)
        values[here], scale[here] = block.values, block.scale
    return Int8Weight(values, scale)
