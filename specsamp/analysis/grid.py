"""Measures many cells into one file: each is written at once, and an interrupted run resumes.

    results = Results.open("results.json", {"pair": ..., "config": ...})
    cells = [{"key": key} for key in keys]
    measure_cells(cells, lambda number, say: measure(keys[number]), results)

A file belongs to one identity: pair, configuration, device, machine. A cell is identified by its
key. A cell that the file holds is measured again only with ``again``, and then replaces the old
one; so a grid may be measured in several runs. A file that holds anything else is refused and left
alone. A cell that runs out of memory is recorded as "out_of_memory".

This module also reads the cells of a file: their names in words, their counts, and the planner's
costs and acceptance.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specsamp import storage
from specsamp.analysis import report
from specsamp.analysis.acceptance import Profile
from specsamp.analysis.costs import CostTable, clock_error
from specsamp.analysis.workload import Quartiles, Workload
from specsamp.decoding.method import Method
from specsamp.decoding.results import RowStats
from specsamp.mesh.distributed import from_first
from specsamp.models.compiling import is_out_of_memory
from specsamp.sampling.synthetic import LABEL

Json = Mapping[str, Any]
Key = Json  # names and numbers that identify a cell in its file
Measured = Json  # "key", "workload", and "result" or "out_of_memory"

# Cells whose programs are kept: Linux allows a process 65,530 mappings, a program takes several.
KEPT_PROGRAMS = 8
SIDES = ("autoregressive", "speculative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A method and a workload, measured in turn with plain decoding."""

    key: Key
    method: Method
    workload: Workload

    @property
    def facts(self) -> Json:
        """Returns the fields of a cell's record other than its measurement."""
        counts = {
            name: getattr(self.workload, name)
            for name in ("repeats", "prompt_length", "max_new_tokens", "seed")
        }
        return {"key": dict(self.key), "exact": self.method.exact, "workload": counts}


@dataclasses.dataclass(kw_only=True)
class Results:
    """Cells in a file, or only in memory if there is no path."""

    path: str | None
    document: Json  # identity and environment, and "cells"

    @classmethod
    def open(cls, path: str | None, identity: Json) -> Results:
        """Reads the cells of a file, or begins a new one.

        Args:
          path: local or in a bucket.
          identity: the shared settings of all cells, or a part of them; as JSON.

        Raises:
          ValueError: the file holds something else, or cells of another identity; the message lists
            the differences.
        """
        here = report.as_json(identity)
        new = cls(path=path, document={"identity": here, "cells": []})
        if (
            path is None
            or jax.process_index()
            or storage.is_stream(path)
            or not storage.place(path).exists()
        ):
            return new  # process 0 writes, and broadcasts the missing cells
        storage.check_regular(path)
        if not storage.place(path).read_bytes().strip():
            return new
        try:
            document = read_document(path)
        except ValueError as error:
            raise ValueError(f"{error}: it is left alone. Give another --output") from error
        there = {name: document["identity"].get(name) for name in here}
        if changed := storage.differences(there, here):
            raise ValueError(
                f"{path} holds cells of another run: {'; '.join(changed[:3])}. Give another "
                "--output"
            )
        return cls(path=path, document=document)

    @property
    def cells(self) -> list[Measured]:
        return self.document["cells"]

    def find(self, key: Key) -> Measured | None:
        return next((cell for cell in self.cells if cell["key"] == dict(key)), None)

    def take_over(self, path: str | os.PathLike) -> None:
        """Adds the cells of another file that this one lacks, each with the header that it was
        written with.

        Raises:
          ValueError: the file holds something else, or cells of another identity.
        """
        for cell in Results.open(os.fspath(path), self.document["identity"]).cells:
            if self.find(cell["key"]) is None:
                header = {name: cell[name] for name in ("command", "environment") if name in cell}
                self.add(cell, header)

    def add(self, cell: Measured, header: Json) -> None:
        """Adds a cell, or replaces the one with its key, and writes all of them; ``header`` goes
        before.

        Cells that another run has added to the file since it was read are kept: a lock keeps the
        two apart, on a local disk. In a bucket there is no lock, and two runs that add in the same
        moment lose a cell: give each its file.

        Raises:
          ValueError: the file has come to hold cells of another identity, or something else; it is
            left alone.
        """
        identity = self.document["identity"]
        writes = self.path is not None and jax.process_index() == 0
        with storage.locked(self.path) if writes else contextlib.nullcontext():
            there = Results.open(self.path, identity).cells if writes else []
            every = [*self.cells, *there, report.as_json(cell)]
            cells = {json.dumps(each["key"], sort_keys=True): each for each in every}
            self.document = report.as_json(header)
            self.document |= {"identity": identity, "cells": [*cells.values()]}
            if writes:
                storage.write(self.path, report.json_text(self.document))


def read_document(path: str | os.PathLike) -> Json:
    """Returns the document of a file of cells; raises ValueError for any other file."""
    try:
        document = storage.read_json(path)
        sound = [
            isinstance(cell["key"], dict) and {"result", "out_of_memory"} & {*cell}
            for cell in document["cells"]
        ]
        if not isinstance(document["identity"], dict) or not all(sound):
            raise TypeError("cells without key or result")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no cells ({type(error).__name__}: {error})") from error
    return document


def origin(path: str | os.PathLike, document: Json) -> str:
    """Returns a line on the machine and the date of the cells of a document."""
    known = document.get("environment") or {}
    names = {
        "cpu": "{}",
        "device_kind": "{}",
        "cores": "{} cores",
        "jax": "JAX {}",
        "date": "on {:.10}",
    }
    said = [form.format(known[name]) for name, form in names.items() if known.get(name)]
    return (
        f"{path}: {len(document['cells'])} cells, measured with "
        f"{', '.join(said) or 'unknown means'}"
    )


def measure_cells(
    cells: Sequence[Measured],
    measure: Callable[[int, report.Say], Any],
    results: Results,
    *,
    again: bool = False,
    header: Callable[[], Json] = dict,
    progress: report.Say = report.silent,
) -> dict[int, Any]:
    """Measures the cells that ``results`` does not hold yet; returns the results of this run by
    number of the cell.

    Args:
      cells: the "key" of each cell, and other fields that are written with its result.
      measure: returns the result of the cell of a number; its second argument is a
        function that shows progress.
      again: measures all cells and replaces the file's cells one by one, except by running out of
        memory.
      header: makes the header of the file and of each cell at the time of writing.
      progress: called with a line on the cell that is being measured.
    """
    now = {}
    # All processes must measure the same cells, also where they see different files.
    missing = from_first(
        lambda: [i for i, cell in enumerate(cells) if again or results.find(cell["key"]) is None]
    )
    for count, number in enumerate(missing, 1):
        where = f"cell {number + 1} of {len(cells)}"
        progress(where)
        start = time.perf_counter()
        try:
            now[number] = measure(number, lambda text, where=where: progress(f"{where}: {text}"))
            outcome = {"result": now[number]}
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            if not (isinstance(error, MemoryError) or is_out_of_memory(error)):
                raise
            outcome = {"out_of_memory": str(error).partition("\n")[0] or "MemoryError"}
        gc.collect()  # its memory is free for the next
        if count % KEPT_PROGRAMS == 0:
            jax.clear_caches()
        if number not in now and results.find(cells[number]["key"]) is not None:
            continue  # the old result is worth more
        seconds = round(time.perf_counter() - start, 1)
        results.add({**cells[number], "seconds": seconds, **header(), **outcome}, header())
    return now


def distribution_of(key: Key) -> str:
    """Describes the target's distribution: "greedy", "T = 0.8, top-p 0.95"; synthetic acceptance
    goes first.
    """
    rate = key.get("synthetic_acceptance")
    made_up = [] if rate is None else [LABEL.format(rate=rate)]
    if key["temperature"] == 0:
        return ", ".join([*made_up, "greedy"])
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    filters = [f"{name.replace('_', '-')} {key[name]:g}" for name in off if key[name] != off[name]]
    return ", ".join([*made_up, f"T = {key['temperature']}", *filters])


def setting(key: Key) -> str:
    """Names distribution, drafter and rule of a cell: "T = 0.8, top-p 0.95, draft model, token
    rule".
    """
    drafter = {"model": "draft model", "ngram": "prompt lookup"}.get(
        key["drafter"], f"{key['drafter']} drafter"
    )
    words = [distribution_of(key)]
    if key["drafter"] == "none":
        return ", ".join([*words, "plain"])
    if key.get("draft_temperature") is not None:
        words.append(f"draft T = {key['draft_temperature']:g}")
    return ", ".join([*words, drafter, f"{key['rule']} rule"])


def describe(key: Key) -> str:
    """Describes a cell in words."""
    length = "K =" if key.get("adaptive") is None else "K adaptive, up to"
    return f"{setting(key)}, {length} {key['draft_length']}, batch {key['batch']}"


def counts_of(cell: Measured) -> RowStats:
    """Returns the counts of the speculative side of a measured cell, over all sequences and
    repeats.
    """
    counts = cell["result"]["acceptance"]
    # Older files do not have the number of drafted tokens; it is at least this.
    return RowStats.from_json({"drafted": sum(counts["reached"])} | counts)


def chosen(cells: Sequence[Measured], **key: Any) -> list[Measured]:
    """Returns the measured cells whose key has these values; plain decoding fits any drafter and
    rule.
    """

    def fits(cell: Measured) -> bool:
        free = ("rule", "drafter") if cell["key"]["drafter"] == "none" else ()
        return all(cell["key"].get(name) == key[name] for name in key.keys() - free)

    return [cell for cell in cells if "result" in cell and fits(cell)]


def measured_costs(cells: Sequence[Measured]) -> CostTable:
    """Returns the costs of rounds from measured cells.

    Cells are measured minutes apart, on a machine that may be busier by then, but the two sides of
    a cell take turns. So each time is taken relative to the plain round of its own cell, whose time
    is the median over all cells of the batch.
    """
    table: dict[int, dict[int, float]] = {}
    errors = [0.0] * (not any(cell["key"]["draft_length"] for cell in cells))
    for batch in sorted({cell["key"]["batch"] for cell in cells}):
        here = [cell for cell in cells if cell["key"]["batch"] == batch]
        sides = [
            {name: Quartiles(**cell["result"][name]["ms_per_round"]) for name in SIDES}
            for cell in here
        ]
        step_ms = float(np.median([side["autoregressive"].median for side in sides]))
        rounds: dict[int, list[float]] = {0: [step_ms]}
        for cell, side in zip(here, sides, strict=True):
            K = cell["key"]["draft_length"]
            drafted = side["speculative"]
            if K == 0:
                continue
            rounds.setdefault(K, []).append(
                drafted.median * (step_ms / side["autoregressive"].median)
            )
            errors.append(drafted.relative_error(cell["workload"]["repeats"]))
        table[batch] = {K: float(np.median(ms)) for K, ms in rounds.items()}
    return CostTable(table, error=clock_error(errors))


def measured_acceptance(cells: Sequence[Measured]) -> dict[int, Profile]:
    """Returns the acceptance of each K, from cells of one rule, drafter and distribution.

    Cells of several batches share texts, so the cell with most rounds is taken.
    """
    most: dict[int, RowStats] = {}
    for cell in cells:
        K = cell["key"]["draft_length"]
        counts = counts_of(cell)
        if K and (K not in most or counts.rounds > most[K].rounds):
            most[K] = counts
    if not most:
        raise ValueError("no measured cell has a draft: there is no acceptance to take from them")
    return {
        K: Profile.of_histogram(counts.accepted_counts, counts.reached)
        for K, counts in most.items()
    }
