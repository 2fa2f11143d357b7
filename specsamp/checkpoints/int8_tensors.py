"""Reads int8 weights: from the files of pairs, and from float checkpoints, which are quantised
while they are read.

In the file of a pair a weight is two tensors, values and scales. Matrices of a float checkpoint are
quantised in blocks, without a float copy of a whole matrix.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from specsamp.checkpoints.safetensors_io import BLOCK_BYTES
from specsamp.models.int8 import Int8Weight, dequantise, is_stored_in_int8, quantise, summed_axes

PAIR_SCALES = ".scale_of_int8"  # follows the name of the weight

Read = Callable[[tuple[slice, ...]], np.ndarray]  # of a slice of the parameter, in float32


def write_pair_tensors(params: Any) -> dict[str, np.ndarray]:
    """Returns the arrays of a pair's file by path, such as ``layer_0/mlp/up``: matrices of products
    in int8.
    """
    arrays = {}
    for name, leaf in flatten_dict(params, sep="/").items():
        arrays[name] = np.asarray(leaf, np.float32)
        if (axes := summed_axes(name)) is not None:
            weight = quantise(arrays[name], axes)
            arrays |= {name: weight.values, name + PAIR_SCALES: weight.scale}
    return arrays


def read_pair_tensors(tensors: Mapping[str, np.ndarray], *, in_int8: bool) -> dict[str, Any]:
    """Returns the parameters of a pair's file: in float32, or the weights that models decode with
    in int8.

    Raises:
      ValueError: an int8 array has no scales.
    """
    params = {}
    for name, array in tensors.items():
        if name.endswith(PAIR_SCALES):
            continue
        params[name] = array if in_int8 else np.asarray(array, np.float32)
        if array.dtype == np.int8:
            if name + PAIR_SCALES not in tensors:
                raise ValueError(f"{name} has no scales")
            weight = Int8Weight(array, tensors[name + PAIR_SCALES])
            params[name] = weight if in_int8 and is_stored_in_int8(name) else dequantise(weight)
    return params


def read_int8(place: Int8Weight, axes: tuple[int, ...], read: Read) -> Int8Weight:
    """Quantises a parameter while it is read; each process reads the output channels of its
    devices.

    A channel is read whole, even if a device stores only a part of it: its scale covers all summed
    entries.

    Args:
      place: shape, dtype and sharding of both arrays.
      axes: the axes that a product sums over.
    """
    shape = place.values.shape
    made: dict[tuple, Int8Weight] = {}

    def channels(index: tuple[slice, ...]) -> Int8Weight:
        spans = tuple((0, n) if i in axes else index[i].indices(n)[:2] for i, n in enumerate(shape))
        if spans not in made:
            made[spans] = quantise_in_blocks(spans, axes, read)
        return made[spans]

    def values(index: tuple[slice, ...]) -> np.ndarray:
        return channels(index).values[
            tuple(part if i in axes else slice(None) for i, part in enumerate(index))
        ]

    def scale(index: tuple[slice, ...]) -> np.ndarray:
        return channels(index).scale

    return Int8Weight(
        jax.make_array_from_callback(shape, place.values.sharding, values).block_until_ready(),
        jax.make_array_from_callback(
            place.scale.shape, place.scale.sharding, scale
        ).block_until_ready(),
    )


def quantise_in_blocks(
    spans: tuple[tuple[int, int], ...], axes: tuple[int, ...], read: Read
) -> Int8Weight:
    """Returns the int8 weight of a part of a parameter, in arrays of NumPy.

    Args:
      spans: first and last entry along each axis; ``axes`` have their full length.
    """
    sizes = [last - first for first, last in spans]
    over = max((i for i in range(len(sizes)) if i not in axes), key=sizes.__getitem__)
    values = np.empty(sizes, np.int8)
    scale = np.empty([1 if i in axes else n for i, n in enumerate(sizes)], np.float32)
    step = max(BLOCK_BYTES // (4 * max(math.prod(sizes) // max(sizes[over], 1), 1)), 1)
    first, last = spans[over]
    for start in range(first, last, step):
        part = slice(start, min(start + step, last))
        whole = read(tuple(part if i == over else slice(*span) for i, span in enumerate(spans)))
        with np.errstate(invalid="ignore"):  # of a damaged file; the scale shows it
            block = quantise(whole, axes)
        here = (slice(None),) * over + (slice(part.start - first, part.stop - first),)
        values[here], scale[here] = block.values, block.scale
    return Int8Weight(values, scale)
