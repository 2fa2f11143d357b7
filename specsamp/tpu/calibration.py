"""Turns work on a TPU into milliseconds, with numbers that are fitted on published measurements.

    milliseconds = max(streaming / efficiency, cycles) + exposed
                   + layer_sequences * sequence_us + calls * call_ms
    exposed      = max(0, collectives * collective_us + hops * hop_us + wire_ms
                          - overlap * streaming)

Two kinds of programs have been measured, and one set of numbers does not hold for both:

- **added**: programs of 2022 and 2023 on TPU v4. Collectives and streaming add up: the overlap is
  0. Fitted are the efficiency, the time of a call and the time of a hop.
- **hidden**: programs on TPU v5e, 24 steps of JAX of 2025 and one of PyTorch/XLA of 2023. Links and
  memory work side by side, so collectives cost only the time by which they outlast the streaming:
  the overlap is 1, no fitted number. Their time comes from profiler traces. Fitted are the
  efficiency, the time of a call, and the time of a layer's attention and cache update per sequence.
  Overlaps down to `least_overlap` explain the steps nearly as well, and the upper edge of a band
  takes that one. (One trace shows 40 of 67 us under attention and collectives; it is not used.)

This package compiles programs of today, and no step of such a program on v4 is published. So an
estimate for v5e comes from the second fit. For every other chip it is a **range between full
overlap and none**: from streaming and cycles alone to the sum of the first fit and v5e's time per
layer and sequence.

A band includes the worst step of the worst layout that was left out of the fit. Steps of
one layout err alike, so a new layout lies within with a chance of about n / (n + 1) after n
layouts: three in four for v5e.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from specsamp.tpu.measurements import Measurement, published
from specsamp.tpu.work import Work

HIDDEN_ON, ADDED_ON = "v5e", "v4"  # the chips of the two kinds of programs
SHARES = tuple(tenth / 10 for tenth in range(11))  # overlaps that are tried
# An overlap explains steps nearly as well as the best with at most so many times its error.
NEARLY = 1.25
FEWEST_STEPS = 4  # to check three numbers

# The factor of each number, and the milliseconds of its unit.
COLUMNS = {
    "efficiency": ("streaming_ms", 1.0),
    "call_ms": ("calls", 1.0),
    "sequence_us": ("layer_sequences", 1e-3),
    "collective_us": ("collectives", 1e-3),
    "hop_us": ("collective_hops", 1e-3),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Band:
    """An estimate in milliseconds; for its error see the module."""

    least: float
    likely: float
    most: float
    # Between full overlap and no overlap of collectives: ``likely`` is only the geometric mean.
    open: bool = False
    # The milliseconds in several scenarios, one of which is true: `band_ratio` compares two
    # programs within each.
    worlds: tuple[float, ...] = dataclasses.field(default=(), compare=False)

    def __truediv__(self, number: float) -> Band:
        values = {name: getattr(self, name) / number for name in ("least", "likely", "most")}
        return dataclasses.replace(
            self, **values, worlds=tuple(world / number for world in self.worlds)
        )

    def __str__(self) -> str:
        """Formats two digits: more are uncertain."""
        edges = f"{two_digits(self.least)} to {two_digits(self.most)}"
        return edges if self.open else f"{two_digits(self.likely)} ({edges})"

    def covers(self, milliseconds: float) -> bool:
        """Returns whether a measurement lies within."""
        return self.least <= milliseconds <= self.most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The numbers of the formula, and its error on layouts that were left out of the fit."""

    efficiency: float  # of streaming, at most 1
    call_ms: float
    sequence_us: float = 0.0
    collective_us: float = 0.0
    hop_us: float = 0.0
    overlap: float = 0.0  # share of the streaming that hides collectives
    # The least that explains the steps nearly as well; None: no other was tried.
    least_overlap: float | None = None
    error: float = 0.0  # of the logarithm: the worst of a step that was left out of the fit
    points: int = 0
    layouts: int = 0  # that were left out, one after another

    def milliseconds(self, *works: Work) -> float:
        """Estimates the time of calls, one after another."""
        return sum(map(self._call_ms, works))

    def _call_ms(self, work: Work) -> float:
        busy = max(work.streaming_ms / self.efficiency, work.cycles_ms)
        latencies_us = work.collectives * self.collective_us + work.collective_hops * self.hop_us
        exposed = max(0.0, latencies_us / 1e3 + work.wire_ms - self.overlap * work.streaming_ms)
        return (
            busy
            + exposed
            + work.layer_sequences * self.sequence_us / 1e3
            + work.calls * self.call_ms
        )

    def estimate(self, *works: Work) -> Band:
        """Estimates with a band: its least has no time per call, its most hides as few collectives
        as the steps allow.
        """
        shown = (
            self
            if self.least_overlap is None
            else dataclasses.replace(self, overlap=self.least_overlap)
        )
        least = self.milliseconds(*(dataclasses.replace(work, calls=0) for work in works))
        return Band(
            least=least * math.exp(-self.error),
            likely=self.milliseconds(*works),
            most=shown.milliseconds(*works) * math.exp(self.error),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrations:
    """The fits of the two kinds of programs; None where there were too few measurements."""

    added: Calibration | None
    hidden: Calibration | None
    # Nearly as good as ``hidden``: with other overlaps, and without each layout.
    nearly: tuple[Calibration, ...] = ()

    def estimate(self, chip: str, *works: Work) -> Band:
        """Estimates calls of a program of today, by the fit of its chip if there is one.

        Otherwise the band is the range between full overlap and none. Its three scenarios are: all
        hidden; all added; and the target's call, which comes first, hidden, but calls of a
        draft, with little time to hide under, added.

        Raises:
          ValueError: no measurement bounds the range from above.
        """
        if chip == HIDDEN_ON and self.hidden is not None:
            worlds = tuple(fit.milliseconds(*works) for fit in self.nearly)
            return dataclasses.replace(self.hidden.estimate(*works), worlds=worlds)
        if self.added is None:
            raise ValueError("no measurement bounds a step from above: give more rows")
        added = dataclasses.replace(
            self.added, sequence_us=self.hidden.sequence_us if self.hidden else 0.0
        )
        hidden = [max(work.streaming_ms, work.cycles_ms) for work in works]
        all_added = added.milliseconds(*works)
        least = sum(hidden)
        most = all_added * math.exp(added.error)
        worlds = least, all_added, hidden[0] + added.milliseconds(*works[1:])
        return Band(
            least=least, likely=math.sqrt(least * most), most=most, open=True, worlds=worlds
        )

    def of_row(self, row: Measurement) -> Band:
        """Estimates a measured step, as a program of its time."""
        if row.chip == ADDED_ON and row.date < "2024" and self.added is not None:
            return self.added.estimate(row.work())
        return self.estimate(row.chip, row.work())


def estimate(chip: str, *works: Work) -> Band:
    """Estimates calls by the published calibrations."""
    return fit_published().estimate(chip, *works)


def band_ratio(slow: Band, fast: Band) -> Band:
    """Returns by how much one program is faster than another of the same chip.

    Errors are mostly common to both, so the programs are compared within each scenario.
    """
    likely = slow.likely / fast.likely
    is_open = slow.open and fast.open
    ends = [a / b for a, b in zip(slow.worlds, fast.worlds, strict=True)]
    if not (ends and is_open):
        ends.append(likely)
    return Band(least=min(ends), likely=likely, most=max(ends), open=is_open)


def two_digits(number: float) -> str:
    """Formats two significant digits, without an exponent."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    decimals = 1 - math.floor(math.log10(abs(float(f"{number:.1e}"))))
    return f"{round(number, decimals):.{max(decimals, 0)}f}"


@functools.cache
def fit_published(rows: tuple[Measurement, ...] | None = None) -> Calibrations:
    """Fits both kinds of programs on published rows, each with its error on layouts that were left
    out.
    """
    rows = published() if rows is None else rows
    (added, _), (hidden, nearly) = (_with_error(chip, rows) for chip in (ADDED_ON, HIDDEN_ON))
    return Calibrations(added=added, hidden=hidden, nearly=nearly)


def held_out(by: str) -> list[tuple[Measurement, Band]]:
    """Returns every published step with its band from fits without the rows of its layout or of its
    source.

    Args:
      by: "layout" or "source".
    """
    rows = published()
    found = []
    for name in sorted({getattr(row, by) for row in rows}):
        fits = fit_published(tuple(row for row in rows if getattr(row, by) != name))
        found += [
            (row, fits.of_row(row))
            for row in rows
            if getattr(row, by) == name and row.kind == "step"
        ]
    return found


def steps_on(chip: str, rows: Sequence[Measurement]) -> list[Measurement]:
    """Returns the measured steps of a chip."""
    return [row for row in rows if row.kind == "step" and row.chip == chip]


def fits_on(chip: str, rows: Sequence[Measurement]) -> list[Calibration]:
    """Fits the steps of TPU v4 as sums, of v5e for each overlap; none with too few steps or traced
    collectives.
    """
    steps = steps_on(chip, rows)
    base = Calibration(efficiency=1, call_ms=0, points=len(steps))
    if len(steps) < FEWEST_STEPS:
        return []
    if chip == ADDED_ON:
        return [fit(base, steps, "efficiency", "call_ms", "hop_us")]
    traces = [row for row in rows if row.kind == "collective"]
    if len({row.work().collective_hops for row in traces}) < 2:
        return []
    base = fit(base, traces, "collective_us", "hop_us")
    return [
        fit(dataclasses.replace(base, overlap=share), steps, "call_ms", "sequence_us", "efficiency")
        for share in SHARES
    ]


def _with_error(
    chip: str, rows: Sequence[Measurement]
) -> tuple[Calibration | None, tuple[Calibration, ...]]:
    """Returns the fit of a chip with its worst error on a layout that was left out, and the fits
    nearly as good: their root mean square of relative errors on steps is at most `NEARLY` times the
    least.
    """
    fits = fits_on(chip, rows)
    steps = steps_on(chip, rows)
    without = []
    errors = []
    for layout in sorted({row.layout for row in steps}):
        if rest := fits_on(chip, [row for row in rows if row.layout != layout]):
            without.append(rest[-1])
            errors += [
                abs(math.log(rest[-1].milliseconds(row.work()) / row.milliseconds))
                for row in steps
                if row.layout == layout
            ]
    if not fits or not errors:
        return None, ()
    off_FN = [
        [one.milliseconds(row.work()) / row.milliseconds - 1 for row in steps] for one in fits
    ]
    spread_F = np.sqrt(np.square(off_FN).mean(axis=1))
    nearly = [fits[i] for i in np.flatnonzero(spread_F <= NEARLY * spread_F.min() + 1e-9)]
    best = dataclasses.replace(
        fits[-1], least_overlap=nearly[0].overlap, error=max(errors), layouts=len(without)
    )
    return best, (*nearly, *without)


def fit(base: Calibration, rows: Sequence[Measurement], *names: str) -> Calibration:
    """Fits the named numbers by relative errors; all other numbers are of ``base``, and none is
    negative.

    Numbers of collectives are fitted without overlap, or on works that stream nothing: there
    collectives show whole.
    """
    bare = dataclasses.replace(base, **{name: 0.0 for name in names if name != "efficiency"})
    works = [row.work() for row in rows]
    times_N = np.array([row.milliseconds for row in rows])
    known_N = np.array([bare.milliseconds(work) for work in works])
    factors_NX = np.array(
        [[getattr(work, COLUMNS[name][0]) * COLUMNS[name][1] for name in names] for work in works]
    )
    solved_X, _ = nnls(factors_NX / times_N[:, None], (times_N - known_N) / times_N)
    found = dict(zip(names, solved_X.tolist()))
    if "efficiency" in found:  # streaming takes so much longer
        found["efficiency"] = base.efficiency / (1 + found["efficiency"])
    return dataclasses.replace(base, **found)
