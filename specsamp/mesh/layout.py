"""Meshes of devices, and the rules that say how arrays are split over their axes.

Models name the axes of their parameters, weights and caches ("heads", "vocab", ...). A `Layout` maps each of these
logical axes to mesh axes. All mesh axes are Auto: the compiler derives the shardings of intermediate values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specsamp.decoding.data_shards import DATA, constrain
from specsamp.models.int8 import Int8Weight, is_int8

REPLICA, MODEL = "replica", "model"

# The logical axis of logits and of everything sampled from them: the devices that hold a model together divide the
# rows of their data shard among them.
ROWS = "rows"

# Tensor parallelism (Shoeybi et al., arXiv 1909.08053) splits the first of these; every device has all of the second.
SPLIT_AXES = ("vocab", "heads", "kv_heads", "mlp", "experts", "expert_mlp", "features", ROWS)
WHOLE_AXES = ("embed", "head", "slots")
# These are split over as many devices as divide them; the other devices hold replicas.
AS_FAR_AS_POSSIBLE = ("kv_heads", ROWS)
# Arrays of experts are split by expert, or where these do not divide, by the width of each.
EXPERTS, EXPERT_WIDTH = "experts", "expert_mlp"


def make_mesh(
    data: int = 1,
    model: int | None = None,
    *,
    draft_model_parallelism: int | None = None,
    num_kv_heads: int | None = None,
    rows: int | None = None,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Makes a mesh with the axes ``data`` and ``model``.

    The last three sizes can split the model axis in two, ``replica`` x ``model``: what does not divide over all
    ``model`` devices is split over the inner axis and replicated over the outer one. The first size that requires it
    decides, in the order of the arguments.

    Args:
      data: number of data-parallel shards of the batch.
      model: number of devices that hold one copy of the target together; by default all devices / ``data``.
      draft_model_parallelism: number of devices that hold one copy of the draft together; 1 and ``model`` need no
        axis of their own.
      num_kv_heads: kv heads of the target. If there are fewer than ``model`` devices, each device stores the cache of
        its own kv heads instead of all of them.
      rows: batch rows of one data shard. If there are fewer than ``model`` devices, sampling is split over as many
        devices as divide them.
      devices: devices of the mesh; by default all devices of all processes, with neighbours in the network together.

    Raises:
      ValueError: ``data`` x ``model`` is not the number of devices, ``draft_model_parallelism`` does not divide
        ``model``, or a size is negative.
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
    """Returns the shape and the axis names of the mesh that `make_mesh` makes."""
    if draft_model_parallelism is not None and (draft_model_parallelism < 1 or model % draft_model_parallelism):
        raise ValueError(
            f"draft_model_parallelism {draft_model_parallelism} does not divide the {model} devices of the mesh axis "
            "'model'"
        )
    for name, count in (("num_kv_heads", num_kv_heads), ("rows", rows)):
        if count is not None and count < 0:
            raise ValueError(f"{name} must not be negative; got {count}")
    parts = (math.gcd(count, model) for count in (draft_model_parallelism, num_kv_heads, rows) if count)
    inner = next((part for part in parts if 1 < part < model), model)
    if inner == model:
        return (data, model), (DATA, MODEL)
    return (data, model // inner, inner), (DATA, REPLICA, MODEL)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and the logical axis rules of a model; hashable."""

    mesh: Mesh
    rules: tuple[tuple[str, tuple[str, ...]], ...]  # logical axis -> the mesh axes it is split over, major first

    @classmethod
    def from_rules(cls, mesh: Mesh, rules: Mapping[str, Sequence[str]]) -> Layout:
        """Makes a layout from a dictionary of rules.

        Raises:
          ValueError: a rule names a mesh axis that does not exist, or the mesh has Explicit axes.
        """
        if any(kind == AxisType.Explicit for kind in mesh.axis_types):
            raise ValueError("the mesh has Explicit axes: pass axis_types=(AxisType.Auto, ...) or use make_mesh")
        for name, axes in rules.items():
            for axis in axes:
                if axis not in mesh.shape:
                    raise ValueError(f"{name!r} is to be split over {axis!r}, but the mesh has {dict(mesh.shape)}")
        return cls(mesh, tuple(sorted((name, tuple(axes)) for name, axes in rules.items())))

    @classmethod
    def tensor_parallel(cls, mesh: Mesh, over: Sequence[str] | None = None) -> Layout:
        """Returns the layout that splits heads, feed-forward and vocabulary over all model axes, or over ``over``."""
        # The model axis is major, so that an array split over it alone lies with its part of one split over both.
        axes = tuple(axis for axis in (MODEL, REPLICA) if axis in mesh.shape) if over is None else tuple(over)
        split, whole = dict.fromkeys(SPLIT_AXES, axes), dict.fromkeys(WHOLE_AXES, ())
        return cls.from_rules(mesh, split | whole | {"batch": (DATA,)})

    @classmethod
    def replicated(cls, mesh: Mesh) -> Layout:
        """Returns the layout that gives every device a copy of all parameters."""
        return cls.tensor_parallel(mesh, over=())

    def spec(self, axes: PartitionSpec, shape: Sequence[int]) -> PartitionSpec:
        """Maps the logical axes of an array of this shape to mesh axes.

        Raises:
          ValueError: an axis name is unknown, a size does not divide over its devices, or two axes of the array are
            split over the same mesh axis.
        """
        rules, placed, used = dict(self.rules), [], {}
        if len(axes) != len(shape):
            raise ValueError(f"{len(axes)} axis names {tuple(axes)} for an array of shape {tuple(shape)}")
        for name, size in zip(axes, shape):
            if name is not None and name not in rules:
                raise ValueError(f"no logical axis {name!r} in the layout: it has {', '.join(rules)}")
            over = rules.get(name, ())
            if name in AS_FAR_AS_POSSIBLE:
                while size % self._num_devices(over):
                    over = over[:-1]
            if name == EXPERTS and size % self._num_devices(over) or name == EXPERT_WIDTH and EXPERTS in used.values():
                over = ()
            if name == EXPERT_WIDTH and size % self._num_devices(over):
                raise self._indivisible_experts(dict(zip(axes, shape))[EXPERTS], size, over)
            if size % self._num_devices(over):
                raise ValueError(
                    f"{name!r} has {size} entries, which do not divide over the {self._num_devices(over)} devices of "
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
        """Returns the `NamedSharding` of each array (or shape) of a tree, from the tree of their logical axes.

        ``axes`` is None for a model that names no axes: every device then has all arrays.
        """
        if axes is None:
            return jax.tree.map(lambda x: NamedSharding(self.mesh, PartitionSpec()), shapes)

        def sharding(names, x):
            if is_int8(
                x
            ):  # scales lie with their output channels; of a table all do, or looking one up is a collective
                kept = (size > 1 and name != "vocab" for name, size in zip(names, x.scale.shape))
                of_scale = PartitionSpec(*(name if keep else None for name, keep in zip(names, kept)))
                return Int8Weight(sharding(names, x.values), sharding(of_scale, x.scale))
            return NamedSharding(self.mesh, self.spec(names, x.shape))

        return jax.tree.map(sharding, axes, shapes, is_leaf=lambda x: isinstance(x, PartitionSpec))

    def constrain(self, axes: Any, tree: Any) -> Any:
        """Constrains the shardings of a tree inside a compiled function, from the tree of its logical axes."""
        return constrain(tree, self.shardings(axes, tree))

    # What models and heads have in common inside a compiled function.

    def of_all_rows(self, *of_rows: jax.Array) -> tuple[jax.Array, ...]:
        """Gathers tokens, starts and the like: rows were sampled on different devices, and a call needs all of them."""
        return tuple(self.on_all_devices(x) for x in of_rows)

    def on_all_devices(self, x: jax.Array) -> jax.Array:
        """Gives all devices of a data shard the whole array, such as a stream ``[B, T, D]``."""
        return self.constrain(PartitionSpec(*(None,) * x.ndim), x)

    def split_features(self, x_BTX: jax.Array) -> jax.Array:
        """Splits a concatenation like the rows of the matrix it is multiplied by, in two steps.

        Directly, the compiler splits the tokens of its parts, joins these and sends them round.
        """
        return self.constrain(PartitionSpec(None, None, "features"), self.on_all_devices(x_BTX))

    def by_rows(self, logits_BTV: jax.Array) -> jax.Array:
        """Gathers the vocabulary of each row, and divides the rows among the devices as far as they divide.

        Warps then need no collectives. If all devices warped all rows, a batch of eight would cost ten times the cycles
        (notebooks/results/compile_variants.json); divided rows cost a few small collectives per round, for tokens and
        accepted counts. A single row is on all devices.

        The sharding changes in two steps. Directly from the product to divided rows the compiler gathers the embedding,
        and from a vocabulary split over more devices than the rows it gathers all rows.
        """
        rows = self.spec(PartitionSpec(ROWS), logits_BTV.shape[:1])
        over = rows[0] if rows else None
        logits_BTV = self.constrain(PartitionSpec(None, None, "vocab"), logits_BTV)
        for spec in (PartitionSpec(None, None, over), PartitionSpec(over, None, None)):
            logits_BTV = constrain(logits_BTV, NamedSharding(self.mesh, spec))
        return logits_BTV

    def place_cache(self, axes: Any, cache: Any) -> Any:
        """Lays a cache out by its logical axes, if there is one; without axes it is left to the compiler."""
        if axes is None or cache is None:
            return cache

        # Inside `jax.shard_map` the batch is that of one data shard already.
        def without_batch(spec):
            return PartitionSpec(*(None if name == "batch" else name for name in spec))

        axes = jax.tree.map(without_batch, axes, is_leaf=lambda x: isinstance(x, PartitionSpec))
        return self.constrain(axes, cache)

    def _indivisible_experts(self, count: int, width: int, over: Sequence[str]) -> ValueError:
        devices = self._num_devices(over)
        best = max((count, width), key=lambda size: math.gcd(size, devices))
        return ValueError(
            f"neither {count} experts nor their width of {width} divide over the {devices} devices of "
            f"{' x '.join(over)}: {self._advice(best, over)}"
        )

    def _advice(self, size: int, over: Sequence[str]) -> str:
        """Names the largest number of devices that ``size`` divides over, and the flags that choose it."""
        fitting = math.gcd(size, self._num_devices(over))
        if fitting == 1:
            return "pad the model, or give every device a whole copy (model=1)"
        if self._num_devices(over) < self._num_devices([axis for axis in self.mesh.shape if axis != DATA]):
            return f"split the draft over {fitting} (--config.mesh.draft_model_parallelism={fitting}), or pad the model"
        data = math.prod(self.mesh.shape.values()) // fitting
        flags = f"--config.mesh.data={data} --config.mesh.model={fitting}"
        return f"use data={data} and model={fitting} ({flags}), or pad the model"

    def _num_devices(self, over: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in over)


def put(tree: Any, shardings: Any) -> Any:
    """Applies `jax.device_put`, also if other processes hold some of the devices.

    Every process must then call it with the same, whole values.
    """

    def put_one(x: Any, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
            return jax.device_put(x, sharding)
        value = np.asarray(x)
        return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)

    return jax.tree.map(put_one, tree, shardings)
