"""What held-out text says of a model: its loss, and of a draft how much its target would accept."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specsamp.mesh.layout import DATA, Layout, make_mesh, put
from specsamp.sampling.warp import Warp, chain, temperature, top_p
from specsamp.training.task import Task

# Under which a draft is compared with its target on held-out text.
COMPARED_LAWS = {"temperature 1": chain(), "temperature 0.8, top-p 0.95": chain(temperature(0.8), top_p(0.95))}


def evaluate(
    task: Task,
    params: Any,
    frozen: Any,
    rows: np.ndarray,
    batch: int,
    mesh: Mesh | None = None,
    warps: dict[str, Warp] | None = None,
) -> dict[str, float]:
    """Averages of `Task.measure` over ``rows`` (the last few that fill no batch are left out)."""
    mesh = mesh or data_mesh()
    batch = evaluation_batch(rows, batch, mesh)
    params = put(params, Layout.tensor_parallel(mesh).shardings(task.model.param_axes(), params))
    frozen = put(frozen, frozen_shardings(task, frozen, mesh))
    sharding = NamedSharding(mesh, PartitionSpec(DATA))
    results: dict[str, list[float]] = {}
    for name, warp in (warps or {"": chain()}).items():
        for start in range(0, len(rows) - batch + 1, batch):
            rows_BT = rows[start : start + batch]
            on_mesh = jax.make_array_from_callback(rows_BT.shape, sharding, rows_BT.__getitem__)
            for key, value in _measure(mesh)(task, params, frozen, on_mesh, warp).items():
                label = key if not name or key == "loss" else f"{key} ({name})"
                results.setdefault(label, []).append(value)
    return {name: float(np.mean(jax.device_get(values))) for name, values in results.items()}


def evaluation_batch(rows: np.ndarray, batch: int, mesh: Mesh) -> int:
    """Rows at a time: about ``batch``, a multiple of the shares of ``data``.

    Raises:
      ValueError: there are fewer rows than shares.
    """
    shares = mesh.shape[DATA]
    batch = max(min(batch, len(rows)) // shares, 1) * shares
    if batch > len(rows):
        raise ValueError(f"{len(rows)} held-out rows do not fill {shares} devices: hold out more text")
    return batch


@functools.cache
def _measure(mesh):
    """On every process: averages are whole everywhere."""

    def measure(task, *arguments):
        return task.measure(*arguments)

    return jax.jit(measure, static_argnums=0, out_shardings=NamedSharding(mesh, PartitionSpec()))


def data_mesh() -> Mesh:
    """All devices along ``data``: each has all parameters and its share of the rows."""
    return make_mesh(data=jax.device_count(), model=1)


def frozen_shardings(task: Task, frozen: Any, mesh: Mesh) -> Any:
    """Where the parameters of a target lie that is only looked at: by the table of the layout."""
    target = getattr(task, "target", None)
    return Layout.tensor_parallel(mesh).shardings(target and target.param_axes(), frozen)
