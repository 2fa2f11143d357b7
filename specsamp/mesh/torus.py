"""Arranges the devices of a TPU slice for a mesh, so that each part is a box of neighbours.

    arrange(jax.devices(), (16, 16))        # v5e-256: 16 data shards, each of 4 x 4 chips

A box has the fewest hops that its all-reduce makes one after another. The compiler has two ways
(compared for described slices with libtpu 0.0.42 and 0.0.50; tests/tpu/test_torus.py):

- Over **whole axes** of the slice it goes an axis at a time, over all links at once: to the chip
  that is farthest away.
- Through any **other box** goes one ring of all its devices: half of their number.

So 16 chips of a v5e-256 are one ring as a square and as a line, with the same bandwidth. Chips of
the square are at most 6 hops apart, chips of the line 8, although it wraps around. Of a 4x4x4, 16
chips are best a plane, with 4 hops and four rings at once: 2x2x4 would be one ring with 8 hops.

Rings of v4 and v5p follow the order of the mesh, rings of v5e and v6e are the compiler's own. So
devices of a box stand in the order of a ring of neighbours. Where all axes of a box close to rings,
they stand in row-major order, which the compiler needs to gather along several axes.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Box = tuple[int, ...]  # devices of a chip, then chips along x, y and z


def arrange(devices: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """Arranges devices for the axes of a mesh; devices that are no TPUs keep their order.

    Args:
      devices: all devices of a box of chips, in any order.
      shape: of the mesh: data shards, then the axes over which one copy of a model is split.

    Returns:
      the devices, in an array of ``shape``.

    Raises:
      ValueError: TPUs are of several slices, or do not fill a box of chips.
    """
    if any(device.platform != "tpu" for device in devices):
        return np.array(devices, object).reshape(shape)
    grid, model = _grid(devices), shape[-1]
    copy_box, model_box = find_boxes(grid.shape, math.prod(shape[1:]), model)
    parts = np.stack([_split(copy, model_box) for copy in _split(grid, copy_box)])
    placed = parts.reshape((*parts.shape[:2], model), order="F")
    return placed[..., _order(model_box, grid.shape)].reshape(shape)


@functools.cache
def find_boxes(extent: Box, copy: int, model: int) -> tuple[Box, Box]:
    """Finds the boxes with the fewest hops, of a copy of a model and, in it, of the axis ``model``.

    Args:
      extent: of the slice: devices of a chip, then chips along its axes.
      copy: devices that hold one copy.
      model: devices of the mesh axis ``model``: fewer if the mesh has an axis ``replica``.

    Raises:
      ValueError: ``copy`` does not divide the devices of the slice, or ``model`` the devices of the
      copy.
    """
    devices = math.prod(extent)
    if devices % copy or copy % model:
        raise ValueError(f"parts of {copy} and {model} devices do not divide a slice of {devices}")

    def cost(boxes: tuple[Box, Box]) -> tuple[Any, ...]:
        hops, farthest = map(sum, zip(*(_hops(box, extent) for box in boxes)))
        longest = sum(map(max, boxes))
        return hops, farthest, longest, [box[::-1] for box in boxes]  # if equal, along x first

    pairs = ((outer, inner) for outer in _boxes(extent, copy) for inner in _boxes(outer, model))
    return min(pairs, key=cost)


def wraps(chips: Sequence[int]) -> tuple[bool, ...]:
    """Returns which axes of a slice wrap around, by Google's and MaxText's tables of slices.

    In three dimensions all do if the slice consists of cubes of 4x4x4, in two all axes of 16 chips.
    """
    if math.prod(chips[2:]) == 1:
        return tuple(size == 16 for size in chips)
    return (all(size % 4 == 0 for size in chips),) * 3


def _sides(box: Box, extent: Box) -> list[tuple[int, int, bool]]:
    """Returns sides above 1, the sizes of their axes, and whether these are rings, as pairs are."""
    sides = zip(box, extent, (True, *wraps(extent[1:])))
    return [(side, size, wrap or size == 2) for side, size, wrap in sides if side > 1]


def _hops(box: Box, extent: Box) -> tuple[int, int]:
    """Returns the hops of an all-reduce, one way, and the hops to the farthest device."""
    sides, farthest = _sides(box, extent), 0
    for side, size, is_ring in sides:
        farthest += side // 2 if is_ring and side == size else side - 1
    if len(sides) <= 1 or all(side == size for side, size, _ in sides):
        return farthest, farthest
    return (math.prod(box) + 1) // 2, farthest


def _order(box: Box, extent: Box) -> np.ndarray:
    """Returns the order of the devices of a box, as indices of row-major order, x first."""
    if all(is_ring and side == size for side, size, is_ring in _sides(box, extent)):
        return np.arange(math.prod(box))
    return np.ravel_multi_index(np.transpose(_ring(box)), box, order="F")


def _boxes(extent: Box, count: int) -> list[Box]:
    """Returns the boxes of ``count`` devices that divide a larger one, of whole chips if
    they can.
    """
    of_chip, *chips = extent
    sides = [[side for side in range(1, size + 1) if size % side == 0] for size in chips]
    boxes = itertools.product([math.gcd(count, of_chip)], *sides)
    return [box for box in boxes if math.prod(box) == count]


def _grid(devices: Sequence[Any]) -> np.ndarray:
    """Returns devices by place, or raises ValueError if they do not fill a box of one slice."""
    # Devices of a single slice may lack the attribute.
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices > 1:
        raise ValueError(
            f"{len(devices)} devices lie in {slices} TPU slices, and a mesh is of one: start each "
            f"slice by itself, with --replica=0/{slices} to --replica={slices - 1}/{slices}"
        )
    places = np.array([(device.core_on_chip, *device.coords) for device in devices])
    places -= places.min(axis=0)
    grid = np.full(places.max(axis=0) + 1, None, object)
    grid[tuple(places.T)] = devices
    filled = sum(device is not None for device in grid.flat)
    if not len(devices) == filled == grid.size:
        chips = " x ".join(map(str, grid.shape[1:]))
        raise ValueError(
            f"a list of {len(devices)} TPU devices has {filled} of the {grid.size} in a box of "
            f"{chips} chips: give all devices of a box, each once"
        )
    return grid


def _split(grid: np.ndarray, box: Box) -> np.ndarray:
    """Splits a box into smaller ones, ``[parts, *box]``, in row-major order, x first."""
    cut = [part for size, side in zip(grid.shape, box) for part in (size // side, side)]
    axes = np.arange(2 * grid.ndim).reshape(-1, 2).T.ravel()
    return grid.reshape(cut).transpose(axes).reshape((-1, *box), order="F")


def _path(box: Box) -> list[Box]:
    """Returns all places of a box, neighbours one after another."""
    if not box:
        return [()]
    rest = _path(box[1:])
    return [(i, *place) for i in range(box[0]) for place in rest[:: 1 - 2 * (i % 2)]]


def _ring(box: Box) -> list[Box]:
    """Returns a path that ends next to its start, if a side is even and the box is not a line."""
    axis = next((axis for axis, side in enumerate(box) if side % 2 == 0), None)
    if axis is None:
        return _path(box)
    # The first place of each layer, then backwards the other places of each layer.
    first, *rest = _path(box[:axis] + box[axis + 1 :])
    layers = range(box[axis])
    ring = [(i, first) for i in layers]
    ring += [(i, place) for i in layers[::-1] for place in rest[:: 2 * (i % 2) - 1]]
    return [(*place[:axis], i, *place[axis:]) for i, place in ring]
