"""The folder of a training run: its configuration, tokenizer, corpus, metrics and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from specsamp import storage
from specsamp.checkpoints.heads import open_head, read_head
from specsamp.checkpoints.pair import load_pair, pair_folder
from specsamp.decoding.pair import Pair
from specsamp.mesh.layout import make_mesh
from specsamp.models.config import TransformerConfig
from specsamp.models.eagle import Eagle3Config
from specsamp.models.heads import DRAFT_IDS, FeatureHead, HeadConfig
from specsamp.models.medusa import MedusaConfig
from specsamp.models.mtp import MTPConfig
from specsamp.models.transformer import TransformerLM
from specsamp.training.checkpoint import Checkpoints
from specsamp.training.log import read_metrics

RENAMED = {"recipe": "train", "rhythm": "intervals"}  # fields of run.json in older runs
FIX = "restore the file, or begin anew in another --workdir"
HEADS = {"eagle3": Eagle3Config, "medusa": MedusaConfig, "mtp": MTPConfig}  # kinds of heads that are trained
IDS = f"{DRAFT_IDS}.npy"  # of a head with a reduced vocabulary
BEFORE = "before.json"  # what a head had seen when its run began with it


def check_run(folder: str | os.PathLike, config: dict, changeable: Sequence[str] = ()) -> None:
    """Checks that a folder, if it holds a run, holds one of this configuration.

    Args:
      changeable: top-level fields that may differ between a run and its resumption.

    Raises:
      ValueError: another configuration began this run (the message lists what differs), or its file is damaged.
    """
    if (storage.place(folder) / "run.json").exists():
        before, now = _flat(read_config(folder)), _flat(json.loads(json.dumps(config)))
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


def check_same(folder: str | os.PathLike, name: str, description: dict) -> None:
    """Checks that what a run is made from (``name``: "corpus", "target") is what it was when the run began.

    Raises:
      ValueError: its ``sha256`` differs (the message shows both descriptions), or its file is damaged.
    """
    path = storage.place(folder) / f"{name}.json"
    if path.exists():
        before = _read_description(path)
        if before["sha256"] != description["sha256"]:
            raise ValueError(
                f"{folder} was begun with another {name}: {before}, now {description}. (Another Python has another "
                "standard library.) Resume with the same, or begin anew in another --workdir"
            )


def open_run(folder: str | os.PathLike, config: dict, tokenizer_json: str, **made_from: dict) -> None:
    """Creates the folder of a run and writes its configuration, tokenizer and descriptions, all checked before."""
    folder = storage.place(folder)
    storage.write_json(folder / "run.json", config)
    storage.write(folder / "tokenizer.json", tokenizer_json)
    for name, description in made_from.items():
        storage.write_json(folder / f"{name}.json", description)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedModel:
    """The parameters of the last checkpoint of a run, and where they come from."""

    folder: epath.Path
    config: TransformerConfig | HeadConfig
    params: Any
    step: int
    is_spread: ClassVar[bool] = False  # each process has all parameters

    def model_in(self, dtype: str) -> TransformerLM:
        """Builds the model with another compute dtype."""
        return TransformerLM(dataclasses.replace(self.config, dtype=dtype))

    def writer(self, dtype: str) -> Pair:
        """Returns the model as it writes text."""
        return Pair(target=self.model_in(dtype), target_params=self.params)

    def run_config(self) -> dict:
        """Reads the configuration of the run, see `read_config`."""
        return read_config(self.folder)

    def made_from(self, name: str) -> dict:
        """Reads the description of the run's "corpus", or of a draft's "target".

        Raises:
          FileNotFoundError, ValueError: there is none, or its file is damaged.
        """
        return _read_description(self.folder / f"{name}.json")

    def describe(self) -> dict:
        """Returns the step of the checkpoint and the SHA-256 of all parameters."""
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(self.params):
            digest.update(np.asarray(leaf).tobytes())
        return {"step": self.step, "sha256": digest.hexdigest()}

    def last_metrics(self) -> dict:
        """Returns the last value of every number logged up to the checkpoint, and the seconds its steps took."""
        last: dict = {}
        seconds, before = 0.0, 0
        config = self.run_config()
        tokens_per_step = config["train"]["batch"] * config["data"]["length"]
        for record in read_metrics(self.folder / "metrics.jsonl"):
            if record["step"] > self.step:  # a run that was killed, or is still under way
                break
            if "tokens_per_second" in record:
                seconds += (record["step"] - before) * tokens_per_step / record["tokens_per_second"]
                before = record["step"]
            last |= record
        return last | {"training_seconds": seconds}


@dataclasses.dataclass(frozen=True, eq=False)
class PairTarget(TrainedModel):
    """The target of a pair, with what the pair remembers of its run."""

    def run_config(self) -> dict:
        return self._provenance().get("config", {})

    def made_from(self, name: str) -> dict:
        return self._provenance()[name]

    def _provenance(self) -> dict:
        return storage.read_json(self.folder / "pair.json").get("provenance", {}).get("target", {})


@dataclasses.dataclass(frozen=True, eq=False)
class ExportedHead(TrainedModel):
    """A head of a folder that other programs read too, with what training.json remembers of its run."""

    def run_config(self) -> dict:
        return _exported(self.folder).get("config", {})

    def made_from(self, name: str) -> dict:
        return _exported(self.folder)[name]


def open_first_head(folder: str | os.PathLike, target: TransformerConfig) -> TrainedModel:
    """Reads the head that a training begins with: of a run, or one that was exported or published.

    Raises:
      FileNotFoundError, ValueError: as `open_trained_head`; or as `open_head`.
    """
    if (storage.place(folder) / "run.json").exists():
        return open_trained_head(folder)
    checkpoint = open_head(folder, target, dtype="float32")
    params = read_head(checkpoint, FeatureHead(checkpoint.config))
    place = storage.place(folder)
    step = _exported(place).get("step", 0)
    return ExportedHead(folder=place, config=checkpoint.config, params=params, step=step)


def history(folder: str | os.PathLike, last_step: int | None = None) -> dict[str, Any]:
    """Returns what a head has seen, in a run and before it: "tokens", and "curve", held-out measurements by tokens seen.

    Args:
      last_step: of the run; default all that it logged.
    """
    folder = storage.place(folder)
    if not (folder / "run.json").exists():
        return {name: _exported(folder).get(name, empty) for name, empty in (("tokens", 0), ("curve", []))}
    before = storage.read_json(folder / BEFORE) if (folder / BEFORE).exists() else {"tokens": 0, "curve": []}
    config, curve, last = read_config(folder), list(before["curve"]), 0
    number = curve[-1]["run"] + 1 if curve else 0
    tokens = config["train"]["batch"] * config["data"]["length"]
    for record in read_metrics(folder / "metrics.jsonl"):
        if last_step is not None and record["step"] > last_step:
            break
        last = record["step"]
        if "held_out/loss" in record:
            measured = {key.removeprefix("held_out/"): x for key, x in record.items() if key.startswith("held_out/")}
            curve.append({"run": number, "step": last, "tokens": before["tokens"] + last * tokens} | measured)
    return {"tokens": before["tokens"] + last * tokens, "curve": curve}


def _exported(folder: epath.Path) -> dict:
    """Reads what an exported head remembers of its training; nothing, where another program wrote it."""
    return storage.read_json(folder / "training.json") if (folder / "training.json").exists() else {}


def is_trained_here(name: str | os.PathLike) -> bool:
    """Returns whether this names a pair, or the folder of a run; what else there is are public checkpoints."""
    folder = storage.place(name)
    try:
        return bool(pair_folder(str(name)))
    except FileNotFoundError:
        return (folder / "run.json").exists() and not (folder / "config.json").exists()  # nor what was converted


def open_target(name: str | os.PathLike) -> TrainedModel:
    """Reads what a draft learns from: the target of a pair, by name or folder, or of a run.

    Raises:
      FileNotFoundError, ValueError: see `load_pair` and `open_trained`.
    """
    try:
        folder = pair_folder(str(name))
    except FileNotFoundError:
        return open_trained(name)
    pair = load_pair(folder)
    step = storage.read_json(folder / "pair.json").get("provenance", {}).get("target", {}).get("step", 0)
    return PairTarget(folder=storage.place(folder), config=pair.target.config, params=pair.target_params, step=step)


def make_head(
    layer: TransformerConfig, fields: Mapping[str, Any], *, target_layers: int, target_width: int
) -> FeatureHead:
    """Returns the head that ``head`` of a configuration describes.

    Args:
      layer: of its decoder layer.
      fields: ``kind``, one of `HEADS`; and fields of its class. Left out or empty, ``hidden_layers`` are the usual ones
        of the kind, and ``draft_vocab_size`` is 0, the whole vocabulary.

    Raises:
      ValueError: an unknown kind, or what no head can be.
    """
    fields = dict(fields)
    kind = fields.pop("kind")
    if kind not in HEADS:
        raise ValueError(f"no head {kind!r}: choose one of {', '.join(HEADS)}")
    size = fields.pop("draft_vocab_size", 0) or None
    if not fields.get("hidden_layers"):
        fields["hidden_layers"] = HEADS[kind].usual_layers(target_layers)
    layer = dataclasses.replace(layer, tied=False)  # its ends are the head's own matter
    shape = dict(layer=layer, target_layers=target_layers, target_width=target_width, draft_vocab_size=size)
    return FeatureHead(HEADS[kind](**shape, **fields))


def open_trained_head(folder: str | os.PathLike) -> TrainedModel:
    """Reads the parameters of the run of a head; ids of a reduced vocabulary are among them.

    Raises:
      FileNotFoundError, ValueError: as `open_trained`; or it is no run of a head.
    """
    folder = storage.place(folder)
    fields = read_config(folder)
    if "head" not in fields:
        raise ValueError(f"{folder} is no run of a head")
    sizes = _read_description(folder / "target.json")
    try:
        layer = TransformerConfig.from_json(fields["model"], dtype=fields["compute_dtype"])
        sizes = {name: sizes[name] for name in ("target_layers", "target_width")}
        head = make_head(layer, fields["head"], **sizes)
    except (KeyError, TypeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder / 'run.json'} describes no head ({told}): {FIX}") from error
    shapes = dict(jax.eval_shape(head.init, jax.random.key(0)))
    ids = shapes.pop(DRAFT_IDS, None)
    params, step = _restore(folder, shapes)
    if ids is not None:
        params = params | {DRAFT_IDS: jax.numpy.asarray(read_array(folder / IDS))}
    return TrainedModel(folder=folder, config=head.config, params=params, step=step)


def open_trained(folder: str | os.PathLike) -> TrainedModel:
    """Reads the parameters of a run, without its optimizer.

    Raises:
      FileNotFoundError: no run, or no checkpoint.
      ValueError: the configuration is damaged, or the checkpoint is, or does not fit it; or it is the run of a head.
    """
    folder = storage.place(folder)
    config = _model_config(folder)
    params, step = _restore(folder, jax.eval_shape(TransformerLM(config).init, jax.random.key(0)))
    return TrainedModel(folder=folder, config=config, params=params, step=step)


def _restore(folder: epath.Path, shapes: Any) -> tuple[Any, int]:
    """Reads parameters of these shapes from the last checkpoint of a run; returns them and the step."""
    # On one device, however many there were where it was saved. (Of many processes, each gets a whole copy.)
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if jax.process_count() > 1:
        sharding = NamedSharding(make_mesh(jax.device_count(), 1), PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    if not (folder / "checkpoints").exists():  # opening it would make it
        raise FileNotFoundError(f"no checkpoint in {folder}: its training has not saved one yet")
    with contextlib.closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        params, step = checkpoints.restore(params=shapes)["params"], checkpoints.latest
    if jax.process_count() > 1:
        params = jax.tree.map(lambda x: jax.numpy.asarray(np.asarray(x)), params)
    return params, step


def read_config(folder: str | os.PathLike) -> dict:
    """Reads the configuration of a run; fields that were renamed since it began have their new names.

    Raises:
      FileNotFoundError: there is no run.
      ValueError: its run.json is damaged.
    """
    path = storage.place(folder) / "run.json"
    if not path.exists():
        raise FileNotFoundError(f"no training run at {str(folder)!r}: it has no run.json")
    return {RENAMED.get(name, name): value for name, value in _read_json(path).items()}


def without_paths(config: dict) -> dict:
    """Returns a run's configuration with the last part of each path only: where files lay here concerns nobody."""

    def shorten(fields, *names):
        return fields | {n: pathlib.Path(fields[n]).name for n in names if fields.get(n)}

    return shorten(config, "target", "init") | {"data": shorten(config["data"], "folder", "tokenizer")}


def _model_config(folder: epath.Path) -> TransformerConfig:
    """Reads the shape of a run's model.

    Raises:
      FileNotFoundError, ValueError: see `read_config`; or it describes no model.
    """
    config = read_config(folder)
    if "head" in config:
        raise ValueError(f"{folder} is the run of a head, which is no model: launch/export_head.py reads it")
    try:
        return TransformerConfig.from_json(config["model"])
    except (KeyError, TypeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder / 'run.json'} describes no model ({told}): {FIX}") from error


def _read_json(path: epath.Path) -> dict:
    """Reads an object of a run's folder.

    Raises:
      FileNotFoundError, ValueError: as `storage.read_json`, with what can be done.
    """
    try:
        return storage.read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}: {FIX}") from error


def _read_description(path: epath.Path) -> dict:
    """Reads what a run was made from: an object with a digest.

    Raises:
      FileNotFoundError, ValueError: as `storage.read_json`; or it has no digest.
    """
    description = _read_json(path)
    if "sha256" not in description:
        raise ValueError(f"{path} has no sha256: {FIX}")
    return description


def write_array(path: str | os.PathLike, array: np.ndarray) -> None:
    """Writes an array as ``.npy``, all of it or nothing."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    storage.write(path, buffer.getvalue())


def read_array(path: str | os.PathLike) -> np.ndarray:
    """Reads what `write_array` wrote."""
    return np.load(io.BytesIO(storage.place(path).read_bytes()))


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts, names joined by dots."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for name, sub in tree.items() for k, v in _flat(sub, f"{prefix}.{name}" if prefix else name).items()}
