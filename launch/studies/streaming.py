"""Reads a random checkpoint of a public model's shape, and measures the memory that it takes.

    python launch/study.py streaming --model=google/gemma-3-4b-it --int8=yes \\
        --output=runs/streaming_gemma_3_4b_int8.json

The files have the tensors of the model: names, shapes, dtypes and MXFP4 blocks. Their values repeat
a few million random numbers. They are written into a temporary folder, read by a process of their
own, and removed.
"""

import concurrent.futures
import json
import multiprocessing
import pathlib
import re
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from launch.lib.study import Document, Say, Study
from specsamp import TransformerLM, validate
from specsamp.checkpoints.hugging_face import Checkpoint, open_checkpoint, read_params
from specsamp.checkpoints.mxfp4 import BLOCKS, GROUP, SCALES
from specsamp.checkpoints.published import CONFIGS
from specsamp.checkpoints.safetensors_io import SINGLE

RANDOM = 2**22  # numbers of each dtype
MOST_LAYERS = 1000  # where a configuration has its family's default
STATUS = pathlib.Path("/proc/self/status")


def prepare(options: Any) -> None:
    """Checks the model and its layers."""
    if options.model not in CONFIGS:
        raise ValueError(f"--model={options.model!r}: choose one of {', '.join(CONFIGS)}")
    place = CONFIGS[options.model]
    most = place.get("text_config", place).get("num_hidden_layers", MOST_LAYERS)
    validate.integer("--layers", options.layers, 0, most + 1)
    if options.folder and not pathlib.Path(options.folder).is_dir():
        raise ValueError(f"--folder={options.folder} is no folder: make it first")
    if not STATUS.exists():
        raise ValueError(f"{STATUS} states the memory of a process: use Linux")


def measure(options: Any, say: Say) -> dict[str, Any]:
    """Writes the files, and reads them in a new process."""
    with tempfile.TemporaryDirectory(dir=options.folder or None) as name:
        folder = pathlib.Path(name)
        say("writing random tensors")
        write_checkpoint(folder, shortened(CONFIGS[options.model], options.layers))
        say("reading")
        spawn = multiprocessing.get_context("spawn")
        weight_dtype = "int8" if options.int8 else None
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
            found = pool.submit(read, folder, weight_dtype).result()
        size = (folder / SINGLE).stat().st_size
    return {"kind": "streaming", "file_gb": size / 1e9, "weight_dtype": weight_dtype} | found


def write_checkpoint(folder: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Writes a ``config.json``, and random tensors of its model."""
    (folder / "config.json").write_text(json.dumps(content))
    checkpoint = open_checkpoint(folder)
    first = {}  # the names of packed experts follow from those that are there
    if "quantization_config" in content:
        first = {checkpoint.family.other_experts[0]: ("BF16", (0,))}
    write_tensors(folder, first)
    write_tensors(folder, tensors_of(checkpoint))


def shortened(content: Mapping[str, Any], layers: int) -> Mapping[str, Any]:
    """Returns a ``config.json`` with fewer layers; 0: all."""
    if not layers:
        return content
    if "text_config" in content:
        return content | {"text_config": shortened(content["text_config"], layers)}
    fewer = {"num_hidden_layers": layers}
    if "layer_types" in content:
        fewer["layer_types"] = content["layer_types"][:layers]
    return content | fewer


def tensors_of(checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the dtype and shape of each tensor of the model, by name."""
    tensors = {}
    for source in checkpoint.sources().values():
        for member in source.members():
            if not member.tensor.endswith(BLOCKS):
                tensors[member.tensor] = "BF16", member.shape
                continue
            *outer, last = member.shape
            groups = (*outer, last // GROUP)
            tensors[member.tensor] = "U8", (*groups, GROUP // 2)
            tensors[member.tensor.removesuffix(BLOCKS) + SCALES] = "U8", groups
    return tensors


def write_tensors(folder: pathlib.Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Writes random tensors in the format of safetensors."""
    rng = np.random.default_rng(0)
    numbers = (0.02 * rng.standard_normal(RANDOM, np.float32)).astype(ml_dtypes.bfloat16)
    # Scales of MXFP4 up to 127 are powers of two up to one.
    random = {"BF16": numbers, "U8": rng.integers(0, 128, RANDOM, np.uint8)}
    header, end = {}, 0
    for name, (kind, shape) in tensors.items():
        start, end = end, end + int(np.prod(shape)) * random[kind].itemsize
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": (start, end)}
    described = json.dumps(header).encode()
    with open(folder / SINGLE, "wb") as file:
        file.write(len(described).to_bytes(8, "little") + described)
        for kind, shape in tensors.values():
            np.resize(random[kind], shape).tofile(file)


def read(folder: pathlib.Path, weight_dtype: str | None) -> dict[str, float]:
    """Returns the seconds, and in GB the parameters and the most memory of this process."""
    checkpoint = open_checkpoint(folder, weight_dtype=weight_dtype)
    start = time.perf_counter()
    params = jax.block_until_ready(read_params(checkpoint, TransformerLM(checkpoint.config)))
    seconds = time.perf_counter() - start
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    # Not of getrusage, which begins with the peak of the parent.
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())[1]) * 1024
    return {"seconds": seconds, "parameters_gb": held / 1e9, "peak_gb": peak / 1e9}


def identity(options: Any) -> Document:
    """Returns the options that the result depends on."""
    return {"model": options.model, "layers": options.layers, "int8": options.int8}


STUDY = Study(
    question="How much memory does it take to read a checkpoint of a public model's size?",
    measure=measure,
    prepare=prepare,
    identity=identity,
    options={
        "model": ("", "The name of the model in specsamp/checkpoints/published.json."),
        "layers": (0, "Number of its layers; 0: all."),
        "int8": ("", "Any word: read matrices in int8."),
        "folder": ("", "Where the files are written; default: the system's temporary folder."),
    },
)
