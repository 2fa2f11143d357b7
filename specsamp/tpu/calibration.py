"""Turns work on a TPU into milliseconds, with numbers that are fitted on published measurements.

    milliseconds = max(streaming / efficiency, cycles) + exposed + layer_sequences * sequence_us + calls * call_ms
    exposed      = max(0, collectives * collective_us + hops * hop_us + wire * wire_ms - overlap * streaming)

Two kinds of programs have been measured, and one set of numbers does not hold for both:

- **added**: programs of 2022 and 2023 on TPU v4. Collectives and streaming add up: the overlap is 0. Fitted are the
  efficiency, the fixed time of a call and the time of a hop.
- **hidden**: programs on TPU v5e, 24 steps of JAX of 2025 and one of PyTorch/XLA of 2023. Links and memory work side by
  side: at every collective between layers of our own compiled steps but the first of one of them more weights are in
  flight than arrive while it runs (`python launch/study.py backtest --compile`). So collectives show only as far as they outlast the streaming: the overlap is 1,
  no fitted number. Their time comes from profiler traces. Fitted are the efficiency, the fixed time of a call, and the
  time of a layer's attention and cache update per sequence. Smaller overlaps explain the steps nearly as well, down to
  `least_overlap`: the upper edge of a band takes that one. (A trace of one of the programs shows 40 of the 67 us that
  a layer's weights need under attention and collectives; it is not used, because the backtest predicts its layout.)

Generation and software are confounded: nobody has published a step of a program of today on v4. What this package
compiles is a program of today. So an estimate for v5e comes from the second fit, and for every other chip, v4 among
them, it is a **band from all hidden to all added**: from nothing but streaming and cycles to the sum of the first fit
and v5e's time per layer and sequence, for which the first fit has no number.

A band reaches as far as the worst step of the worst layout that was left out of the fit. Steps of one layout err
alike, so layouts count and not steps: if a new layout is like the n that were left out, it lies within with a chance
of about n / (n + 1) (as in the jackknife of Barber et al., 2021, without its guarantee): three in four for the three of
v5e. `launch/study.py backtest` counts what bands hold.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import nnls

from specsamp.tpu.measurements import Measurement, published
from specsamp.tpu.work import Work

HIDDEN_ON, ADDED_ON = "v5e", "v4"  # the chips of the two kinds of programs
SHARES = tuple(tenth / 10 for tenth in range(11))  # of the streaming that hides collectives: those that are tried
NEARLY = 1.25  # an overlap explains steps nearly as well as the best with at most so many times its error
# Chen et al., Figure 1, read off to about 2%: a round at K = 1 .. 7, in milliseconds. Not fitted: a check.
ROUNDS_MS = {1: 16.3, 2: 18.2, 3: 20.3, 4: 22.8, 5: 25.0, 6: 27.1, 7: 28.5}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Band:
    """An estimate in milliseconds; the module says what it may be trusted for."""

    least: float
    likely: float
    most: float
    open: bool = False  # from all hidden to all added: ``likely`` is their geometric mean, and no measurement
    # The same calls in several worlds, of which one is true: two programs are compared within each, see `ratio`.
    worlds: tuple[float, ...] = dataclasses.field(default=(), compare=False)

    def __truediv__(self, number: float) -> Band:
        values = {name: getattr(self, name) / number for name in ("least", "likely", "most")}
        return dataclasses.replace(self, **values, worlds=tuple(world / number for world in self.worlds))

    def __str__(self) -> str:
        """Formats two digits: no more are known."""
        edges = f"{two_digits(self.least)} to {two_digits(self.most)}"
        return edges if self.open else f"{two_digits(self.likely)} ({edges})"

    def covers(self, milliseconds: float) -> bool:
        """Returns whether a measurement lies within."""
        return self.least <= milliseconds <= self.most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The numbers of the formula, and how far off it was where it had not been fitted."""

    efficiency: float  # of streaming, at most 1
    call_ms: float
    sequence_us: float = 0.0
    collective_us: float = 0.0
    hop_us: float = 0.0
    wire: float = 1.0  # time of the bytes over the links, over that of the data sheet
    overlap: float = 0.0  # share of the streaming that hides collectives
    least_overlap: float | None = None  # the least that explains the steps nearly as well; None: no other was tried
    error: float = math.nan  # of the logarithm: the worst where its layout was left out of the fit
    points: int = 0
    layouts: int = 0  # that were left out, one after another

    def milliseconds(self, *works: Work) -> float:
        """Estimates the time of calls, one after another."""
        return sum(map(self._call_ms, works))

    def _call_ms(self, work: Work) -> float:
        busy = max(work.streaming_ms / self.efficiency, work.cycles_ms)
        exposed = max(0.0, self._collectives_ms(work) - self.overlap * work.streaming_ms)
        return busy + exposed + work.layer_sequences * self.sequence_us / 1e3 + work.calls * self.call_ms

    def estimate(self, *works: Work) -> Band:
        """Estimates with a band.

        Its lower edge has no fixed time per call, as a loop may be one program; its upper edge hides as little of the
        collectives as the steps allow.
        """
        shown = self if self.least_overlap is None else dataclasses.replace(self, overlap=self.least_overlap)
        least = self.milliseconds(*(dataclasses.replace(work, calls=0) for work in works))
        return Band(
            least=least * math.exp(-self.error),
            likely=self.milliseconds(*works),
            most=shown.milliseconds(*works) * math.exp(self.error),
        )

    def _collectives_ms(self, work: Work) -> float:
        latencies_us = work.collectives * self.collective_us + work.collective_hops * self.hop_us
        return latencies_us / 1e3 + self.wire * work.wire_ms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrations:
    """The fits of the two kinds of programs; None where there were too few measurements."""

    added: Calibration | None
    hidden: Calibration | None

    def estimate(self, chip: str, *works: Work) -> Band:
        """Estimates calls of a program of today: by the fit of its chip, else from all hidden to all added."""
        if chip == HIDDEN_ON and self.hidden is not None:
            return self.hidden.estimate(*works)
        return self.open_band(*works)

    def open_band(self, *works: Work) -> Band:
        """Returns the band from nothing but streaming and cycles to the sum of everything, and their geometric mean.

        In the sum are v4's collectives, efficiency and calls, and v5e's time per layer and sequence. The worlds are: all
        hidden; all added; and the target's call hidden, but a draft's, which have little to hide under, added.

        Args:
          works: of the calls; the first is the target's, the others are a draft's.

        Raises:
          ValueError: nothing was measured that could bound it from above.
        """
        if self.added is None:
            raise ValueError("no measurement bounds a step from above: give a calibration of these devices")
        per_sequence = self.hidden.sequence_us if self.hidden else 0.0
        added = dataclasses.replace(self.added, sequence_us=per_sequence)
        hidden = [max(work.streaming_ms, work.cycles_ms) for work in works]
        least, most = sum(hidden), added.milliseconds(*works) * math.exp(added.error)
        worlds = least, added.milliseconds(*works), hidden[0] + added.milliseconds(*works[1:])
        return Band(least=least, likely=math.sqrt(least * most), most=most, open=True, worlds=worlds)

    def of_row(self, row: Measurement) -> Band:
        """Estimates a measured step, as a program of its time."""
        if row.chip == ADDED_ON and row.date < "2024" and self.added is not None:
            return self.added.estimate(row.work())
        return self.estimate(row.chip, row.work())


def estimate(chip: str, *works: Work, own: Calibration | None = None) -> Band:
    """Estimates calls of a program of today, by a calibration of the devices themselves or else by the published ones."""
    if own:
        return own.estimate(*works)
    band = calibrate().estimate(chip, *works)
    if band.open:
        return band
    return dataclasses.replace(band, worlds=tuple(fit.milliseconds(*works) for fit in alternatives()))


@functools.cache
def alternatives() -> tuple[Calibration, ...]:
    """Returns the fits of v5e's steps that are nearly as good: with other overlaps, and without each layout."""
    rows = published()
    steps = _steps(rows, HIDDEN_ON)
    without = [fit_hidden([row for row in rows if row.layout != one]) for one in sorted({row.layout for row in steps})]
    nearly = nearly_best(fits_by_overlap(rows), [(row.work(), row.milliseconds) for row in steps])
    return (*nearly, *(fit for fit in without if fit is not None))


def ratio(slow: Band, fast: Band) -> Band:
    """Returns by how much one program is faster than another of the same chip.

    Errors are mostly common to both, so they are compared within each of the worlds: from the least to the most. No
    published speedup of a pair is in a fit; those of Chen et al. on TPU v4 lie within (tests/tpu/test_calibration.py).
    """
    likely = slow.likely / fast.likely
    ends = [a / b for a, b in zip(slow.worlds, fast.worlds, strict=True)] or [likely]
    is_open = slow.open and fast.open
    ends += [] if is_open else [likely]
    return Band(least=min(ends), likely=likely, most=max(ends), open=is_open)


def two_digits(number: float) -> str:
    """Formats two significant digits, without an exponent."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    decimals = 1 - math.floor(math.log10(abs(float(f"{number:.1e}"))))
    return f"{round(number, decimals):.{max(decimals, 0)}f}"


@functools.cache
def calibrate(rows: tuple[Measurement, ...] | None = None) -> Calibrations:
    """Fits both kinds of programs on published rows, each with its error on layouts that were left out."""
    rows = published() if rows is None else rows
    return Calibrations(added=_with_error(fit_added, rows), hidden=_with_error(fit_hidden, rows))


def held_out(by: str) -> list[tuple[Measurement, Band]]:
    """Returns every published step with its band from fits without the rows of its layout or of its source.

    Args:
      by: "layout" or "source".
    """
    rows, found = published(), []
    for name in sorted({getattr(row, by) for row in rows}):
        fits = calibrate(tuple(row for row in rows if getattr(row, by) != name))
        left = [row for row in rows if getattr(row, by) == name and row.kind == "step"]
        found += [(row, fits.of_row(row)) for row in left]
    return found


def fit_added(rows: Sequence[Measurement]) -> Calibration | None:
    """Fits the sum on the steps of TPU v4; None with fewer rows than would check three numbers."""
    steps = _steps(rows, ADDED_ON)
    if len(steps) < 4:
        return None
    works = [row.work() for row in steps]
    known = [work.streaming_ms + work.wire_ms for work in works]
    columns = [[work.streaming_ms, 1.0, work.collective_hops / 1e3] for work in works]
    slower, call_ms, hop_us = least_squares([row.milliseconds for row in steps], known, columns)
    return Calibration(efficiency=1 / (1 + slower), call_ms=call_ms, hop_us=hop_us, points=len(steps))


def fit_hidden(rows: Sequence[Measurement]) -> Calibration | None:
    """Fits the steps of TPU v5e, given traced collectives; None with too few of either.

    Collectives are hidden as far as the streaming lasts; other overlaps say which is the least that the steps allow.
    """
    fits = fits_by_overlap(rows)
    if not fits:
        return None
    pairs = [(row.work(), row.milliseconds) for row in _steps(rows, HIDDEN_ON)]
    return dataclasses.replace(fits[-1], least_overlap=nearly_best(fits, pairs)[0].overlap)


def fits_by_overlap(rows: Sequence[Measurement]) -> list[Calibration]:
    """Fits the steps of TPU v5e with each of `SHARES`; none with too few steps or traced collectives."""
    steps, traces = _steps(rows, HIDDEN_ON), [row for row in rows if row.kind == "collective"]
    if len(steps) < 4 or len({row.work().collective_hops for row in traces}) < 2:
        return []
    works = [trace.work() for trace in traces]
    columns = [[1e-3, work.collective_hops / 1e3] for work in works]
    times, known_ms = [row.milliseconds for row in traces], [work.wire_ms for work in works]
    collective_us, hop_us = least_squares(times, known_ms, columns)
    known = dict(efficiency=1, call_ms=0, collective_us=collective_us, hop_us=hop_us, points=len(steps))
    return [_fit_steps(Calibration(**known, overlap=share), steps) for share in SHARES]


def nearly_best(fits: Sequence[Calibration], steps: Sequence[tuple[Work, float]]) -> list[Calibration]:
    """Returns the fits whose root of the mean squared relative error on steps is at most `NEARLY` times the least."""
    errors = [math.sqrt(np.mean([(fit.milliseconds(work) / ms - 1) ** 2 for work, ms in steps])) for fit in fits]
    return [fit for fit, error in zip(fits, errors, strict=True) if error <= NEARLY * min(errors) + 1e-9]


def _fit_steps(made: Calibration, steps: Sequence[Measurement]) -> Calibration:
    works = [row.work() for row in steps]
    columns = [[work.streaming_ms, 1.0, work.layer_sequences / 1e3] for work in works]
    times, known = [row.milliseconds for row in steps], [made.milliseconds(work) for work in works]
    slower, call_ms, sequence_us = least_squares(times, known, columns)
    return dataclasses.replace(made, efficiency=1 / (1 + slower), call_ms=call_ms, sequence_us=sequence_us)


def _with_error(fit: Callable[[Sequence[Measurement]], Calibration | None], rows: Sequence[Measurement]):
    """Fits, with the worst error of a step whose layout was left out; None if no layout can be left out."""
    made, errors = fit(rows), {}
    if made is None:
        return None
    steps = _steps(rows, ADDED_ON if fit is fit_added else HIDDEN_ON)
    for layout in sorted({row.layout for row in steps}):
        rest = fit([row for row in rows if row.layout != layout])
        if rest is not None:
            left = [row for row in steps if row.layout == layout]
            errors[layout] = max(abs(math.log(rest.milliseconds(row.work()) / row.milliseconds)) for row in left)
    return dataclasses.replace(made, error=max(errors.values()), layouts=len(errors)) if errors else None


def _steps(rows: Sequence[Measurement], chip: str) -> list[Measurement]:
    return [row for row in rows if row.kind == "step" and row.chip == chip]


def least_squares(measured: Sequence[float], known: Sequence[float], columns: Sequence[Sequence[float]]) -> list[float]:
    """Fits times by relative errors: what is known of them is taken off first, and no number is negative."""
    times = np.array(measured)
    return nnls(np.array(columns) / times[:, None], (times - np.array(known)) / times)[0].tolist()
