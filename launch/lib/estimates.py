"""Reads milliseconds from the answers of the study compile: of programs, of the paper's pair, and of rounds by K."""

from __future__ import annotations

from launch.lib.study import Document, answers
from specsamp.tpu.calibration import Band, estimate
from specsamp.tpu.work import Work, calls_of_round

K = 4
EMITTED = sum(0.8**i for i in range(K + 1))  # tokens of a round at an acceptance rate of 0.8


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
