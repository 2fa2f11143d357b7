"""Reads the fields of a training's configuration, and finds what can be wrong with it before anything is written."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from ml_collections import ConfigDict
from rich.console import Console

from launch.lib import entry
from launch.lib.fields import MeshFields, read
from specsamp import storage
from specsamp.checkpoints.params import check_shapes
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.decoding.data_shards import DATA
from specsamp.mesh import distributed
from specsamp.models.heads import DRAFT_IDS
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.warp import Warp
from specsamp.training.data import Corpus
from specsamp.training.generated import mixed_sampling
from specsamp.training.source import Source
from specsamp.training.task import Task
from specsamp.training.trainer import Intervals, TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFields:
    """The text that is trained on, see configs/python_pair.py."""

    folder: str
    pattern: str
    exclude: tuple[str, ...]
    held_out: float
    tokenizer: str
    eos: str
    length: int
    held_out_windows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedFields:
    """The windows that the target completes for its draft or head."""

    rows: int
    share: float
    prompt_length: int
    temperature: float
    top_p: float
    batch: int
    greedy_share: float

    @property
    def sampling(self) -> Warp:
        """Returns the distribution that the target writes a batch of rows with."""
        return mixed_sampling(self.batch, self.greedy_share, self.temperature, self.top_p)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingTestFields:
    """The steps of a head's training-time test."""

    test_steps: int
    decay: float
    chunk: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Holds the fields of a configuration such as configs/python_pair.py.

    Attributes:
      recorded: all of them as they were written, for the folder of the run.
      target: what a draft or a head learns from; None: a target is trained.
      head, layer_skip: the fields of that kind of training; None: it is another kind.
    """

    data: DataFields
    model: Mapping[str, Any]
    train: TrainConfig
    intervals: Intervals
    mesh: MeshFields
    compute_dtype: str
    recorded: Mapping[str, Any]
    target: str | None = None
    init: str = ""
    objective: str = ""
    text_share: float = 0.0
    generated: GeneratedFields | None = None
    test_time: TrainingTestFields | None = None
    head: Mapping[str, Any] | None = None
    layer_skip: Mapping[str, Any] | None = None

    @classmethod
    def from_config_dict(cls, config: ConfigDict) -> TrainingConfig:
        """Reads a configuration.

        Raises:
          ValueError: a field that is missing, that nothing reads, or whose value is wrong.
        """
        fields = config.to_dict()
        return read(cls, {**fields, "recorded": fields})

    def with_model(self, model: Mapping[str, Any]) -> TrainingConfig:
        """Returns the configuration of another model."""
        return dataclasses.replace(self, model=model, recorded={**self.recorded, "model": model})


def check_all_processes(folder: epath.Path, config: TrainingConfig, corpus: Corpus, tokenizer: JsonTokenizer) -> None:
    """Checks that processes which train together see one folder, and read the same text in the same tokens.

    Raises:
      ValueError: on every process, with what differs.
    """
    if jax.process_count() == 1:
        return
    facts = {
        "configuration": json.dumps(config.recorded),
        "corpus": corpus.describe()["sha256"],
        "tokenizer": tokenizer.to_json(),
    }
    theirs = distributed.gather_objects(facts)
    different = [name for name in facts if len({other[name] for other in theirs}) > 1]
    if different:
        raise ValueError(
            f"the processes differ in {', '.join(different)}: give all the same command, and hosts with another Python "
            "a --config.data.folder of their own copy of the text"
        )
    word = distributed.from_first(lambda: os.urandom(8).hex())
    if entry.is_first():
        storage.write(folder / "seen_by_all", word)
    multihost_utils.sync_global_devices("a word in the folder")
    seen = (folder / "seen_by_all").exists() and (folder / "seen_by_all").read_text() == word
    if not all(distributed.gather_objects(seen)):
        raise ValueError(f"{folder} is not the same folder for all processes: give a gs:// path, or a shared disk")


def check_split(held_out: float, corpus: Corpus, other: Source) -> None:
    """Checks that neither of two models which are made from each other has read what the other is judged by.

    Raises:
      ValueError: both were given the same files, with another share of them held out.
    """
    theirs = other.provenance.get("config", {}).get("data")  # none: a converted public checkpoint
    if theirs is None or theirs["held_out"] == held_out or other.made_from("corpus")["sha256"] != corpus.digest:
        return
    raise ValueError(
        f"data.held_out {held_out} is not the {theirs['held_out']} of {other.folder}, on the same files: one would be "
        f"judged by text that the other has read. Give --config.data.held_out={theirs['held_out']}"
    )


def check_length(config: TrainingConfig, model: TransformerLM, target: Source | None) -> None:
    """Refuses windows that a model has no positions for: learned ones would silently repeat their last.

    Raises:
      ValueError: with both numbers.
    """
    models = {"model": model.config} | ({} if target is None else {"target": target.config})
    for name, shape in models.items():
        if config.data.length > shape.max_positions:
            raise ValueError(
                f"data.length {config.data.length} is more than the {name}'s {shape.max_positions} positions"
            )
    chunk = config.test_time.chunk if config.test_time else None
    if chunk is not None and (chunk < 1 or config.data.length % chunk):
        raise ValueError(
            f"test_time.chunk {chunk} does not divide data.length {config.data.length}: choose one that does"
        )


def check_generated(config: TrainingConfig, target: Source | None, mesh: Mesh) -> None:
    """Refuses numbers of generated text that make none: now, not after the hours in which the target writes.

    Raises:
      ValueError: with the number, and what it may be.
    """
    fields, length = config.generated, config.data.length
    if target is None or not fields.rows or not fields.share:
        return
    ranges = {"rows": (1, np.inf), "batch": (1, np.inf), "share": (0, 1), "greedy_share": (0, 1)}
    for name, (least, most) in (ranges | {"prompt_length": (1, length)}).items():
        if not least <= getattr(fields, name) <= most:
            raise ValueError(f"generated.{name} must be in [{least}, {most}]; got {getattr(fields, name)}")
    fields.sampling  # refuses numbers out of range
    if target.mesh is not None and fields.batch % mesh.shape[DATA]:
        raise ValueError(
            f"generated.batch {fields.batch} does not divide over {mesh.shape[DATA]} devices of the mesh axis '{DATA}'"
        )
    if length + 1 > target.config.max_positions:
        raise ValueError(
            f"to write windows of data.length {length} + 1 tokens the target has too few positions, "
            f"{target.config.max_positions}: shorten them, or set generated.rows to 0"
        )


def check_first(config: TrainingConfig, first: Source, corpus: Corpus, tokenizer: JsonTokenizer, task: Task) -> Any:
    """Returns the parameters of another run, after checking that training can begin with them.

    Raises:
      ValueError: it has read what this run is judged by, or is of another tokenizer or model.
    """
    check_split(config.data.held_out, corpus, first)
    if config.head is not None:
        check_same_head(config, first, task)
    own = first.folder / "tokenizer.json"  # a head that was exported has none: its target's is checked
    if own.exists() and JsonTokenizer(own).to_json() != tokenizer.to_json():
        raise ValueError(f"the model in {config.init} was trained with another tokenizer than this run has")
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    params = {name: leaf for name, leaf in first.params.items() if name in shapes or name != DRAFT_IDS}
    check_shapes(f"the model in {config.init}", params, shapes)
    return params


def check_same_head(config: TrainingConfig, first: Source, task: Task) -> None:
    """Checks that a head is read as it was trained: shapes show neither its layers nor where its norms stand.

    Raises:
      ValueError: with the fields that differ.
    """
    here, there = task.head.config, first.config
    different = []
    if type(here) is not type(there):
        different = [f"its kind is {type(there).__name__}, here {type(here).__name__}"]
    for sides in () if different else ((there, here), (there.layer, here.layer)):
        values = {field.name: [getattr(side, field.name) for side in sides] for field in dataclasses.fields(sides[0])}
        different += [
            f"{name} is {old!r}, here {new!r}"
            for name, (old, new) in values.items()
            if old != new and name not in ("layer", "dtype")
        ]
    if different:
        raise ValueError(
            f"the head in {config.init} is another one: {'; '.join(different)}. Set these fields as it has them"
        )


def say_what_it_was_trained_for(config: TrainingConfig, first: Source, target: Source, console: Console) -> None:
    """Says where a head that training begins with was trained for another target, or nobody knows for which."""
    trained_for = first.provenance.get("target", {}).get("sha256")
    if trained_for != target.identity["sha256"]:
        known = "for another target" if trained_for else "for a target that its folder does not name"
        console.print(f"the head in {config.init} was trained {known}", style="yellow", markup=False, soft_wrap=True)
