"""The folder of a training run: its configuration, tokenizer, corpus, metrics and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specsamp.models.config import TransformerConfig
from specsamp.models.transformer import TransformerLM
from specsamp.training.checkpoint import Checkpoints
from specsamp.training.log import read_metrics, write_atomically


def open_run(folder: str | pathlib.Path, config: dict, changeable: Sequence[str] = ()) -> None:
    """Makes the folder, or checks that it belongs to this configuration.

    Args:
      changeable: top-level fields that may differ between a run and its resumption.

    Raises:
      ValueError: another configuration began this run; the message lists what differs.
    """
    path = pathlib.Path(folder) / "run.json"
    if path.exists():
        before, now = _flat(json.loads(path.read_text(encoding="utf-8"))), _flat(json.loads(json.dumps(config)))
        different = [
            f"{name} was {before.get(name, 'absent')!r}, is {now.get(name, 'absent')!r}"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name) and name.split(".")[0] not in changeable
        ]
        if different:
            raise ValueError(
                f"{folder} holds a run with another configuration: {'; '.join(different)}. "
                "Give the old values to resume it, or another --workdir"
            )
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    write_json(path, config)


def keep_corpus(folder: str | pathlib.Path, description: dict) -> None:
    """Writes down what the run is trained on, or checks that it still is.

    Raises:
      ValueError: the files have changed since the run began.
    """
    path = pathlib.Path(folder) / "corpus.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if before["sha256"] != description["sha256"]:
            raise ValueError(
                f"{folder} was begun on another corpus: {before}, now {description}. Another Python has another "
                "standard library: resume with the same one, or set --config.data.folder"
            )
    write_json(path, description)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedModel:
    """The last checkpoint of a run."""

    folder: pathlib.Path
    config: TransformerConfig
    params: Any
    step: int

    def model_in(self, dtype: str) -> TransformerLM:
        return TransformerLM(dataclasses.replace(self.config, dtype=dtype))

    def run_config(self) -> dict:
        return json.loads((self.folder / "run.json").read_text(encoding="utf-8"))

    def corpus(self) -> dict:
        return json.loads((self.folder / "corpus.json").read_text(encoding="utf-8"))

    def last_metrics(self) -> dict:
        """The last value of every number in the log, and the seconds that the steps took."""
        last: dict = {}
        seconds, before = 0.0, 0
        config = self.run_config()
        tokens_per_step = config["recipe"]["batch"] * config["data"]["length"]
        for record in read_metrics(self.folder / "metrics.jsonl"):
            if "tokens_per_second" in record:
                seconds += (record["step"] - before) * tokens_per_step / record["tokens_per_second"]
                before = record["step"]
            last |= record
        return last | {"training_seconds": seconds}


def open_trained(folder: str | pathlib.Path) -> TrainedModel:
    """Reads the parameters of a run, without its optimizer.

    Raises:
      FileNotFoundError: no run, or no checkpoint. ValueError: the checkpoint does not fit its configuration.
    """
    folder = pathlib.Path(folder).expanduser()
    path = folder / "run.json"
    if not path.exists():
        raise FileNotFoundError(f"no training run at {str(folder)!r}: it has no run.json")
    config = TransformerConfig(**json.loads(path.read_text(encoding="utf-8"))["model"])
    # On one device, however many there were where it was saved.
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(TransformerLM(config).init, jax.random.key(0)),
    )
    with contextlib.closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        params, step = checkpoints.restore(params=shapes)["params"], checkpoints.latest
    return TrainedModel(folder=folder, config=config, params=params, step=step)


def write_json(path: str | pathlib.Path, content: Any) -> None:
    write_atomically(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_array(path: str | pathlib.Path, array: np.ndarray) -> None:
    path = pathlib.Path(path)
    buffer = io.BytesIO()
    np.save(buffer, array)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(buffer.getvalue())
    os.replace(partial, path)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for name, sub in tree.items() for k, v in _flat(sub, f"{prefix}.{name}" if prefix else name).items()}
