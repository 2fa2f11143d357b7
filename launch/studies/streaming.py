"""Measures host memory while a checkpoint is read onto a mesh, and converted: what stays, and the peak beside it.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python launch/studies/streaming.py --gigabytes=3 --model=8 \\
        --output=runs/streaming_3gb.json
    python launch/studies/streaming.py --gigabytes=3 --weight_dtype=int8 --output=runs/streaming_3gb_int8.json

Without --checkpoint a synthetic one of a Llama's shape is written first. On a CPU the devices' memory is the
host's: what the process must hold is its part of the parameters, and the figure is what comes on top.
"""

import json
import pathlib
import tempfile
import threading
import time

import jax
import numpy as np
from absl import flags
from flax.traverse_util import flatten_dict
from rich.console import Console
from safetensors.numpy import save

from launch.lib import entry
from specsamp.checkpoints.architectures import FAMILIES
from specsamp.checkpoints.export import describe
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params, write_converted
from specsamp.checkpoints.safetensors_io import INDEX
from specsamp.checkpoints.tensor_names import find_source, sizes
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard_model
from specsamp.models.config import TransformerConfig
from specsamp.models.transformer import TransformerLM

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Read this checkpoint; by default one is made.")
_GIGABYTES = flags.DEFINE_float(
    "gigabytes", 3.0, "How many gigabytes the checkpoint has that is made, in bfloat16.", lower_bound=0.01
)
_MODEL = flags.DEFINE_integer("model", 1, "How many devices hold the parameters together.", lower_bound=1)
_WEIGHT_DTYPE = flags.DEFINE_enum("weight_dtype", None, ("int8",), "Quantises matrices while they are read.")
_CONVERT = flags.DEFINE_bool("convert", False, "Also write the parameters as an Orbax folder and read that.")
_OUTPUT = entry.define_output()

VOCABULARY, WIDTH = 32_000, 2048
EVERY_SECONDS = 0.01


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    with tempfile.TemporaryDirectory() as folder:
        place = _CHECKPOINT.value or make_checkpoint(pathlib.Path(folder) / "synthetic", console)
        measured = measure(place, pathlib.Path(folder) / "converted")
    for name, value in measured.items():
        console.print(f"{name:52} {value:8.1f} MB" if name.endswith("MB") else f"{name:52} {value}")
    entry.write_result(_OUTPUT.value, {"measured": measured}, console)


def measure(checkpoint_folder: str, converted_folder: pathlib.Path) -> dict:
    checkpoint = open_checkpoint(checkpoint_folder, weight_dtype=_WEIGHT_DTYPE.value)
    largest = max(np.prod(tensor.shape) * tensor.dtype.itemsize for tensor in checkpoint.tensors.values())
    model = TransformerLM(checkpoint.config)
    if jax.device_count() % _MODEL.value:
        raise ValueError(f"--model={_MODEL.value} does not divide the {jax.device_count()} devices")
    if jax.device_count() > 1:
        model = shard_model(model, Layout.tensor_parallel(make_mesh(jax.device_count() // _MODEL.value, _MODEL.value)))
    jax.block_until_ready(jax.numpy.zeros(8) + 1)  # the runtime's own memory is there before it counts
    begin = resident()
    with Peak() as reading:
        params = read_params(checkpoint, model)
    local = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
    result = {
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "model": _MODEL.value,
        "parameters, MB": sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e6,
        "held by this process, MB": local / 1e6,
        "largest tensor, MB": largest / 1e6,
        "reading: peak beside what is held, MB": reading.beside(begin + local),
        "reading: seconds": round(reading.seconds, 1),
    }
    if _CONVERT.value:
        with Peak() as writing:
            write_converted(checkpoint, params, converted_folder)
        del params
        again = open_checkpoint(converted_folder)
        with Peak() as restoring:
            restored = read_params(again, model)
        result |= {
            "writing Orbax: peak beside what is held, MB": writing.beside(begin + local),
            "reading Orbax: peak beside what is held, MB": restoring.beside(begin + local),
            "Orbax: seconds": round(writing.seconds + restoring.seconds, 1),
        }
        del restored
    return result


class Peak:
    """The most memory of this process, of any kind."""

    def __enter__(self):
        self._most, self._stop = resident(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._start = time.perf_counter()
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(EVERY_SECONDS):
            self._most = max(self._most, resident())

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self.seconds = time.perf_counter() - self._start

    def beside(self, held: float) -> float:
        """Returns the highest memory in MB, over ``held`` bytes."""
        return (self._most - held) / 1e6


def resident() -> float:
    """Returns the bytes of memory of this process: its own, and of files that it has mapped."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * float(line.split()[1])
    raise ValueError("this machine does not tell a process how much memory it takes (/proc/self/status)")


def make_checkpoint(folder: pathlib.Path, console: Console) -> str:
    """Writes a checkpoint of --gigabytes, layer by layer, and returns its folder."""
    shape = dict(vocab_size=VOCABULARY, width=WIDTH, num_heads=16, num_kv_heads=8, feedforward_width=4 * WIDTH)
    shape |= dict(positions="rotary", gated=True, activation="silu", tied=False, dtype="bfloat16")
    one, two = (TransformerConfig(num_layers=n, **shape).num_parameters for n in (1, 2))
    layers = max(round((_GIGABYTES.value * 1e9 / 2 - one) / (two - one)) + 1, 1)
    config = TransformerConfig(num_layers=layers, **shape)
    content = describe(config, None)
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
    console.print(f"made a checkpoint of {2 * config.num_parameters / 1e9:.2f} GB, {layers} layers")
    return str(folder)


if __name__ == "__main__":
    entry.run(main)
