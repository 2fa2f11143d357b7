"""Finds what can be wrong with a training before anything is written."""

import dataclasses
import os
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from ml_collections import ConfigDict
from rich.console import Console

from launch.lib import entry
from specsamp import storage
from specsamp.checkpoints.params import check_shapes
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.decoding.data_shards import DATA
from specsamp.mesh import distributed
from specsamp.models.heads import DRAFT_IDS
from specsamp.models.transformer import TransformerLM
from specsamp.training.data import Corpus
from specsamp.training.generated import mixed_sampling
from specsamp.training.source import Source
from specsamp.training.task import Task


def check_all_processes(folder: epath.Path, config: ConfigDict, corpus: Corpus, tokenizer: JsonTokenizer) -> None:
    """Checks that processes which train together see one folder, and read the same text in the same tokens.

    Raises:
      ValueError: on every process, with what differs.
    """
    if jax.process_count() == 1:
        return
    facts = {"configuration": config.to_json(), "corpus": corpus.describe()["sha256"], "tokenizer": tokenizer.to_json()}
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


def check_length(config: ConfigDict, model: TransformerLM, target: Source | None) -> None:
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
    chunk = config.test_time.chunk if "test_time" in config else None
    if chunk is not None and (chunk < 1 or config.data.length % chunk):
        raise ValueError(
            f"test_time.chunk {chunk} does not divide data.length {config.data.length}: choose one that does"
        )


def check_generated(config: ConfigDict, target: Source | None, mesh: Mesh) -> None:
    """Refuses numbers of generated text that make none: now, not after the hours in which the target writes.

    Raises:
      ValueError: with the number, and what it may be.
    """
    fields, length = config.get("generated"), config.data.length
    if target is None or not fields.rows or not fields.share:
        return
    ranges = {"rows": (1, np.inf), "batch": (1, np.inf), "share": (0, 1), "greedy_share": (0, 1)}
    for name, (least, most) in (ranges | {"prompt_length": (1, length)}).items():
        if not least <= fields[name] <= most:
            raise ValueError(f"generated.{name} must be in [{least}, {most}]; got {fields[name]}")
    mixed_sampling(fields.batch, fields.greedy_share, fields.temperature, fields.top_p)
    if target.mesh is not None and fields.batch % mesh.shape[DATA]:
        raise ValueError(
            f"generated.batch {fields.batch} does not divide over {mesh.shape[DATA]} devices of the mesh axis '{DATA}'"
        )
    if length + 1 > target.config.max_positions:
        raise ValueError(
            f"to write windows of data.length {length} + 1 tokens the target has too few positions, "
            f"{target.config.max_positions}: shorten them, or set generated.rows to 0"
        )


def check_first(config: ConfigDict, first: Source, corpus: Corpus, tokenizer: JsonTokenizer, task: Task) -> Any:
    """Returns the parameters of another run, after checking that training can begin with them.

    Raises:
      ValueError: it has read what this run is judged by, or is of another tokenizer or model.
    """
    check_split(config.data.held_out, corpus, first)
    if "head" in config:
        check_same_head(config, first, task)
    own = first.folder / "tokenizer.json"  # a head that was exported has none: its target's is checked
    if own.exists() and JsonTokenizer(own).to_json() != tokenizer.to_json():
        raise ValueError(f"the model in {config.init} was trained with another tokenizer than this run has")
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    params = {name: leaf for name, leaf in first.params.items() if name in shapes or name != DRAFT_IDS}
    check_shapes(f"the model in {config.init}", params, shapes)
    return params


def check_same_head(config: ConfigDict, first: Source, task: Task) -> None:
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


def say_what_it_was_trained_for(config: ConfigDict, first: Source, target: Source, console: Console) -> None:
    """Says where a head that training begins with was trained for another target, or nobody knows for which."""
    trained_for = first.provenance.get("target", {}).get("sha256")
    if trained_for != target.identity["sha256"]:
        known = "for another target" if trained_for else "for a target that its folder does not name"
        console.print(f"the head in {config.init} was trained {known}", style="yellow", markup=False, soft_wrap=True)
