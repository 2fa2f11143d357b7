"""Milliseconds and tables of the answers of the study compile."""

import math

from launch.lib.study import Document, answers
from specsamp.analysis.acceptance import expected_tokens
from specsamp.analysis.report import Table
from specsamp.tpu.calibration import Band, band_ratio, estimate
from specsamp.tpu.pair_report import GIB, Report, faster, lower_bound
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
PUBLIC_PAIRS = {
    "qwen_3b": "Qwen2.5 3B + 0.5B, bfloat16",
    "qwen_30b_a3b": "Qwen3 30B-A3B + 0.6B, bfloat16",
    "llama_70b": "Llama 3.1 70B + 3.2 1B, bfloat16",
    "llama_70b_int8": "Llama 3.1 70B + 3.2 1B, int8 weights",
}


def estimated(facts: Document, topology: str, draft_step: Document | None = None) -> Band:
    """Returns the calibrated milliseconds of a program; one with a draft step is a round."""
    work = Work(**facts["work"])
    calls = (work,) if draft_step is None else calls_of_round(work, Work(**draft_step["work"]), K)
    return estimate(topology.partition(":")[0], *calls)


def forecast(document: Document, topology: str, batch: int) -> tuple[Band, Band]:
    """Returns milliseconds per token of the paper's pair, alone and drafting: acceptance 0.8, top-p, token rule, K = 4."""
    programs = {tuple(name.values()): answer["programs"] for name, answer in answers(document)}[topology, batch]
    drafted = estimated(programs["round, top-p, token"], topology, programs["draft step"])
    return estimated(programs["target step"], topology) / batch, drafted / EMITTED / batch


def bounds(programs: Document, *names: str) -> dict[str, str]:
    """Returns a column for each program: its lower bound in milliseconds, of streaming and cycles."""
    known = {name: programs[name] for name in names}
    return {
        f"{name.split(',')[0]}, at least": lower_bound(each["streaming_ms"], each["cycles_ms"])
        for name, each in known.items()
    }


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


def trees(document: Document) -> Table:
    """Returns the parts of a round of a token tree, beside those of the chain of its depth."""
    rows = []
    for name, answer in answers(document):
        for program, facts in answer["programs"].items():
            times = {
                column: f"{facts[field]:.2f}"
                for column, field in (("streaming", "streaming_ms"), ("cycles", "cycles_ms"))
            }
            rows.append(dict(name) | {"depth": answer["depth"], "program": program} | times)
    return Table.of("Parts of a tree's round, ms (compiler estimate)", rows, left=2)


def slices(document: Document) -> Table:
    """Returns the paper's pair on four slices, by batch."""
    rows = []
    for name, answer in answers(document):
        (topology, batch), programs = name.values(), answer["programs"]
        row, drafted = {"chips": topology, "batch": batch}, programs["round, top-p, token"]
        if not drafted["fits"]:
            rows.append(row | {"memory, GiB": f"does not fit: {drafted['why']}"})
            continue
        alone, together = forecast(document, topology, batch)
        row |= {
            "memory, GiB": f"{drafted['memory_bytes'] / GIB:.1f} of {parse(topology)[0].hbm_bytes / GIB:.0f}",
            **bounds(programs, "target step", "score", "round, top-p, token"),
            "step, over the floor": f"{programs['target step']['over_floor']:.2f}",
            "scoring, over the floor": f"{programs['score']['over_floor']:.2f}",
            "alone, ms per token": alone,
            "with the draft": together,
            "speedup": faster(band_ratio(alone, together)),
        }
        rows.append(row)
    return Table.of("The paper's pair (compiler estimate)", rows)


def public_pairs(*documents: Document) -> Table:
    """Returns public pairs on TPU v5e, in the order of `PUBLIC_PAIRS`."""
    rows = []
    for label, document in zip(PUBLIC_PAIRS.values(), documents, strict=True):
        report = Report.from_json(document["report"])
        memory, K = report["round"].memory, report.draft_length
        alone, drafted = report.calibrated_ms("target step"), report.calibrated_ms("round")
        emitted = expected_tokens(0.8, K)
        row = {
            "": label,
            "K": K,
            "batch": report.batch,
            "chips": f"{math.prod(parse(report.topology)[1])} v5e",
            "memory, GiB": f"{memory.total / GIB:.1f} of {memory.capacity / GIB:.0f}",
            **{
                f"{name}, at least": lower_bound(
                    report[name].streaming_ms(report.chip), report[name].cycles_ms(report.chip)
                )
                for name in ("target step", "round")
            },
            "step, over the floor": f"{report['target step'].over_floor:.3f}",
            "scoring, over the floor": f"{report['score'].over_floor:.3f}",
            "a step, ms": alone,
            "a round, ms": drafted,
            "ms per token at acceptance 0.8": drafted / emitted / report.batch,
            "speedup": faster(band_ratio(alone, drafted / emitted)),
        }
        rows.append(row)
    return Table.of("Public pairs on TPU v5e (compiler estimate)", rows)


def heads(document: Document) -> Table:
    """Returns the costs of drafts and rounds with a head or an early exit, next to a draft model."""
    rows = []
    for name, answer in answers(document):
        topology, programs = name["topology"], answer["programs"]
        serial = {program: round(sum(facts["collectives"].values())) for program, facts in programs.items()}
        whole = estimated(programs["round"], topology, programs["draft step"])
        row = {
            **dict(zip(("target", "chips", "drafter"), name.values(), strict=True)),
            **bounds(programs, "target step", "score", "draft step", "round"),
            "scoring, over the floor": f"{programs['score']['over_floor']:.3f}",
            "a draft step, over the floor": f"{programs['draft step']['over_floor']:.3f}",
            "a round, over the floors of its calls": f"{programs['round']['over_floor']:.3f}",
            "serial collectives of a draft step": serial["draft step"],
            "of a round": serial["round"],
            "a draft step, ms": estimated(programs["draft step"], topology),
            "a round, ms": whole,
            "a round, over a step of the target": faster(
                band_ratio(whole, estimated(programs["target step"], topology))
            ),
        }
        rows.append(row)
    return Table.of("What drafts (compiler estimate)", rows, left=3)
