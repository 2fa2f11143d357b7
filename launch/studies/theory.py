"""Compares measured speedups with what theory allows, for the cells of one distribution."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from specsamp.analysis.benchmark import Result
from specsamp.analysis.grid import Cell
from specsamp.analysis.report import Table
from specsamp.analysis.tables import quartiles
from specsamp.analysis.timing import Quartiles
from specsamp.decoding.results import RowStats


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseCosts:
    """Milliseconds of the parts of a round."""

    target_step: float  # one whole autoregressive round
    draft_call: float  # one call of the draft, without drawing
    score: float  # K+1 tokens
    least_round: float  # (K draft_call + score) / target_step, taken within a repeat
    draws_and_verdict: float  # drawing the draft, verification, bookkeeping
    streaming_share: float  # plain products over the target's matrices / target_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One rule at one draft length."""

    rule: str
    draft_length: int
    speedup: Quartiles  # over prompts
    overall: float  # seconds over seconds, all prompts together
    ms_per_token: Quartiles
    acceptance: RowStats
    costs: PhaseCosts
    allowed: float  # by theory, from the acceptance rate and the costs
    efficiency: float  # overall / allowed
    efficiency_of_rounds: float  # the same with the measured tokens per round


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedupCurve:
    """All rules and draft lengths with one distribution."""

    ms_per_token: Quartiles  # autoregressive, over the cells
    points: tuple[Point, ...]
    prompts: int  # decoded by each side of each cell, passes included
    same_tokens: int | None  # of them, prompts on which both sides wrote the same in every cell; None if sampled

    def best(self, rule: str) -> Point:
        """Returns the point of a rule with the largest speedup."""
        return max((p for p in self.points if p.rule == rule), key=lambda p: p.speedup.median)


def curve_of(measured: Sequence[tuple[Cell, Result]], deterministic: bool) -> SpeedupCurve:
    """Compares the cells of one distribution with what theory allows.

    Raises:
      ValueError: the phases of a round were not timed.
    """
    return SpeedupCurve(
        ms_per_token=Quartiles.of([result.autoregressive.ms_per_token.median for _, result in measured]),
        points=tuple(point_of(cell.key["rule"], result) for cell, result in measured),
        prompts=measured[0][0].workload.repeats,
        same_tokens=min(result.same_tokens for _, result in measured) if deterministic else None,
    )


def point_of(rule: str, result: Result) -> Point:
    split, allowed = result.split, result.allowed_speedup
    if split is None or allowed is None:
        raise ValueError("the phases of a round were not timed, so theory has no costs: see JAX_DISABLE_JIT, or memory")
    return Point(
        rule=rule,
        draft_length=result.speculative.draft_length,
        speedup=result.speedup,
        overall=result.overall_speedup,
        ms_per_token=result.speculative.ms_per_token,
        acceptance=result.acceptance,
        costs=PhaseCosts(
            target_step=split.step.ms.median,
            draft_call=split.draft_model.ms.median / result.speculative.draft_length,
            score=split.score.ms.median,
            least_round=split.least_round.median,
            draws_and_verdict=split.draft_sampling.median + split.verify.ms.median + split.commit.ms.median,
            streaming_share=split.stream_step.ms.median / split.step.ms.median,
        ),
        allowed=allowed,
        efficiency=result.overall_speedup / allowed,
        efficiency_of_rounds=result.overall_speedup * split.least_round.median / result.acceptance.emitted_per_round,
    )


def curve_table(name: str, curve: SpeedupCurve) -> Table:
    """Returns a table of one row per rule and draft length; the best of each rule is starred."""
    best = {point.rule: curve.best(point.rule) for point in curve.points}

    def row(point: Point) -> tuple[str, ...]:
        costs, counts = point.costs, point.acceptance
        return (
            f"{point.rule}, K = {point.draft_length}{' *' if point is best[point.rule] else ''}",
            quartiles(point.ms_per_token),
            quartiles(point.speedup, "x"),
            f"{counts.acceptance_rate if sum(counts.reached) else 0:.3f}",
            f"{counts.emitted_per_round:.2f}",
            f"{costs.draft_call / costs.target_step:.3f}",
            f"{costs.score / costs.target_step:.2f}",
            f"{point.allowed:.2f}x",
            f"{point.efficiency:.0%}",
            f"{point.efficiency_of_rounds:.0%}",
        )

    same = "" if curve.same_tokens is None else f"; the same tokens on {curve.same_tokens} of {curve.prompts} prompts"
    return Table(
        title=f"{name}: autoregressive {quartiles(curve.ms_per_token)} ms per token{same}",
        header=(
            "",
            "ms per token",
            "speedup",
            "acceptance",
            "per round",
            "draft call",
            "scoring",
            "allowed",
            "reached",
            "by rounds",
        ),
        rows=[row(point) for point in curve.points],
        note="median over prompts ± half the interquartile range; draft call and scoring in steps of the target; allowed "
        "by the measured acceptance rate and costs, and how much of it is reached, also with the measured tokens per round "
        "in place of the rate; * is best",
    )
