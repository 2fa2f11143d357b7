"""Which axis of which array lives on which axis of a mesh of devices: one small table per model.

Models name the axes of their parameters, weights and caches; a `Layout` says which of the names are split
over which mesh axes. Axes are Auto: the compiler derives the rest from these shardings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specsamp.decoding.data_shards import DATA

REPLICA, MODEL = "replica", "model"

# Rows of a batch, of logits and of all that is sampled from them: the devices that hold a model together share them.
ROWS = "rows"

# What tensor parallelism splits (Shoeybi et al., arXiv 1909.08053) and what every device has whole.
SPLIT_AXES = ("vocab", "heads", "kv_heads", "mlp", ROWS)
WHOLE_AXES = ("embed", "head", "slots")
# Split as far as they divide: with fewer kv heads (or rows) than devices, some devices have the same ones.
AS_FAR_AS_POSSIBLE = ("kv_heads", ROWS)


def make_mesh(
    data: int = 1,
    model: int | None = None,
    *,
    draft_model_parallelism: int | None = None,
    num_kv_heads: int | None = None,
    rows: int | None = None,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh with axes ``data`` and ``model``.

    Args:
      data: shares of the batch.
      model: devices that hold one copy of the target together; default: all that are left.
      draft_model_parallelism: devices that hold one copy of the draft together, if neither 1 nor ``model``: the model
        axis is then made of two, ``copies`` x ``model``, and the draft is split over the second only.
      num_kv_heads: of the target. If they are fewer than ``model``, the axis is made of two as well, so that each
        device keeps its share of the heads' caches and not all of them. (``draft_model_parallelism`` comes first.)
      rows: of a share of the batch, likewise: sampling is split over as many devices as they divide over.
        (Key heads come first.)
      devices: default all devices of all processes, in the order of ICI neighbourhood.

    Raises:
      ValueError: the product is not the number of devices, with both numbers.
    """
    count = jax.device_count() if devices is None else len(devices)
    if model is None and data >= 1:
        model = max(count // data, 1)
    for name, size in (("data", data), ("model", model)):
        if size < 1:
            raise ValueError(f"the mesh axis {name!r} must have at least 1 device; got {size}")
    if data * model != count:
        raise ValueError(
            f"a mesh of data {data} x model {model} has {data * model} devices, but there are {count}: "
            f"choose factors of {count}"
        )
    shape, names = mesh_axes(data, model, draft_model_parallelism, num_kv_heads, rows)
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


def mesh_axes(
    data: int,
    model: int,
    draft_model_parallelism: int | None = None,
    num_kv_heads: int | None = None,
    rows: int | None = None,
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Shape and axis names of a mesh, see `make_mesh`."""
    if draft_model_parallelism is not None and (draft_model_parallelism < 1 or model % draft_model_parallelism):
        raise ValueError(
            f"draft_model_parallelism {draft_model_parallelism} does not divide the {model} devices of the mesh axis 'model'"
        )
    parts = (math.gcd(count, model) for count in (draft_model_parallelism, num_kv_heads, rows) if count)
    inner = next((part for part in parts if 1 < part < model), model)
    if inner == model:
        return (data, model), (DATA, MODEL)
    return (data, model // inner, inner), (DATA, REPLICA, MODEL)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and which of its axes each logical axis of a model is split over (major first); hashable."""

    mesh: Mesh
    table: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def of(cls, mesh: Mesh, table: Mapping[str, Sequence[str]]) -> Layout:
        """From a dictionary; raises ValueError for a mesh axis that does not exist."""
        if any(kind == AxisType.Explicit for kind in mesh.axis_types):
            raise ValueError("the mesh has Explicit axes: pass axis_types=(AxisType.Auto, ...) or use make_mesh")
        for name, axes in table.items():
            for axis in axes:
                if axis not in mesh.shape:
                    raise ValueError(f"{name!r} is to be split over {axis!r}, but the mesh has {dict(mesh.shape)}")
        return cls(mesh, tuple(sorted((name, tuple(axes)) for name, axes in table.items())))

    @classmethod
    def tensor_parallel(cls, mesh: Mesh, over: Sequence[str] | None = None) -> Layout:
        """Heads, feed-forward and vocabulary over all model axes of the mesh, or over the given ones."""
        # The model axis first: what is split over it alone lies with what is split over both.
        axes = tuple(axis for axis in (MODEL, REPLICA) if axis in mesh.shape) if over is None else tuple(over)
        split, whole = dict.fromkeys(SPLIT_AXES, axes), dict.fromkeys(WHOLE_AXES, ())
        return cls.of(mesh, split | whole | {"batch": (DATA,)})

    @classmethod
    def replicated(cls, mesh: Mesh) -> Layout:
        """A whole copy on every device."""
        return cls.tensor_parallel(mesh, over=())

    def spec(self, axes: PartitionSpec, shape: Sequence[int]) -> PartitionSpec:
        """Logical names of an array's axes -> mesh axes.

        Raises:
          ValueError: an unknown name; a size that does not divide; a mesh axis used twice.
        """
        table, placed, used = dict(self.table), [], {}
        if len(axes) != len(shape):
            raise ValueError(f"{len(axes)} axis names {tuple(axes)} for an array of shape {tuple(shape)}")
        for name, size in zip(axes, shape):
            if name is not None and name not in table:
                raise ValueError(f"no logical axis {name!r} in the layout: it has {', '.join(table)}")
            over = table.get(name, ())
            if name in AS_FAR_AS_POSSIBLE:
                while size % self._ways(over):
                    over = over[:-1]
            if size % self._ways(over):
                raise ValueError(
                    f"{name!r} has {size} entries, which do not divide over the {self._ways(over)} devices of "
                    f"{' x '.join(over)}: {self._advice(size, over)}"
                )
            for axis in over:
                if axis in used:
                    both = f"{used[axis]!r} and {name!r} of {tuple(axes)}"
                    raise ValueError(f"mesh axis {axis!r} is used twice, by {both}")
                used[axis] = name
            placed.append(None if not over else over[0] if len(over) == 1 else over)
        while placed and placed[-1] is None:  # P("a", None) and P("a") are different objects
            placed.pop()
        return PartitionSpec(*placed)

    def shardings(self, axes: Any, shapes: Any) -> Any:
        """`NamedSharding`s for a tree of arrays or shapes, from the tree of their logical axes.

        ``axes`` may be None for a model that names none: every device has all of it.
        """
        if axes is None:
            return jax.tree.map(lambda x: NamedSharding(self.mesh, PartitionSpec()), shapes)

        def place(names, x):
            return NamedSharding(self.mesh, self.spec(names, x.shape))

        return jax.tree.map(place, axes, shapes, is_leaf=lambda x: isinstance(x, PartitionSpec))


def put(tree: Any, shardings: Any) -> Any:
    """`jax.device_put`, also where other processes hold some of the devices; each must have the whole value."""

    def one(x: Any, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
            return jax.device_put(x, sharding)
        value = np.asarray(x)
        return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)

    return jax.tree.map(one, tree, shardings)
