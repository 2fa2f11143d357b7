"""Measures many cells into one file: each is written when it is done, and a run that was interrupted goes on.

    results = Results.open("results.json", {"pair": ..., "config": ...})
    measure_cells(pair, cells, results)

A file belongs to one identity: pair, configuration, device, machine. Cells are told apart by their key; a cell that is
already there is not measured again, whatever run it comes from, so a grid may be measured in several runs, unless it
is asked for: then it takes the place of the old one. A damaged file whose name ends in .json is set aside under another
name; any other file that holds no cells is refused and left alone. A cell that runs out of memory is recorded as such.

The cells of a file are read here, too: their names in words, their counts, and what the planner takes of them.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import gc
import json
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specsamp import storage
from specsamp.analysis import report
from specsamp.analysis.acceptance import ByLength, Profile
from specsamp.analysis.benchmark import Result, benchmark
from specsamp.analysis.costs import CostTable, Round, clock_error, median_rounds
from specsamp.analysis.workload import Quartiles, Workload
from specsamp.decoding.adaptive import Adaptive
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.pair import Pair
from specsamp.decoding.results import RowStats
from specsamp.mesh.distributed import from_first
from specsamp.models.compiling import is_out_of_memory
from specsamp.sampling.rules import Rule
from specsamp.sampling.synthetic import LABEL
from specsamp.sampling.warp import Warp

Key = Mapping[str, Any]  # names and numbers that tell a cell from the others of its file
Measured = Mapping[str, Any]  # as JSON: "key", "workload", and "result" or "out_of_memory"

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
        identity = report.as_json(identity)
        document = check_output(path)
        if document:
            _check_same(path, document["identity"], identity)
            return cls(path=path, document=document)
        if document is not None:
            say(f"{path} is no JSON that can be read: set aside as {set_aside(path)}")
        return cls(path=path, document={"identity": identity, "cells": []})

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
        last = report.as_json(cell)

        def keep(added):
            cells = {name_of(one["key"]): one for one in [*self.cells, *added, last]}  # of equal keys the last
            self.document = report.as_json(header) | {"identity": identity, "cells": [*cells.values()]}

        if self.path is None or jax.process_index():
            keep([])
            return
        with storage.locked(self.path):
            keep(Results.open(self.path, identity).cells)
            report.write_json(self.path, self.document)


def check_output(path: str | None, known: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Reads a file that cells are to be added to, before anything is measured.

    Args:
      known: the part of the identity that is known so far.

    Returns:
      What `read_document` does; None where nothing is there; an empty one where it is damaged JSON.

    Raises:
      ValueError: something else is there, or cells of another identity: they are left alone.
    """
    if path is None or jax.process_index():  # the first process writes, and says to all which cells are missing
        return None
    if storage.is_stream(path) or not storage.place(path).exists():
        return None
    storage.check_regular(path)
    if not (content := storage.place(path).read_bytes()).strip():
        return None
    try:
        json.loads(content)
    except (ValueError, RecursionError) as error:
        if not os.fspath(path).endswith(".json"):
            raise ValueError(f"{path} exists and is no JSON: it is left alone. Give another --output") from error
        return {}
    try:
        document = read_document(path)
    except ValueError as error:
        raise ValueError(f"{error}: it is left alone. Give another --output") from error
    if known is not None:
        known, identity = report.as_json(known), document["identity"]
        _check_same(path, {name: identity[name] for name in known if name in identity}, known)
    return document


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
                lambda text, where=where: progress(f"{where}: {text}"),
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


def distribution_of(key: Key) -> str:
    """Describes what the target is sampled with: "greedy", "T = 0.8, top_p 0.95"; synthetic acceptance goes first."""
    rate = key.get("synthetic_acceptance")
    made_up = [] if rate is None else [LABEL.format(rate=rate)]
    if key["temperature"] == 0:
        return ", ".join([*made_up, "greedy"])
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    filters = [f"{name} {key[name]:g}" for name in off if key[name] != off[name]]
    return ", ".join([*made_up, f"T = {key['temperature']:g}", *filters])


def describe(key: Key) -> str:
    """Describes a cell in words."""
    draft = [] if key.get("draft_temperature") is None else [f"draft T = {key['draft_temperature']:g}"]
    drafter = [] if key["drafter"] == "none" else [f"{key['drafter']} drafter, {key['rule']} rule"]
    length = f"K = {key['draft_length']}" if key.get("adaptive") is None else f"K adaptive, up to {key['draft_length']}"
    return ", ".join([distribution_of(key), *draft, *drafter, length, f"batch {key['batch']}"])


def counts_of(cell: Measured) -> RowStats:
    """Returns what the speculative side of a measured cell did, over all rows and repeats."""
    counts = cell["result"]["acceptance"]
    return RowStats(
        rounds=counts["rounds"],
        emitted=counts["emitted"],
        drafted=counts.get("drafted", sum(counts["reached"])),  # older files do not say it; at least this many
        reached=tuple(counts["reached"]),
        accepted_counts=tuple(counts["accepted_counts"]),
        variation=counts.get("variation"),
        extra_accepted=counts.get("extra_accepted"),
    )


def chosen(cells: Sequence[Measured], **key: Any) -> list[Measured]:
    """Returns the measured cells whose key has these values; plain decoding fits any drafter and rule."""
    return [cell for cell in cells if "result" in cell and all(_fits(cell["key"], *one) for one in key.items())]


def _fits(key: Key, name: str, value: Any) -> bool:
    return key.get(name) == value or (key["drafter"] == "none" and name in ("rule", "drafter"))


def measured_costs(cells: Sequence[Measured]) -> CostTable:
    """Returns the costs of rounds from measured cells.

    Cells are measured minutes apart, on a machine that may be busier by then, but the two sides of a cell take turns. So
    each round is measured in plain rounds of its own cell, and a plain round is the median over all cells of the batch.
    """
    rounds, errors = [], []
    for batch in sorted({cell["key"]["batch"] for cell in cells}):
        here = [cell for cell in cells if cell["key"]["batch"] == batch]
        step_ms = float(np.median([_ms_per_round(cell, "autoregressive").median for cell in here]))
        rounds.append(Round(draft_length=0, batch=batch, ms=step_ms))
        for cell in (cell for cell in here if cell["key"]["draft_length"]):
            plain, drafted = _ms_per_round(cell, "autoregressive"), _ms_per_round(cell, "speculative")
            ms = drafted.median * (step_ms / plain.median)
            rounds.append(Round(draft_length=cell["key"]["draft_length"], batch=batch, ms=ms))
            errors.append(drafted.relative_error(cell["workload"]["repeats"]))
    rounds = median_rounds(rounds)
    return CostTable(rounds=rounds, error=clock_error(errors or [0.0]), products_ms=_products_ms(cells, rounds))


def _ms_per_round(cell: Measured, side: str) -> Quartiles:
    return Quartiles(**cell["result"][side]["ms_per_round"])


def _products_ms(cells: Sequence[Measured], rounds: Sequence[Round]) -> tuple[tuple[int, float], ...]:
    """Returns the products timed alone, by rows; like rounds, in plain rounds of their own cell."""
    by_rows: dict[int, list[float]] = {}
    for cell in cells:
        batch, K, split = cell["key"]["batch"], cell["key"]["draft_length"], cell["result"]["split"]
        if split is None or K == 0:
            continue
        step_ms = next(one.ms for one in rounds if (one.batch, one.draft_length) == (batch, 0))
        scale = step_ms / split["step"]["ms"]["median"]
        for tokens, name in ((1, "stream_step"), (K + 1, "stream_score")):
            by_rows.setdefault(batch * tokens, []).append(split[name]["ms"]["median"] * scale)
    return tuple((rows, float(np.median(ms))) for rows, ms in sorted(by_rows.items()))


def measured_acceptance(cells: Sequence[Measured]) -> ByLength:
    """Returns the acceptance of each K, from cells of one rule, drafter and distribution.

    Cells do not tell their texts apart. Cells of several batches share texts, so the one with most rounds is taken.

    Raises:
      ValueError: no cell has a draft.
    """
    most: dict[int, RowStats] = {}
    for cell in cells:
        K, counts = cell["key"]["draft_length"], counts_of(cell)
        if K and (K not in most or counts.rounds > most[K].rounds):
            most[K] = counts
    if not most:
        raise ValueError("no measured cell has a draft: there is no acceptance to take from them")
    return ByLength({K: Profile.of_histogram(one.accepted_counts, one.reached) for K, one in most.items()})
