"""Meshes of devices, and the rules by which arrays are split over their axes.

Models name the axes of their parameters, weights and caches ("heads", "vocab", ...). A `Layout`
maps these logical axes to mesh axes by `RULES`. All mesh axes are Auto: the compiler derives the
shardings of intermediate values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specsamp import validate
from specsamp.decoding.data_shards import DATA, constrain
from specsamp.mesh.torus import arrange
from specsamp.models.int8 import Int8Weight, is_int8
from specsamp.models.interface import DeviceLayout

REPLICA, MODEL = "replica", "model"
# The logical axis of logits and of tokens that are sampled from them: the sequences of a data
# shard.
ROWS = "rows"

SPLIT = "over the devices of the model, which must divide it"
AS_FAR_AS_POSSIBLE = "over as many of these devices as divide it; the other devices hold copies"
IN_TILES = "over as many of these devices as divide it into whole tiles of memory"
OVER_THE_REST = (
    "over the devices that no other axis of the array is split over, which must divide it"
)
WHOLE = "not at all"
TILE = 16  # entries of bfloat16
# How each logical axis is split: tensor parallelism (Shoeybi et al., arXiv 1909.08053). Devices
# with a part of every expert have the same work for any choice of experts; of 128 whole ones
# over 8 devices the slowest has twice the mean.
RULES = {
    "vocab": SPLIT,
    "heads": SPLIT,
    "kv_heads": AS_FAR_AS_POSSIBLE,
    "mlp": SPLIT,
    "experts": OVER_THE_REST,
    "expert_mlp": IN_TILES,
    "features": SPLIT,
    ROWS: AS_FAR_AS_POSSIBLE,
    "embed": WHOLE,
    "head": WHOLE,
    "slots": WHOLE,
}


def make_mesh(
    data: int | None = None,
    model: int | None = None,
    *,
    draft_model_parallelism: int | None = None,
    num_kv_heads: int | None = None,
    rows: int | None = None,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Makes a mesh with the axes ``data`` and ``model``.

    The other sizes can split the model axis in two, ``replica`` x ``model``: arrays that do not
    divide over all devices of the model are split over the inner axis and replicated over the outer
    axis. The first size that requires it decides, in the order of the arguments.

    Args:
      data: number of data-parallel shards of the batch; by default all devices / ``model``.
      model: number of devices that hold one copy of the target together; by default all devices /
        ``data``. Without both, one copy is split over all devices.
      draft_model_parallelism: number of devices that hold one copy of the draft together; 1 and
        ``model`` need no mesh axis.
      num_kv_heads: kv heads of the target. With fewer kv heads than ``model`` devices, a device
        stores the cache of its kv heads, not of all.
      rows: sequences of one data shard. With fewer sequences than ``model`` devices, sampling is
        split over as many devices as divide them.
      devices: devices of the mesh; by default all devices of all processes. TPUs are arranged so
        that each part has neighbours in the network (`specsamp.mesh.torus`), other devices keep
        their order.

    Raises:
      ValueError: ``data`` x ``model`` is not the number of devices, ``draft_model_parallelism``
        does not divide ``model``, a size is no positive integer, or TPUs are of several slices or
        not adjacent.
    """
    if not (
        devices is None
        or (validate.is_list(devices) and all(hasattr(one, "device_kind") for one in devices))
    ):
        raise ValueError(
            f"devices must be a list of devices, such as jax.devices(); got {devices!r}"
        )
    devices = jax.devices() if devices is None else devices
    count = len({id(one) for one in devices})
    if count == 0 or count < len(devices):
        raise ValueError(
            f"devices must name each device once; got {len(devices)} with {count} different"
        )
    for name, size in (("data", data), ("model", model)):
        if size is not None:
            validate.integer(f"the mesh axis {name!r}", size, 1)
    if data is None:
        data = 1 if model is None else max(count // model, 1)
    if model is None:
        model = max(count // data, 1)
    if data * model != count:
        raise ValueError(
            f"a mesh of data {data} x model {model} has {data * model} devices, but there are "
            f"{count}: choose factors of {count}"
        )
    shape, names = mesh_axes(data, model, draft_model_parallelism, num_kv_heads, rows)
    return Mesh(arrange(devices, shape), names, axis_types=(AxisType.Auto,) * len(names))


def mesh_axes(
    data: int,
    model: int,
    draft_model_parallelism: int | None = None,
    num_kv_heads: int | None = None,
    rows: int | None = None,
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the shape and the axis names of the mesh that `make_mesh` makes."""
    sizes = dict(
        draft_model_parallelism=draft_model_parallelism, num_kv_heads=num_kv_heads, rows=rows
    )
    for name, size in sizes.items():
        if size is not None:
            validate.integer(name, size, 1 if name == "draft_model_parallelism" else 0)
    if draft_model_parallelism is not None and model % draft_model_parallelism:
        raise ValueError(
            f"draft_model_parallelism {draft_model_parallelism} does not divide the {model} "
            "devices of the mesh axis 'model'"
        )
    parts = (math.gcd(size, model) for size in sizes.values() if size)
    inner = next((part for part in parts if 1 < part < model), model)
    if inner == model:
        return (data, model), (DATA, MODEL)
    return (data, model // inner, inner), (DATA, REPLICA, MODEL)


@dataclasses.dataclass(frozen=True)
class Layout(DeviceLayout):
    """The layout of a model's arrays on a mesh, by `RULES`; hashable."""

    mesh: Mesh
    over: tuple[str, ...]  # the mesh axes that hold one copy of the model together, major first

    def __post_init__(self):
        if DATA not in self.mesh.shape:
            raise ValueError(
                f"the mesh has no axis {DATA!r}, only {', '.join(self.mesh.shape)}: use make_mesh"
            )
        for axis, size in self.mesh.shape.items():
            if size > 1 and axis not in (DATA, REPLICA, MODEL):
                raise ValueError(
                    f"nothing is split over the mesh axis {axis!r}, only over {DATA!r} and "
                    f"{MODEL!r}: use make_mesh"
                )
        if any(kind == AxisType.Explicit for kind in self.mesh.axis_types):
            raise ValueError(
                "the mesh has Explicit axes: pass axis_types=(AxisType.Auto, ...) or use make_mesh"
            )

    @property
    def device(self) -> jax.Device:
        return self.mesh.devices.flat[0]

    @classmethod
    def tensor_parallel(cls, mesh: Mesh) -> Layout:
        """Returns the layout that splits heads, feed-forward and vocabulary over all model axes."""
        # The model axis is major: the parts of an array that is split over both axes then lie with
        # the same array's parts over the model axis alone.
        return cls(mesh, tuple(axis for axis in (MODEL, REPLICA) if axis in mesh.shape))

    @classmethod
    def replicated(cls, mesh: Mesh) -> Layout:
        """Returns the layout that gives every device a copy of all parameters."""
        return cls(mesh, ())

    def spec(self, axes: PartitionSpec, shape: Sequence[int]) -> PartitionSpec:
        """Maps the logical axes of an array of this shape to mesh axes.

        Raises:
          ValueError: an axis name is unknown, or a size does not divide over its devices.
        """
        if len(axes) != len(shape):
            raise ValueError(
                f"{len(axes)} axis names {tuple(axes)} for an array of shape {tuple(shape)}"
            )
        for tile in (TILE, 1):  # without whole tiles if experts do not divide over the other axes
            placed = [self._axes_of(name, size, tile) for name, size in zip(axes, shape)]
            taken = {axis for over in placed for axis in over or ()}
            rest = tuple(axis for axis in self.over if axis not in taken)
            placed = [rest if over is None else over for over in placed]
            unfit = [
                each for each in zip(axes, shape, placed) if each[1] % self._num_devices(each[2])
            ]
            if not unfit:
                break
        else:
            name, size, over = unfit[0]
            count = self._num_devices(over)
            fitting = math.gcd(size, count)
            data = math.prod(self.mesh.shape.values()) // fitting
            raise ValueError(
                f"{name!r} has {size} entries, which do not divide over the {count} devices of "
                f"{' x '.join(over)}: split a target over {fitting} (--config.mesh.data={data} "
                f"--config.mesh.model={fitting}), a draft over {fitting} "
                f"(--config.mesh.draft_model_parallelism={fitting}), or pad the model"
            )
        return _spec(None if not over else over[0] if len(over) == 1 else over for over in placed)

    def part_shape(self, axes: PartitionSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the part of an array that a device has."""
        return NamedSharding(self.mesh, self.spec(axes, shape)).shard_shape(shape)

    def specs(self, axes: Any, tree: Any) -> Any:
        """Returns the `spec` of each array of a tree, see `shardings`."""
        return jax.tree.map(lambda sharding: sharding.spec, self.shardings(axes, tree))

    def _axes_of(self, name: str | None, size: int, tile: int) -> tuple[str, ...] | None:
        """Returns the mesh axes that a logical axis is split over; None: the axes that no other
        logical axis uses.
        """
        if name == "batch":
            return (DATA,)
        if name is None:
            return ()
        if name not in RULES:
            raise ValueError(
                f"no logical axis {name!r} in the layout: it has batch, {', '.join(RULES)}"
            )
        rule, over = RULES[name], self.over
        if rule in (WHOLE, OVER_THE_REST):
            return () if rule == WHOLE else None
        unit = {AS_FAR_AS_POSSIBLE: 1, IN_TILES: tile}.get(rule, 0)
        while unit and size % (unit * self._num_devices(over)) and over:
            over = over[:-1]
        return over

    def shardings(self, axes: Any, shapes: Any) -> Any:
        """Returns the `NamedSharding` of each array (or shape) of a tree, from the tree of their
        logical axes.

        Without ``axes`` every device has all arrays.
        """
        if axes is None:
            return jax.tree.map(lambda x: NamedSharding(self.mesh, PartitionSpec()), shapes)

        def sharding(names, x):
            if is_int8(x):
                # Scales lie with their output channels. Every device has all scales of a table, so
                # that a lookup needs no collective.
                values = sharding(names, x.values)
                kept = (size > 1 and name != "vocab" for name, size in zip(names, x.scale.shape))
                of_scale = _spec(axis if keep else None for axis, keep in zip(values.spec, kept))
                return Int8Weight(values, NamedSharding(self.mesh, of_scale))
            return NamedSharding(self.mesh, self.spec(names, x.shape))

        return jax.tree.map(sharding, axes, shapes, is_leaf=lambda x: isinstance(x, PartitionSpec))

    def put(self, axes: Any, tree: Any) -> Any:
        """Puts a tree of whole arrays on their devices, see the function `put`."""
        return put(tree, self.shardings(axes, tree))

    def constrain(self, axes: Any, tree: Any) -> Any:
        """Constrains the shardings of a tree inside a compiled function, from the tree of its
        logical axes.
        """
        return constrain(tree, self.shardings(axes, tree))

    def on_all_devices(self, tree: Any) -> Any:
        """Replicates arrays over the devices of a data shard: streams, and tokens sampled on
        different devices.
        """
        return jax.tree.map(lambda x: self.constrain(PartitionSpec(*(None,) * x.ndim), x), tree)

    def split_features(self, x_BTX: jax.Array) -> jax.Array:
        """Splits a concatenation like the rows of the matrix of its product, in two steps.

        In one step the compiler would split the tokens of each part, and exchange them between
        devices.
        """
        return self.constrain(PartitionSpec(None, None, "features"), self.on_all_devices(x_BTX))

    def by_rows(self, logits_BTV: jax.Array) -> jax.Array:
        """Gathers the vocabulary of each sequence, and splits the sequences over the devices as far
        as they divide.

        Warps then need no collectives. If all devices warped all sequences, a batch of eight would
        cost ten times the cycles (notebooks/results/compile_variants.json).

        The sharding changes in two steps. In one step the compiler would gather the embedding, or
        all sequences if the vocabulary is split over more devices. The parts of the vocabulary are
        gathered along an axis of their own, the first: along the last the compiler may put the
        vocabulary outermost, and copies it.
        """
        (batch, length, vocab), of_vocab = (
            logits_BTV.shape,
            self.spec(PartitionSpec("vocab"), logits_BTV.shape[2:]),
        )
        if not of_vocab:
            return logits_BTV
        rows = self.spec(PartitionSpec(ROWS), (batch,))
        over = rows[0] if rows else None
        count = self._num_devices(self.over)
        parts_PBTV = logits_BTV.reshape(batch, length, count, vocab // count).transpose(2, 0, 1, 3)
        for spec in (of_vocab, PartitionSpec(over), PartitionSpec(None, over)):
            parts_PBTV = constrain(parts_PBTV, NamedSharding(self.mesh, spec))
        return parts_PBTV.transpose(1, 2, 0, 3).reshape(logits_BTV.shape)

    def place_cache(self, axes: Any, cache: Any) -> Any:
        """Constrains the sharding of a cache, or None, by its logical axes; without axes the
        compiler decides.
        """
        if axes is None or cache is None:
            return cache

        # Inside `jax.shard_map` the batch is already the batch of one data shard.
        def without_batch(spec):
            return PartitionSpec(*(None if name == "batch" else name for name in spec))

        axes = jax.tree.map(without_batch, axes, is_leaf=lambda x: isinstance(x, PartitionSpec))
        return self.constrain(axes, cache)

    def per_device(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Returns ``function`` applied on each device to its part of the arrays, also within data
        shards.
        """
        mesh, axes = self.mesh, set(self.mesh.axis_names)
        outer = jax.sharding.get_abstract_mesh()
        if not outer.empty:  # within data shards
            mesh, axes = outer, axes - set(outer.manual_axes)
        return jax.shard_map(
            function,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=axes,
            check_vma=False,
        )

    def _num_devices(self, over: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in over)


def _spec(axes: Iterable[str | tuple[str, ...] | None]) -> PartitionSpec:
    specs = [*axes]
    while specs and specs[-1] is None:  # P("a", None) and P("a") are different objects
        specs.pop()
    return PartitionSpec(*specs)


def put(tree: Any, shardings: Any) -> Any:
    """Applies `jax.device_put`, also to devices of other processes; all processes must pass the
    same, whole values.
    """

    def put_one(x: Any, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_addressable or (
            isinstance(x, jax.Array) and not x.is_fully_addressable
        ):
            return jax.device_put(x, sharding)
        value = np.asarray(x)
        return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)

    return jax.tree.map(put_one, tree, shardings)
