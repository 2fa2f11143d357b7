"""Holds what launch/studies/adaptive.py measures in a setting, and makes its table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from launch.studies.results_tables import Documents, table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One setting: milliseconds per token, counted and by the clock."""

    drafter: str
    kind: str  # of texts
    batch: int
    lengths: tuple[int, ...]
    costs_ms: tuple[float, ...]
    usual: int  # as it was calibrated, on other texts
    acceptance: float
    counted_fixed: tuple[float, ...]  # by length
    counted_adaptive: float
    counted_oracle: float
    clock_plain: float
    clock_adaptive: float
    loss: float  # of time against plain decoding, by the clock; a gain is negative
    loss_upper: float  # of its 95% interval, from below
    rounds_by_drafted: tuple[int, ...]

    @property
    def best_fixed(self) -> float:
        return min(self.counted_fixed)


HEADER = ("", "plain", "best fixed", "adaptive", "oracle", "best K", "over plain", "over best", "by the clock")
NOTE = (
    "ms per token, counted; then time of adaptive lengths over plain decoding and over the best fixed length, counted; and "
    "over plain decoding by the clock, with the upper end of its 95% interval"
)


def rows_of(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """Returns a row of text for each setting."""

    def row(one: Point) -> tuple[str, ...]:
        best = one.lengths[int(np.argmin(one.counted_fixed))]
        counted = (one.counted_fixed[0], one.best_fixed, one.counted_adaptive, one.counted_oracle)
        return (
            f"{one.drafter}, {one.kind} texts, batch {one.batch}",
            *(f"{ms:.3g}" for ms in counted),
            f"{best}",
            f"{one.counted_adaptive / one.counted_fixed[0] - 1:+.1%}",
            f"{one.counted_adaptive / one.best_fixed - 1:+.1%}",
            f"{one.loss:+.1%} (at most {one.loss_upper:+.1%})",
        )

    return [row(one) for one in points]


def section(documents: Documents) -> str:
    """Returns the table of the committed measurement."""
    return table(HEADER, rows_of([Point(**fields) for fields in documents["python_adaptive"]["points"]]))
