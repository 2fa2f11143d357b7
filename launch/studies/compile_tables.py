"""Milliseconds and tables of the answers of the study compile."""

import operator

from launch.lib.study import Document, answers
from specsamp.analysis.acceptance import expected_tokens
from specsamp.analysis.report import Table
from specsamp.tpu.calibration import Band, band_ratio, estimate
from specsamp.tpu.pair_report import GIB, faster, lower_bound
from specsamp.tpu.topology import parse
from specsamp.tpu.work import Work, calls_of_round

K = 4
EMITTED = expected_tokens(0.8, K)  # tokens of a round at an acceptance rate of 0.8
NUMBERS = {  # columns of programs: field, unit and format
    "lower bound, ms": ("lower_bound_ms", 1, ".2f"),
    "streaming": ("streaming_ms", 1, ".2f"),
    "cycles": ("cycles_ms", 1, ".2f"),
    "memory, GiB": ("memory_bytes", GIB, ".1f"),
    "traffic, GB": ("hbm_bytes", 1e9, ".2f"),
    "over the floor": ("over_floor", 1, ".3f"),
    "alive, GB": ("live_hbm_bytes", 1e9, ".2f"),
}


def estimated(facts: Document, topology: str, draft_step: Document | None = None) -> Band:
    """Returns the calibrated milliseconds of a program; one with a draft step is a round."""
    work = Work(**facts["work"])
    calls = (work,) if draft_step is None else calls_of_round(work, Work(**draft_step["work"]))
    return estimate(topology.partition(":")[0], *calls)


def forecast(document: Document, topology: str, batch: int) -> tuple[Band, Band]:
    """Returns milliseconds per token of the paper's pair, alone and drafting: acceptance 0.8, top-p, token rule, K = 4."""
    programs = {tuple(name.values()): answer["programs"] for name, answer in answers(document)}[topology, batch]
    drafted = estimated(programs["round, top-p, token"], topology, programs["draft step"])
    return estimated(programs["target step"], topology) / batch, drafted / EMITTED / batch


def programs(document: Document) -> Table:
    """Returns a row for each program of each cell; kernels also have the traffic of the live slots alone."""
    rows = []
    for name, answer in answers(document):
        for program, facts in answer.get("programs", {"": answer}).items():
            row = dict(name) | ({"program": program} if program else {})
            if facts["fits"]:
                facts = facts | {"lower_bound_ms": max(facts["streaming_ms"], facts["cycles_ms"])}
            known = {column: number for column, number in NUMBERS.items() if number[0] in facts}
            row |= {column: f"{facts[field] / unit:{form}}" for column, (field, unit, form) in known.items()}
            rows.append(row if facts["fits"] else row | {"memory, GiB": "does not fit"})
    return Table.of("Programs (compiler estimate)", rows, left=2)


def heads(document: Document) -> Table:
    """Returns a row for each pair that fits: lower bounds of calls and rounds, and what a round takes, in steps of the target."""
    rows = []
    for name, answer in answers(document):
        programs, topology = answer["programs"], name["topology"]
        if not all(facts["fits"] for facts in programs.values()):
            continue
        ms = {each: max(facts["streaming_ms"], facts["cycles_ms"]) for each, facts in programs.items()}
        ms["target step"] = min(ms["target step"], ms["score"])  # more tokens can be faster
        row = dict(name) | {f"{each}, ms": f"{ms[each]:.2f}" for each in ("target step", "draft step")}
        for each in (each for each in programs if each.startswith("round")):
            row[f"{each}, ms (steps)"] = f"{ms[each]:.2f} ({ms[each] / ms['target step']:.2f})"
        step = estimated(programs["target step"], topology)
        drafted = estimated(programs["round, K = 4"], topology, programs["draft step"])
        rows.append(row | {"calibrated, K = 4, steps": faster(band_ratio(drafted, step)).replace("x", "")})
    return Table.of("Rounds of heads (compiler estimate; lower bounds)", rows, left=3)


def slices(document: Document) -> Table:
    """Returns the paper's pair on four slices, by batch."""
    rows = []
    for name, answer in answers(document):
        (topology, batch), programs = name.values(), answer["programs"]
        calls = {"target step": "target step", "score": "score", "round": "round, top-p, token"}
        times = operator.itemgetter("streaming_ms", "cycles_ms")
        row, drafted = {"chips": topology, "batch": batch}, programs["round, top-p, token"]
        if not drafted["fits"]:
            rows.append(row | {"memory, GiB": f"does not fit: {drafted['why']}"})
            continue
        alone, together = forecast(document, topology, batch)
        row |= {
            "memory, GiB": f"{drafted['memory_bytes'] / GIB:.1f} of {parse(topology)[0].hbm_bytes / GIB:.0f}",
            **{f"{name}, at least": lower_bound(*times(programs[each])) for name, each in calls.items()},
            "step, over the floor": f"{programs['target step']['over_floor']:.2f}",
            "scoring, over the floor": f"{programs['score']['over_floor']:.2f}",
            "alone, ms per token": alone,
            "with the draft": together,
            "speedup": faster(band_ratio(alone, together)),
        }
        rows.append(row)
    return Table.of("The paper's pair (compiler estimate)", rows)
