"""Measures a model on held-out text: its loss and, of a draft, how much its target would accept."""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specsamp.mesh.layout import DATA, Layout, make_mesh, put
from specsamp.sampling.warp import chain, temperature, top_p
from specsamp.training.training_task import Task

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
) -> dict[str, float]:
    """Averages `Task.measure` over held-out rows, under each of `COMPARED_DISTRIBUTIONS`.

    Args:
      rows: ``[rows, T + 1]`` int32 tokens; the last few that fill no batch are left out.
      batch: rows per call, see `evaluation_batch`.
      mesh: default: all devices along ``data``, each with all parameters and a shard of the rows.

    Returns:
      The averages by name; the name of the distribution follows in brackets, except after losses.

    Raises:
      ValueError: there are fewer rows than data shards.
    """
    mesh = mesh or make_mesh(data=jax.device_count(), model=1)
    batch = evaluation_batch(rows, batch, mesh)
    layout = Layout.tensor_parallel(mesh)
    params = layout.put(task.param_axes(), params)
    teacher_params = layout.put(task.teacher_axes(), teacher_params)
    sharding = NamedSharding(mesh, PartitionSpec(DATA))
    results: dict[str, list[float]] = {}
    for name, warp in COMPARED_DISTRIBUTIONS.items():
        for start in range(0, len(rows) - batch + 1, batch):
            tokens_BT = put(rows[start : start + batch], sharding)
            for key, value in _measure(mesh)(task, params, teacher_params, tokens_BT, warp).items():
                results.setdefault(key if key.startswith("loss") else f"{key} ({name})", []).append(
                    value
                )
        if all(key.startswith("loss") for key in results):  # nothing depends on the distribution
            break
    return {name: float(np.mean(jax.device_get(values))) for name, values in results.items()}


def evaluation_batch(rows: np.ndarray, batch: int, mesh: Mesh) -> int:
    """Returns about ``batch`` rows per call, rounded down to a multiple of the data shards.

    Raises:
      ValueError: there are fewer rows than data shards.
    """
    num_shards = mesh.shape[DATA]
    batch = max(min(batch, len(rows)) // num_shards, 1) * num_shards
    if batch > len(rows):
        raise ValueError(
            f"{len(rows)} held-out rows do not fill {num_shards} devices: hold out more text"
        )
    return batch


@functools.cache
def _measure(mesh):
    """Compiles `Task.measure` for a mesh, its results replicated so that every process can read
    them.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        lambda task, *arguments: task.measure(*arguments),
        static_argnums=0,
        out_shardings=replicated,
    )
