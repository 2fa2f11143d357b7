"""Applies functions on each device of a mesh to its own part of the arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from specsamp.models.interface import MeshLayout


def per_device(function: Callable, layout: MeshLayout | None, in_specs: Any, out_specs: Any) -> Callable:
    """Returns ``function`` applied on each device, within `jax.shard_map` over data shards too.

    Args:
      layout: of a model over a mesh; None: one device, and ``function`` as it is.
    """
    if layout is None:
        return function
    mesh, axes = layout.mesh, set(layout.mesh.axis_names)
    outer = jax.sharding.get_abstract_mesh()
    if not outer.empty:  # within data shards
        mesh, axes = outer, axes - set(outer.manual_axes)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)
