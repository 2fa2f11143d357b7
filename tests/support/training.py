"""Shared by tests of launch/train.py: small configurations, and records of a run."""

import io
import json

from rich.console import Console

from configs import python_pair
from launch.lib.training import TrainingConfig

SMALL = {
    "data.pattern": "*.py",
    "data.held_out": 0.3,
    "data.held_out_windows": 8,
    "data.length": 16,
    "model.vocab_size": 300,
    "model.width": 16,
    "model.num_layers": 1,
    "train.warmup_steps": 2,
    "intervals.log": 1,
    "compute_dtype": "float32",
}
TARGET = {**SMALL, "train.steps": 24, "intervals.evaluate": 8, "intervals.checkpoint": 4}
DRAFT = {
    **SMALL,
    "train.steps": 4,
    "intervals.evaluate": 4,
    "intervals.checkpoint": 4,
    "generated.rows": 8,
    "generated.prompt_length": 4,
    "generated.batch": 8,
}


HEAD = DRAFT | {"model.width": 32}


def training_config(kind, texts, fields):
    config = python_pair.get_config(kind)
    config.update_from_flattened_dict({**fields, "data.folder": str(texts)})
    return TrainingConfig.from_config_dict(config)


def write_texts(folder):
    """Writes a corpus of a few files, and returns its folder."""
    for i in range(12):
        functions = (
            f"def function_{i}_{j}(x, y={j}):\n    return x + {i * j} * y\n" for j in range(12)
        )
        (folder / f"module_{i}.py").write_text("\n\n".join(functions))
    return folder


def quiet():
    return Console(file=io.StringIO())


def metrics(folder):
    """Returns all records except values that depend on the clock; an incomplete line is skipped."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [
        {k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in lines
    ]
