"""Reads matrices of a checkpoint as int8 weights, a block at a time: no float copy of a whole one is ever made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from specsamp.checkpoints.safetensors_io import BLOCK_BYTES
from specsamp.checkpoints.tensor_names import Source
from specsamp.models.int8 import Int8Weight, is_int8, quantise, summed_axes

Read = Callable[[tuple[slice, ...]], np.ndarray]  # of a slice of the parameter, in float32


def read_int8(place: Int8Weight, axes: tuple[int, ...], read: Read) -> Int8Weight:
    """Quantises a parameter while it is read, each process for the output channels that its devices hold.

    A scale is of all that a product sums over, which is read whole also where devices hold parts of it.

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

    return Int8Weight(
        jax.make_array_from_callback(shape, place.values.sharding, values).block_until_ready(),
        jax.make_array_from_callback(
            place.scale.shape, place.scale.sharding, lambda index: channels(index).scale
        ).block_until_ready(),
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


# Files that hold int8 weights have a second tensor for the scales of each.

SCALES = "_scale"  # behind the name of the int8 tensor


def apart(places: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values and scales of int8 weights as arrays of their own, the latter under the name with `SCALES`."""
    found = {}
    for name, place in places.items():
        found |= {name: place.values, name + SCALES: place.scale} if is_int8(place) else {name: place}
    return found


def together(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `apart` took apart."""
    return {
        name: Int8Weight(array, arrays[name + SCALES]) if name + SCALES in arrays else array
        for name, array in arrays.items()
        if not (name.endswith(SCALES) and name.removesuffix(SCALES) in arrays)
    }


def scale_source(name: str, source: Source) -> tuple[Source, dict[str, int]]:
    """Returns the source of a parameter's scales, and the sizes of the letters that a product sums over: 1."""
    ones = {source.axes[axis]: 1 for axis in summed_axes(name)}
    return dataclasses.replace(source, tensor=source.tensor + SCALES), ones
