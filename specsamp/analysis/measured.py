"""Reads measured cells: their names in words, their counts, and the costs and acceptance that the planner takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specsamp.analysis.acceptance import ByLength, Profile
from specsamp.analysis.costs import CostTable, Round, clock_error, median_rounds
from specsamp.analysis.timing import Quartiles
from specsamp.decoding.results import RowStats
from specsamp.sampling.synthetic import LABEL

Key = Mapping[str, Any]  # names and numbers that tell a cell from the others of its file
Cell = Mapping[str, Any]  # as JSON: "key", "workload", and "result" or "out_of_memory"


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


def counts_of(cell: Cell) -> RowStats:
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


def chosen(cells: Sequence[Cell], **key: Any) -> list[Cell]:
    """Returns the measured cells whose key has these values; plain decoding fits any drafter and rule."""
    return [cell for cell in cells if "result" in cell and all(_fits(cell["key"], *one) for one in key.items())]


def _fits(key: Key, name: str, value: Any) -> bool:
    return key.get(name) == value or (key["drafter"] == "none" and name in ("rule", "drafter"))


def measured_costs(cells: Sequence[Cell]) -> CostTable:
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


def _ms_per_round(cell: Cell, side: str) -> Quartiles:
    return Quartiles(**cell["result"][side]["ms_per_round"])


def _products_ms(cells: Sequence[Cell], rounds: Sequence[Round]) -> tuple[tuple[int, float], ...]:
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


def measured_acceptance(cells: Sequence[Cell]) -> ByLength:
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
