"""Says for drafters.py what its acceptance would be worth on a chip, beside a larger target.

A round costs there what the compiler estimates (compile_heads.json, of the study compile) for that target and a drafter of the same kind; any
head is taken to cost what EAGLE-3's does.
"""

from __future__ import annotations

import functools

from launch.lib.study import RESULTS, Document
from launch.studies.compile_tables import answers
from specsamp import storage
from specsamp.analysis import tables
from specsamp.analysis.costs import CostTable
from specsamp.analysis.grid import measured_acceptance
from specsamp.analysis.planner import make_plan
from specsamp.analysis.report import Table
from specsamp.tpu.calibration import estimate
from specsamp.tpu.costs import banded_costs
from specsamp.tpu.work import Work, calls_of_round

HEAD = "EAGLE-3"  # the name of a head in the file of costs
COSTS, CHIPS, TARGET = str(RESULTS / "compile_heads.json"), "v5e:2x2", "Llama 3.1 8B"


def on_chips(document: Document, costs: str = COSTS, chips: str = CHIPS, chip_target: str = TARGET) -> Table:
    """Returns what the acceptance of a drafter would be worth on a chip, for those whose kind has costs there."""
    known, alike, rows = costs_of_drafters(costs, chip_target, chips), {}, []
    for cell in (cell for cell in document["cells"] if "result" in cell):
        key = cell["key"]
        alike.setdefault((key["drafter"], key["temperature"], key["top_p"]), []).append(cell)
    for (name, heat, share), same in alike.items():
        if kind_of(name) not in known:
            continue
        law = "greedy" if heat == 0 else f"{heat}" if share == 1 else f"{heat}/{share}"
        drafter, table = known[kind_of(name)]
        show = tables.span if table.open else functools.partial(tables.interval, digits=2)
        lengths = [cell["key"]["draft_length"] for cell in same]
        plan = make_plan(measured_acceptance(same), table, draft_lengths=lengths)
        rows += [(name, drafter, law, f"{K}", show(plan[K].ms_per_token), show(plan[K].speedup, "x")) for K in lengths]
    title = f"The same acceptance, with {chip_target} on {chips} (forecast by the compiler's estimates, calibrated)"
    header = ("drafter", "costs of", "sampling", "K", "ms per token", "speedup")
    return Table(title=title, header=header, rows=rows, left=3)


def costs_of_drafters(path: str, target: str, chips: str) -> dict[str, tuple[str, CostTable]]:
    """Returns what drafts for a target on a slice, and the costs of its rounds, by kind of drafter.

    A round was compiled for one K; costs in between lie on the line from a step of the target to it, those beyond on its
    continuation.

    Raises:
      ValueError: the file has no such target or slice, with those that it has.
    """
    compiled, found = list(answers(storage.read_json(path))), {}
    for name, answer in compiled:
        if (name["target"], name["topology"]) == (target, chips):
            works = {program: Work(**facts["work"]) for program, facts in answer["programs"].items()}
            K, chip = works["round"].calls - 1, chips.partition(":")[0]
            step = estimate(chip, works["target step"])
            round_ = estimate(chip, *calls_of_round(works["round"], works["draft step"], K))
            found[kind_of(name["drafter"])] = name["drafter"], banded_costs((0, K), [step, round_], batch=1)
    if not found:
        known = sorted({f"{name['target']} on {name['topology']}" for name, _ in compiled})
        raise ValueError(f"{path} has no {target} on {chips}: it has {'; '.join(known)}")
    return found


def kind_of(drafter: str) -> str:
    """Returns what kind of drafter a name means: "head", "early exit", "lookup" or "model"."""
    if drafter == HEAD:
        return "head"
    return next((kind for kind in ("head", "early exit", "lookup") if kind in drafter), "model")
