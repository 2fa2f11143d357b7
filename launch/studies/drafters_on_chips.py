"""Says what the acceptance that drafters.py measured would be worth on a chip, beside a larger target.

A round costs there what the compiler estimates (compile_heads.json, of the study compile) for that target and a drafter of
the same kind; any head is taken to cost what EAGLE-3's does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from launch.studies.compile_tables import answers
from specsamp.analysis import tables
from specsamp.analysis.costs import CostTable
from specsamp.analysis.measured import measured_acceptance
from specsamp.analysis.planner import make_plan
from specsamp.tpu.calibration import estimate
from specsamp.tpu.costs import banded_costs
from specsamp.tpu.work import Work, calls_of_round

SAMPLINGS = {"greedy": (0.0, 1.0), "0.8/0.95": (0.8, 0.95), "1.0": (1.0, 1.0)}  # temperature and top-p
FORECAST_HEADER = ("drafter", "costs of", "sampling", "K", "ms per token", "speedup")
HEAD = "EAGLE-3"  # the name of a head in the file of costs

Costs = Mapping[str, tuple[str, CostTable]]  # by kind of drafter: what it is there, and the costs of its rounds


def costs_of_drafters(document: Mapping[str, Any], target: str, slice_name: str, path: str) -> Costs:
    """Returns what drafts for a target on a slice, and the costs of its rounds, by kind of drafter.

    A round was compiled for one K; costs in between lie on the line from a step of the target to it, those beyond on its
    continuation.

    Args:
      document: of the study compile, its grid of heads.
      path: of the document, for the message.

    Raises:
      ValueError: the document has no such target or slice, with those that it has.
    """
    asked, found = {"target": target, "topology": slice_name}, {}
    for name, answer in answers(document):
        if any(name[field] != value for field, value in asked.items()):
            continue
        drafter, chip = name["drafter"], name["topology"].partition(":")[0]
        works = {program: Work(**facts["work"]) for program, facts in answer["programs"].items()}
        K = works["round"].calls - 1
        bands = [
            estimate(chip, works["target step"]),
            estimate(chip, *calls_of_round(works["round"], works["draft step"], K)),
        ]
        found[kind_of(drafter)] = drafter, banded_costs((0, K), bands, batch=1)
    if not found:
        known = sorted({f"{name['target']} on {name['topology']}" for name, _ in answers(document)})
        raise ValueError(f"{path} has no {target} on {slice_name}: it has {'; '.join(known)}")
    return found


def kind_of(drafter: str) -> str:
    """Returns what kind of drafter a name means: "head", "early exit", "lookup" or "model"."""
    if drafter == HEAD:
        return "head"
    return next((kind for kind in ("head", "early exit", "lookup") if kind in drafter), "model")


def forecast_rows(cells: Sequence[Mapping[str, Any]], costs: Costs) -> list[tuple[str, ...]]:
    """Returns a row of `FORECAST_HEADER` for each measured cell whose kind of drafter has costs."""
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for cell in cells:
        if "result" in cell:
            alike.setdefault((cell["key"]["drafter"], sampling_name(cell["key"])), []).append(cell)
    rows = []
    for (name, sampling), same in alike.items():
        if kind_of(name) not in costs:
            continue
        drafter, table = costs[kind_of(name)]
        show = tables.span if table.open else functools.partial(tables.interval, digits=2)
        lengths = [cell["key"]["draft_length"] for cell in same]
        plan = make_plan(measured_acceptance(same), table, draft_lengths=lengths)
        rows += [
            (name, drafter, sampling, str(K), show(plan[K].ms_per_token), show(plan[K].speedup, "x")) for K in lengths
        ]
    return rows


def sampling_name(key: Mapping[str, Any]) -> str:
    """Returns what a cell's distribution is called here."""
    return next(name for name, numbers in SAMPLINGS.items() if numbers == (key["temperature"], key["top_p"]))
