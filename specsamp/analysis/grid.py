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
import functools
import gc
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from specsamp import storage
from specsamp.analysis import report
from specsamp.analysis.acceptance import ByLength, Profile
from specsamp.analysis.benchmark import Result, benchmark
from specsamp.analysis.costs import CostTable, Round, median_rounds
from specsamp.analysis.decoder import Workload
from specsamp.analysis.spread import Spread
from specsamp.analysis.synthetic import LABEL
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.pair import Pair
from specsamp.models.compiling import is_out_of_memory
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp

Key = Mapping[str, Any]  # names and numbers
CELLS_BETWEEN_CLEARING = 8  # of compiled programs: Linux allows a process 65,530 mappings, a program takes several


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One drafter, rule, distribution and batch."""

    key: Key
    drafter: Drafter
    rule: Rule
    sampling: Warp
    draft_sampling: Warp | None
    workload: Workload


@dataclasses.dataclass(kw_only=True)
class Results:
    """Cells in a file, or only in memory if there is no path."""

    path: str | None
    document: dict[str, Any]  # identity and environment, and "cells"

    @classmethod
    def open(
        cls, path: str | None, identity: Mapping[str, Any], say: Callable[[str], None] = lambda text: None
    ) -> Results:
        """Reads what is there, or begins.

        Args:
          path: local or in a bucket.
          identity: what all cells of the file share; as JSON.
          say: is told that a file was set aside.

        Raises:
          ValueError: the file holds cells of another identity; the message says what differs.
        """
        identity = json.loads(report.to_json(identity))
        fresh = cls(path=path, document={"identity": identity, "cells": []})
        if path is None or jax.process_index() or storage.is_stream(path) or not storage.place(path).exists():
            return fresh  # the first process writes, and says to all which cells are missing
        storage.check_regular(path)
        if not (content := storage.place(path).read_bytes()).strip():
            return fresh
        try:
            json.loads(content)
        except (ValueError, RecursionError) as error:
            if not os.fspath(path).endswith(".json"):
                raise ValueError(f"{path} exists and is no JSON: it is left alone. Give another --output") from error
            say(f"{path} is no JSON that can be read: set aside as {set_aside(path)}")
            return fresh
        try:
            document = read_document(path)
        except ValueError as error:
            raise ValueError(f"{error}: it is left alone. Give another --output") from error
        known = document["identity"]
        there, here = _flat(known), _flat(identity)
        if "machine" in identity and known.get("machine") != identity["machine"]:
            theirs = "another machine" if "machine" in known else "a machine that they do not name"
            raise ValueError(
                f"{path} holds cells of {theirs}: their times are not those of this one, and the two are not mixed. "
                "Give another --output"
            )
        changed = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
        if changed:
            told = "; ".join(f"{name} was {there.get(name)!r}, is {here.get(name)!r}" for name in changed[:3])
            raise ValueError(f"{path} holds cells of another run: {told}. Give another --output")
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
            cells = {_name(one): one for one in [*self.cells, *added, last]}  # of equal keys the last
            self.document = json.loads(report.to_json(header)) | {"identity": identity, "cells": [*cells.values()]}

        if self.path is None or jax.process_index():
            keep([])
            return
        with storage.locked(self.path):
            keep(Results.open(self.path, identity).cells)
            report.write_json(self.path, self.document)


def _name(cell: Mapping[str, Any]) -> str:
    return json.dumps(cell["key"], sort_keys=True)


def read_document(path: str | os.PathLike) -> dict[str, Any]:
    """A file of cells as it was written: "identity", "cells", and what went before.

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
    """Measures what is not yet in ``results``; returns what was measured now.

    Args:
      again: measures all, and replaces what is there, cell by cell; not by running out of memory.
      header: what goes before the cells in the file, and into each cell, at the time of writing.
      progress: is told which cell is being measured, and what of it.
    """
    now = []
    missing = [number for number, cell in enumerate(cells) if again or results.find(cell.key) is None]
    for number in _of_first_process(missing, len(cells)):
        cell = cells[number]
        where = f"cell {number + 1} of {len(cells)} ({describe(cell.key)})"
        started = datetime.datetime.now(datetime.UTC)

        def say(text, where=where):
            return progress(f"{where}: {text}")

        measured = outcome_of(
            functools.partial(
                benchmark,
                pair,
                cell.drafter,
                cell.rule,
                cell.sampling,
                cell.workload,
                say,
                draft_sampling=cell.draft_sampling,
            )
        )
        if "result" in measured:
            now.append((cell, measured["result"]))
        if len(now) % CELLS_BETWEEN_CLEARING == 0:
            jax.clear_caches()
        if "result" not in measured and results.find(cell.key) is not None:
            continue  # what there was is worth more
        seconds = (datetime.datetime.now(datetime.UTC) - started).total_seconds()
        work = {name: getattr(cell.workload, name) for name in ("repeats", "prompt_length", "max_new_tokens", "seed")}
        facts = {"key": dict(cell.key), "seconds": round(seconds, 1), "exact": cell.rule.exact and cell.drafter.exact}
        results.add({**facts, "workload": work, **header(), **measured}, header())
    return now


def outcome_of(measure: Callable[[], Any]) -> dict[str, Any]:
    """``{"result": what it returns}``, or ``{"out_of_memory": why}`` if it ran out of memory."""
    try:
        outcome = {"result": measure()}
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not (isinstance(error, MemoryError) or is_out_of_memory(error)):
            raise
        outcome = {"out_of_memory": str(error).partition("\n")[0] or "MemoryError"}
    gc.collect()  # what it held is free for the next
    return outcome


def law_of(key: Key) -> str:
    """What the target is sampled with, in words: "greedy", "T = 0.8, top_p 0.95"; made-up acceptance is named first."""
    made_up = [LABEL.format(rate=key["synthetic_acceptance"])] if key.get("synthetic_acceptance") is not None else []
    if key["temperature"] == 0:
        return ", ".join([*made_up, "greedy"])
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    filters = [f"{name} {key[name]:g}" for name in off if key[name] != off[name]]
    return ", ".join([*made_up, f"T = {key['temperature']:g}", *filters])


def describe(key: Key) -> str:
    """A cell in words."""
    draft = [] if key.get("draft_temperature") is None else [f"draft T = {key['draft_temperature']:g}"]
    drafter = [] if key["drafter"] == "none" else [f"{key['drafter']} drafter, {key['rule']} rule"]
    return ", ".join([law_of(key), *draft, *drafter, f"K = {key['draft_length']}", f"batch {key['batch']}"])


def chosen(cells: Sequence[Mapping[str, Any]], **key: Any) -> list[Mapping[str, Any]]:
    """Measured cells whose key has these values; plain decoding has any drafter and rule."""

    def fits(cell):
        return all(
            cell["key"].get(name) == value or (cell["key"]["drafter"] == "none" and name in ("rule", "drafter"))
            for name, value in key.items()
        )

    return [cell for cell in cells if "result" in cell and fits(cell)]


def measured_costs(cells: Sequence[Mapping[str, Any]]) -> CostTable:
    """Of a round, from measured cells.

    Cells are measured minutes apart, on a machine that may be busier by then; the two sides of one take turns. So a
    round counts in plain rounds of its own cell, and these as the median over all cells of the batch.
    """
    rounds, errors = [], []
    for batch in sorted({cell["key"]["batch"] for cell in cells}):
        here = [cell for cell in cells if cell["key"]["batch"] == batch]

        def spread(cell, side):
            return Spread(**cell["result"][side]["ms_per_round"])

        step_ms = float(np.median([spread(cell, "autoregressive").median for cell in here]))
        rounds.append(Round(draft_length=0, batch=batch, ms=step_ms))
        for cell in (cell for cell in here if cell["key"]["draft_length"]):
            plain, drafted = spread(cell, "autoregressive"), spread(cell, "speculative")
            ms = drafted.median * (step_ms / plain.median)
            rounds.append(Round(draft_length=cell["key"]["draft_length"], batch=batch, ms=ms))
            errors.append(drafted.relative_error(cell["workload"]["repeats"]))
    rounds, error = median_rounds(rounds), float(np.median(errors)) if errors else 0.0
    return CostTable(rounds=rounds, error=error, products_ms=_products_ms(cells, rounds))


def _products_ms(cells: Sequence[Mapping[str, Any]], rounds: Sequence[Round]) -> tuple[tuple[int, float], ...]:
    """From the parts of rounds, by rows; in plain rounds of their own cell, as the rounds."""
    by_rows: dict[int, list[float]] = {}
    for cell in cells:
        batch, K, split = cell["key"]["batch"], cell["key"]["draft_length"], cell["result"]["split"]
        if split is None or K == 0:
            continue
        step_ms = next(one.ms for one in rounds if (one.batch, one.draft_length) == (batch, 0))
        pace = step_ms / split["step"]["ms"]["median"]
        for tokens, name in ((1, "stream_step"), (K + 1, "stream_score")):
            by_rows.setdefault(batch * tokens, []).append(split[name]["ms"]["median"] * pace)
    return tuple((rows, float(np.median(ms))) for rows, ms in sorted(by_rows.items()))


def measured_acceptance(cells: Sequence[Mapping[str, Any]]) -> ByLength:
    """Of each K, from cells of one rule, drafter and distribution, which do not tell their texts apart.

    Cells of several batches share texts, so the one with most rounds speaks for its K.

    Raises:
      ValueError: no cell has a draft.
    """
    most: dict[int, Mapping[str, Any]] = {}
    for cell in cells:
        K, counts = cell["key"]["draft_length"], cell["result"]["acceptance"]
        if K and (K not in most or sum(counts["accepted_counts"]) > sum(most[K]["accepted_counts"])):
            most[K] = counts
    if not most:
        raise ValueError("no measured cell has a draft: there is no acceptance to take from them")
    return ByLength(
        {K: Profile.of_histogram(counts["accepted_counts"], counts["reached"]) for K, counts in most.items()}
    )


def set_aside(path: str | os.PathLike) -> str:
    """Renames a file to a name that nothing has, and returns it."""
    number = 1
    while storage.place(f"{path}.aside-{number}").exists():
        number += 1
    aside = f"{path}.aside-{number}"
    storage.place(path).rename(aside)
    return aside


def _of_first_process(missing: Sequence[int], count: int) -> list[int]:
    """All processes must measure the same cells, whatever files they see."""
    if jax.process_count() == 1:
        return list(missing)
    wanted = np.zeros(count, bool)
    wanted[list(missing)] = True
    return np.flatnonzero(multihost_utils.broadcast_one_to_all(wanted)).tolist()


def _flat(tree: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {name: tree}
    return {k: v for key, value in tree.items() for k, v in _flat(value, f"{name}.{key}" if name else key).items()}
