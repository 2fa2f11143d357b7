"""Measures host memory while a checkpoint is read onto a mesh, and converted: what stays, and the peak beside it.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python launch/study.py streaming --gigabytes=3 --model=8 \\
        --output=runs/streaming_3gb.json
    python launch/study.py streaming --gigabytes=3 --weight_dtype=int8 --output=runs/streaming_3gb_int8.json

Without --checkpoint a synthetic one of a Llama's shape is written first. On a CPU the devices' memory is the
host's: what the process must hold is its part of the parameters, and the figure is what comes on top.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from safetensors.numpy import save

from launch.lib.study import Document, Option, Published, Study
from specsamp.analysis.report import Table
from specsamp.checkpoints.architectures import FAMILIES
from specsamp.checkpoints.export import describe_model
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params, write_converted
from specsamp.checkpoints.safetensors_io import INDEX
from specsamp.checkpoints.tensor_names import find_source, sizes
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard_model
from specsamp.models.config import TransformerConfig
from specsamp.models.transformer import TransformerLM

VOCABULARY, WIDTH = 32_000, 2048


def measure(options, key, say) -> dict[str, Any]:
    """Reads a checkpoint; with --convert it is also written as an Orbax folder, and that is read."""
    if jax.device_count() % options.model:
        raise ValueError(f"--model={options.model} does not divide the {jax.device_count()} devices")
    with tempfile.TemporaryDirectory() as folder:
        say("making a checkpoint")
        made = pathlib.Path(folder) / "synthetic"
        place = options.checkpoint or make_checkpoint(made, options.gigabytes)
        say("reading the checkpoint")
        return {"measured": read(options, place, pathlib.Path(folder) / "converted")}


def read(options, checkpoint_folder: str, converted_folder: pathlib.Path) -> dict[str, Any]:
    """Returns what reading takes, and what converting takes if that is asked for."""
    checkpoint = open_checkpoint(checkpoint_folder, weight_dtype=options.weight_dtype)
    largest = max(np.prod(tensor.shape) * tensor.dtype.itemsize for tensor in checkpoint.tensors.values())
    model = TransformerLM(checkpoint.config)
    if jax.device_count() > 1:
        mesh = make_mesh(model=options.model)
        model = shard_model(model, Layout.tensor_parallel(mesh))
    jax.block_until_ready(jax.numpy.zeros(8) + 1)  # the runtime's own memory is there before it counts
    begin = held("VmRSS")
    params, most, seconds = peak(lambda: read_params(checkpoint, model))
    local = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
    result = {
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "model": options.model,
        "parameters, MB": sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e6,
        "held by this process, MB": local / 1e6,
        "largest tensor, MB": largest / 1e6,
        "reading: peak beside what is held, MB": (most - begin - local) / 1e6,
        "reading: seconds": round(seconds, 1),
    }
    if options.convert:
        _, of_writing, writing = peak(lambda: write_converted(checkpoint, params, converted_folder))
        del params
        again = open_checkpoint(converted_folder)
        _, of_restoring, restoring = peak(lambda: read_params(again, model))
        result |= {
            "writing Orbax: peak beside what is held, MB": (of_writing - begin - local) / 1e6,
            "reading Orbax: peak beside what is held, MB": (of_restoring - begin - local) / 1e6,
            "Orbax: seconds": round(writing + restoring, 1),
        }
    return result


def peak(run: Callable[[], Any]) -> tuple[Any, float, float]:
    """Returns what a function returns, the most bytes that this process held meanwhile, and the seconds it took."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except OSError as error:
        raise ValueError(f"this machine does not tell a process how much memory it takes ({error})") from error
    start = time.perf_counter()
    answer = run()
    return answer, held("VmHWM"), time.perf_counter() - start


def held(name: str) -> float:
    """Returns bytes of memory of this process, its own and of files that it has mapped: VmRSS now, VmHWM at the peak."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * float(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def make_checkpoint(folder: pathlib.Path, gigabytes: float) -> str:
    """Writes a checkpoint of so many gigabytes in bfloat16, tensor by tensor, and returns its folder."""
    shape = dict(vocab_size=VOCABULARY, width=WIDTH, num_heads=16, num_kv_heads=8, feedforward_width=4 * WIDTH)
    shape |= dict(positions="rotary", gated=True, activation="silu", tied=False, dtype="bfloat16")
    one, two = (TransformerConfig(num_layers=n, **shape).num_parameters for n in (1, 2))
    layers = max(round((gigabytes * 1e9 / 2 - one) / (two - one)) + 1, 1)
    config = TransformerConfig(num_layers=layers, **shape)
    content = describe_model(config, None)
    names = FAMILIES[content["architectures"][0]].names
    folder.mkdir(parents=True)
    rng, weight_map = np.random.default_rng(0), {}
    shapes = flatten_dict(jax.eval_shape(TransformerLM(config).init, jax.random.key(0)), sep="/")
    for number, (name, leaf) in enumerate(shapes.items()):
        source = find_source(name, names)
        values = rng.normal(size=source.shape(sizes(config))[-1:]).astype(np.float32)
        values = np.broadcast_to(values.astype(jax.numpy.bfloat16), source.shape(sizes(config)))
        file = f"model-{number:05}.safetensors"
        (folder / file).write_bytes(save({source.tensor: np.ascontiguousarray(values)}))
        weight_map[source.tensor] = file
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return str(folder)


def table(*documents: Document) -> Table:
    """Returns a column for each document."""
    names = ["quantised to int8" if "weight_dtype=int8" in one["command"] else "in bfloat16" for one in documents]
    rows = [(name, *(f"{one['measured'][name]:g}" for one in documents)) for name in documents[0]["measured"]]
    return Table(title="Host memory of reading a checkpoint", header=("", *names), rows=rows)


OPTIONS = {
    "checkpoint": Option(None, "Read this checkpoint; by default one is made."),
    "gigabytes": Option(3.0, "Make a checkpoint of so many gigabytes in bfloat16.", least=0.01),
    "model": Option(1, "Let so many devices hold the parameters together.", least=1),
    "weight_dtype": Option(None, "Quantise matrices while they are read.", choices=("int8",)),
    "convert": Option(False, "Also write the parameters as an Orbax folder and read that."),
}
STUDY = Study(
    question="How much host memory does reading a checkpoint take?",
    options=OPTIONS,
    measure=measure,
    tables={"streaming": Published(["streaming_3gb", "streaming_3gb_int8"], table)},
    shown=lambda options: ["streaming"],
)
