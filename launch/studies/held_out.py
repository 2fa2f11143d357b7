"""Predicts published measurements from the others: each layout and each source left out of the fits once.

backtest.py writes what is found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from specsamp.tpu.calibration import Band, Calibrations, calibrate
from specsamp.tpu.measurements import Measurement, published

LLAMA_70B = "meta-llama/Llama-3.1-70B"
COVERED = 0.9  # of the rows, what bands are measured by


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """A measurement beside its forecast."""

    name: str
    source: str
    kind: str
    layout: str
    left_out: str  # "layout", "source" or "kind": what of the row's own was not fitted
    measured_ms: float
    forecast: Band

    @property
    def error(self) -> float:
        """The relative error of the likely value."""
        return self.forecast.likely / self.measured_ms - 1

    @property
    def covered(self) -> bool:
        """Returns whether the band holds the measurement."""
        return self.forecast.covers(self.measured_ms)


def held_out(by: str, rows: Sequence[Measurement] | None = None) -> list[Check]:
    """Predicts every step, and its band, from fits without the rows of its layout or of its source.

    Args:
      by: "layout" or "source".
    """
    rows, checks = published() if rows is None else tuple(rows), []
    for name in sorted({getattr(row, by) for row in rows}):
        left = [row for row in rows if getattr(row, by) == name and row.kind == "step"]
        if left:
            fits = calibrate(tuple(row for row in rows if getattr(row, by) != name))
            checks += [_check(row, fits, by) for row in left]
    return checks


def unfitted() -> list[Check]:
    """Compares the rows that are fitted nowhere: served, launched call by call, rounds, experts, ..."""
    rows = [row for row in published() if row.kind not in ("step", "collective")]
    return [_check(row, calibrate(), "kind") for row in rows]


def _check(row: Measurement, fits: Calibrations, left_out: str) -> Check:
    return Check(
        name=row.name,
        source=row.source,
        kind=row.kind,
        layout=row.layout,
        left_out=left_out,
        measured_ms=row.milliseconds,
        forecast=fits.of_row(row),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """Says how forecasts of some rows did."""

    rows: int
    median_error: float | None  # None: forecasts are ranges, whose middle is no value
    worst_error: float | None
    covered: int
    factor: float  # by which the edges would have to move out to cover nine of ten; 1 where they do


def summary(checks: Iterable[Check]) -> Summary:
    """Counts how many bands hold their measurement, and how much wider they would have to be."""
    checks = list(checks)
    errors = [abs(check.error) for check in checks if not check.forecast.open]
    beyond = [
        max(0.0, math.log(c.measured_ms / c.forecast.most), math.log(c.forecast.least / c.measured_ms)) for c in checks
    ]
    return Summary(
        rows=len(checks),
        median_error=float(np.median(errors)) if len(errors) == len(checks) else None,
        worst_error=max(errors) if len(errors) == len(checks) else None,
        covered=sum(check.covered for check in checks),
        factor=math.exp(sorted(beyond)[math.ceil(COVERED * len(beyond)) - 1]),
    )


def summaries() -> dict[str, Summary]:
    """Sums up both ways of leaving out, the 24 rows of Llama 3.1 70B on v5e-16, and each kind that is not fitted."""
    layouts, sources, others = held_out("layout"), held_out("source"), unfitted()
    parts = {
        "Llama 3.1 70B on v5e-16, its layout left out": [c for c in layouts if c.name.startswith(LLAMA_70B)],
        "v4, layout left out": [c for c in layouts if c.layout.startswith("v4 ")],
        "v4, source left out": [c for c in sources if c.layout.startswith("v4 ")],
        "all steps, layout left out": layouts,
        "all steps, source left out, where fits remain": [c for c in sources if not c.forecast.open],
        "all steps, source left out, where only a range remains": [c for c in sources if c.forecast.open],
    }
    parts |= {
        f"not fitted: {kind}": [c for c in others if c.kind == kind] for kind in dict.fromkeys(c.kind for c in others)
    }
    return {name: summary(part) for name, part in parts.items()}
