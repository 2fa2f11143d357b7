"""Measures many cells into one file: each is written when it is done, and a run that was interrupted goes on.

    results = Results.open("results.json", {"pair": ..., "config": ...})
    measure_cells(pair, cells, results)

A file belongs to one identity: pair, configuration, device, machine. Cells are told apart by their key; a cell that is
already there is not measured again, whatever run it comes from, so a grid may be measured in several runs, unless it
is asked for: then it takes the place of the old one. A damaged file whose name ends in .json is set aside under another
name; any other file that holds no cells is refused and left alone. A cell that runs out of memory is recorded as such.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import gc
import json
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from specsamp import storage
from specsamp.analysis import report
from specsamp.analysis.benchmark import Result, benchmark
from specsamp.analysis.measured import Key, describe
from specsamp.analysis.workload import Workload
from specsamp.decoding.adaptive import Adaptive
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.pair import Pair
from specsamp.mesh.distributed import from_first
from specsamp.models.compiling import is_out_of_memory
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp

KEPT_PROGRAMS = 8  # cells whose programs are kept: Linux allows a process 65,530 mappings, a program takes several


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A drafter, rule, distribution and batch that are measured beside plain decoding."""

    key: Key
    drafter: Drafter
    rule: Rule
    sampling: Warp
    draft_sampling: Warp | None
    workload: Workload
    adaptive: Adaptive | None = None  # the draft length, where the drafter's K is only the most

    @property
    def program(self) -> Hashable:
        """Returns what is compiled for it: the numbers of a distribution are data."""
        warps = jax.tree.structure((self.sampling, self.draft_sampling))
        adaptive = self.adaptive and jax.tree.structure(self.adaptive.for_rows(1))
        return self.drafter, self.rule, warps, self.workload.batch, adaptive


@dataclasses.dataclass(kw_only=True)
class Results:
    """Cells in a file, or only in memory if there is no path."""

    path: str | None
    document: dict[str, Any]  # identity and environment, and "cells"

    @classmethod
    def open(
        cls, path: str | None, identity: Mapping[str, Any], say: Callable[[str], None] = lambda text: None
    ) -> Results:
        """Reads the cells of a file, or begins a new one.

        Args:
          path: local or in a bucket.
          identity: what all cells of the file share; as JSON.
          say: is told that a file was set aside.

        Raises:
          ValueError: the file holds cells of another identity; the message says what differs.
        """
        identity = json.loads(report.to_json(identity))
        fresh = cls(path=path, document={"identity": identity, "cells": []})
        state = check_output(path)
        if state is Output.EMPTY:
            return fresh
        if state is Output.DAMAGED:
            say(f"{path} is no JSON that can be read: set aside as {set_aside(path)}")
            return fresh
        document = read_document(path)
        _check_same(path, document["identity"], identity)
        return cls(path=path, document=document)

    @property
    def cells(self) -> list[dict[str, Any]]:
        return self.document["cells"]

    def find(self, key: Key) -> dict[str, Any] | None:
        return next((cell for cell in self.cells if cell["key"] == dict(key)), None)

    def add(self, cell: Mapping[str, Any], header: Mapping[str, Any]) -> None:
        """Keeps the cell, instead of one with its key, and writes all of them; ``header`` goes before.

        What another run has added to the file since it was read is kept, too: a lock keeps the two apart, on a local
        disk. In a bucket there is no lock, and two runs that add in the same moment lose a cell: give each its file.

        Raises:
          ValueError: the file has come to hold cells of another identity, or something else; it is left alone.
        """
        identity = self.document["identity"]
        last = json.loads(report.to_json(cell))

        def keep(added):
            cells = {name_of(one["key"]): one for one in [*self.cells, *added, last]}  # of equal keys the last
            self.document = json.loads(report.to_json(header)) | {"identity": identity, "cells": [*cells.values()]}

        if self.path is None or jax.process_index():
            keep([])
            return
        with storage.locked(self.path):
            keep(Results.open(self.path, identity).cells)
            report.write_json(self.path, self.document)


class Output(enum.Enum):
    """States of a file that cells are to be added to."""

    EMPTY, DAMAGED, CELLS = range(3)


def check_output(path: str | None, known: Mapping[str, Any] | None = None) -> Output:
    """Returns what a file of cells holds, before anything is measured or read.

    Args:
      known: the part of the identity that is known so far.

    Raises:
      ValueError: something else is there, or cells of another identity: they are left alone.
    """
    if path is None or jax.process_index():  # the first process writes, and says to all which cells are missing
        return Output.EMPTY
    if storage.is_stream(path) or not storage.place(path).exists():
        return Output.EMPTY
    storage.check_regular(path)
    if not (content := storage.place(path).read_bytes()).strip():
        return Output.EMPTY
    try:
        json.loads(content)
    except (ValueError, RecursionError) as error:
        if not os.fspath(path).endswith(".json"):
            raise ValueError(f"{path} exists and is no JSON: it is left alone. Give another --output") from error
        return Output.DAMAGED
    try:
        identity = read_document(path)["identity"]
    except ValueError as error:
        raise ValueError(f"{error}: it is left alone. Give another --output") from error
    if known is not None:
        known = json.loads(report.to_json(known))
        _check_same(path, {name: identity[name] for name in known if name in identity}, known)
    return Output.CELLS


def _check_same(path: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises ValueError if the identity of a file's cells is not the one of this run; the message says what differs."""
    if "machine" in here and there.get("machine") != here["machine"]:
        theirs = "another machine" if "machine" in there else "a machine that they do not name"
        raise ValueError(
            f"{path} holds cells of {theirs}: their times are not those of this one, and the two are not mixed. "
            "Give another --output"
        )
    there, here = _flat(there), _flat(here)
    changed = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    if changed:
        told = "; ".join(f"{name} was {there.get(name)!r}, is {here.get(name)!r}" for name in changed[:3])
        raise ValueError(f"{path} holds cells of another run: {told}. Give another --output")


def name_of(key: Key) -> str:
    """Returns what tells a cell from others: its key, whatever the order of its fields."""
    return json.dumps(dict(key), sort_keys=True)


def read_document(path: str | os.PathLike) -> dict[str, Any]:
    """Returns a file of cells as it was written: "identity", "cells", and what went before.

    Raises:
      ValueError: it is no such file.
      FileNotFoundError: there is none.
    """
    try:
        document = storage.read_json(path)
        keys = [(cell["key"], "result" in cell or "out_of_memory" in cell) for cell in document["cells"]]
        sound = all(isinstance(key, dict) and ended for key, ended in keys)
        if not (isinstance(document["identity"], dict) and sound):
            raise TypeError("cells without key or result")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no cells ({type(error).__name__}: {error})") from error
    return document


def origin(path: str | os.PathLike, document: Mapping[str, Any]) -> str:
    """Returns a line on where and when the cells of a document were measured, as far as it says."""
    known = document.get("environment")
    known = known if isinstance(known, Mapping) else {}
    names = {"cpu": "{}", "device_kind": "{}", "cores": "{} cores", "jax": "JAX {}", "date": "on {:.10}"}
    said = [form.format(known[name]) for name, form in names.items() if known.get(name)]
    return f"{path}: {len(document['cells'])} cells, measured with {', '.join(said) or 'what it does not say'}"


def measure_cells(
    pair: Pair,
    cells: Sequence[Cell],
    results: Results,
    *,
    again: bool = False,
    header: Callable[[], Mapping[str, Any]] = dict,
    progress: Callable[[str], None] = lambda text: None,
) -> list[tuple[Cell, Result]]:
    """Measures the cells that ``results`` does not hold yet, and returns those that were measured now.

    Args:
      again: measures all cells and replaces those in the file one by one, except by running out of memory.
      header: makes what is written before the cells in the file, and into each cell, at the time of writing.
      progress: is told which cell is being measured, and what of it.
    """
    now, kept = [], set()
    # All processes must measure the same cells, whatever files they see.
    missing = from_first(lambda: [i for i, cell in enumerate(cells) if again or results.find(cell.key) is None])
    for number in missing:
        cell = cells[number]
        if cell.program not in kept and len(kept) == KEPT_PROGRAMS:
            jax.clear_caches()
            kept.clear()
        kept.add(cell.program)
        where = f"cell {number + 1} of {len(cells)} ({describe(cell.key)})"
        started = datetime.datetime.now(datetime.UTC)

        measured = outcome_of(
            functools.partial(
                benchmark,
                pair,
                cell.drafter,
                cell.rule,
                cell.sampling,
                cell.workload,
                functools.partial(_say, progress, where),
                draft_sampling=cell.draft_sampling,
                adaptive=cell.adaptive,
            )
        )
        if "result" in measured:
            now.append((cell, measured["result"]))
        if "result" not in measured and results.find(cell.key) is not None:
            continue  # what there was is worth more
        seconds = (datetime.datetime.now(datetime.UTC) - started).total_seconds()
        work = {name: getattr(cell.workload, name) for name in ("repeats", "prompt_length", "max_new_tokens", "seed")}
        facts = {"key": dict(cell.key), "seconds": round(seconds, 1), "exact": cell.rule.exact and cell.drafter.exact}
        results.add({**facts, "workload": work, **header(), **measured}, header())
    return now


def _say(progress: Callable[[str], None], where: str, text: str) -> None:
    progress(f"{where}: {text}")


def outcome_of(measure: Callable[[], Any]) -> dict[str, Any]:
    """Returns ``{"result": what it returns}``, or ``{"out_of_memory": why}`` if it ran out of memory."""
    try:
        outcome = {"result": measure()}
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not (isinstance(error, MemoryError) or is_out_of_memory(error)):
            raise
        outcome = {"out_of_memory": str(error).partition("\n")[0] or "MemoryError"}
    gc.collect()  # what it held is free for the next
    return outcome


def set_aside(path: str | os.PathLike) -> str:
    """Renames a file to a name that no other file has, and returns the name."""
    number = 1
    while storage.place(f"{path}.aside-{number}").exists():
        number += 1
    aside = f"{path}.aside-{number}"
    storage.place(path).rename(aside)
    return aside


def _flat(tree: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {name: tree}
    return {k: v for key, value in tree.items() for k, v in _flat(value, f"{name}.{key}" if name else key).items()}
