"""Measures a model on held-out text: its loss and, of a draft, how much its target would accept."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specsamp.mesh.layout import DATA, Layout, make_mesh, put
from specsamp.sampling.warp import Warp, chain, temperature, top_p
from specsamp.training.task import Task

# The distributions under which a draft is compared with its target on held-out text.
COMPARED_DISTRIBUTIONS = {
    "temperature 1": chain(),
    "temperature 0.8, top-p 0.95": chain(temperature(0.8), top_p(0.95)),
}


def evaluate(
    task: Task,
    params: Any,
    teacher_params: Any,
    rows: np.ndarray,
    batch: int,
    mesh: Mesh | None = None,
    warps: dict[str, Warp] | None = None,
) -> dict[str, float]:
    """Averages `Task.measure` over held-out rows.

    Args:
      rows: ``[rows, T + 1]`` int32 tokens; the last few that fill no batch are left out.
      batch: rows per call, see `evaluation_batch`.
      mesh: default: `data_mesh`.
      warps: distributions under which a draft is compared with its target, by name; default: the models' own.

    Returns:
      The averages by name; those that depend on a warp, all but losses, have its name behind them, in brackets.

    Raises:
      ValueError: there are fewer rows than data shards.
    """
    mesh = mesh or data_mesh()
    batch = evaluation_batch(rows, batch, mesh)
    layout = Layout.tensor_parallel(mesh)
    params = put(params, layout.shardings(task.param_axes(), params))
    teacher_params = put(teacher_params, layout.shardings(task.teacher_axes(), teacher_params))
    sharding = NamedSharding(mesh, PartitionSpec(DATA))
    results: dict[str, list[float]] = {}
    for name, warp in (warps or {"": chain()}).items():
        for start in range(0, len(rows) - batch + 1, batch):
            tokens_BT = rows[start : start + batch]
            on_mesh = jax.make_array_from_callback(tokens_BT.shape, sharding, tokens_BT.__getitem__)
            for key, value in _measure(mesh)(task, params, teacher_params, on_mesh, warp).items():
                label = key if not name or key.startswith("loss") else f"{key} ({name})"
                results.setdefault(label, []).append(value)
    return {name: float(np.mean(jax.device_get(values))) for name, values in results.items()}


def evaluation_batch(rows: np.ndarray, batch: int, mesh: Mesh) -> int:
    """Returns about ``batch`` rows per call, rounded down to a multiple of the data shards.

    Raises:
      ValueError: there are fewer rows than data shards.
    """
    num_shards = mesh.shape[DATA]
    batch = max(min(batch, len(rows)) // num_shards, 1) * num_shards
    if batch > len(rows):
        raise ValueError(f"{len(rows)} held-out rows do not fill {num_shards} devices: hold out more text")
    return batch


@functools.cache
def _measure(mesh):
    """Compiles `Task.measure` for a mesh, its results replicated so that every process can read them."""

    def measure(task, *arguments):
        return task.measure(*arguments)

    return jax.jit(measure, static_argnums=0, out_shardings=NamedSharding(mesh, PartitionSpec()))


def data_mesh() -> Mesh:
    """Puts all devices along ``data``: each holds all parameters and a shard of the rows."""
    return make_mesh(data=jax.device_count(), model=1)
