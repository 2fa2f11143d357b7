"""Turns work on a TPU into milliseconds, with numbers that were fitted on published measurements.

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
  Overlaps down to a half explain the steps nearly as well, and the upper edge of a band takes that
  one. (One trace shows 40 of 67 us under attention and collectives; it is not used.)

This package compiles programs of today, and no step of such a program on v4 is published. So an
estimate for v5e comes from the second fit. For every other chip it is a **range between full
overlap and none**: from streaming and cycles alone to the sum of the first fit and v5e's time per
layer and sequence.

A band includes the worst step of the worst layout that was left out of the fit. Steps of
one layout err alike, so a new layout lies within with a chance of about n / (n + 1) after n
layouts: three in four for v5e. The measurements, their sources, the fit and its check are in commit
7525f05c (`specsamp/tpu/measurements.json`, `launch/studies/backtest.py`).
"""

from __future__ import annotations

import dataclasses
import math

from specsamp.tpu.work import Work

MEASURED_TODAY = "v5e"  # the chip of the hidden collectives


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The numbers of the formula, and its error on layouts that were left out of the fit."""

    efficiency: float  # of streaming, at most 1
    call_ms: float
    sequence_us: float = 0.0
    collective_us: float = 0.0
    hop_us: float = 0.0
    overlap: float = 0.0  # share of the streaming that hides collectives
    least_overlap: float = 0.0  # the least that explains the steps nearly as well
    error: float = 0.0  # of the logarithm: the worst of a step that was left out of the fit

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
        shown = dataclasses.replace(self, overlap=self.least_overlap)
        least = self.milliseconds(*(dataclasses.replace(work, calls=0) for work in works))
        return Band(
            least=least * math.exp(-self.error),
            likely=self.milliseconds(*works),
            most=shown.milliseconds(*works) * math.exp(self.error),
        )


ADDED = Calibration(efficiency=0.8686, call_ms=0.6485, hop_us=7.180, error=0.09981)
HIDDEN = Calibration(
    efficiency=0.9908,
    call_ms=0.1736,
    sequence_us=1.535,
    collective_us=7.550,
    hop_us=1.266,
    overlap=1.0,
    least_overlap=0.5,
    error=0.1776,
)
HIDDEN_STEPS, HIDDEN_LAYOUTS = 25, 3  # in the fit

# Fits nearly as good as HIDDEN: with other overlaps, and without each of the layouts.
NEARLY = (
    HIDDEN,
    dataclasses.replace(HIDDEN, overlap=0.5, efficiency=0.9719, call_ms=0.1606, sequence_us=1.364),
    dataclasses.replace(HIDDEN, overlap=0.6, efficiency=0.9847, call_ms=0.2011, sequence_us=1.460),
    dataclasses.replace(HIDDEN, overlap=0.7, efficiency=0.9885, call_ms=0.1909, sequence_us=1.502),
    dataclasses.replace(HIDDEN, overlap=0.8, efficiency=0.9900, call_ms=0.1796, sequence_us=1.523),
    dataclasses.replace(HIDDEN, efficiency=0.9863, call_ms=0.0, sequence_us=1.586),
    dataclasses.replace(
        HIDDEN, efficiency=1.0, call_ms=0.6872, sequence_us=1.381, collective_us=9.569, hop_us=1.122
    ),
    dataclasses.replace(HIDDEN, efficiency=1.0, call_ms=0.1630, sequence_us=1.551),
)


def estimate(chip: str, *works: Work) -> Band:
    """Estimates calls of a program of today, by the fit of its chip if there is one.

    Otherwise the band is the range between full overlap and none. Its three scenarios are: all
    hidden; all added; and the target's call, which comes first, hidden, but calls of a draft, with
    little time to hide under, added.
    """
    if chip == MEASURED_TODAY:
        worlds = tuple(fit.milliseconds(*works) for fit in NEARLY)
        return dataclasses.replace(HIDDEN.estimate(*works), worlds=worlds)
    added = dataclasses.replace(ADDED, sequence_us=HIDDEN.sequence_us)
    hidden = [max(work.streaming_ms, work.cycles_ms) for work in works]
    least, most = sum(hidden), added.milliseconds(*works) * math.exp(added.error)
    worlds = least, added.milliseconds(*works), hidden[0] + added.milliseconds(*works[1:])
    return Band(least=least, likely=math.sqrt(least * most), most=most, open=True, worlds=worlds)


def band_ratio(slow: Band, fast: Band) -> Band:
    """Returns by how much one program is faster than another of the same chip.

    Errors are mostly common to both, so the programs are compared within each scenario.
    """
    likely, is_open = slow.likely / fast.likely, slow.open and fast.open
    ends = [a / b for a, b in zip(slow.worlds, fast.worlds, strict=True)] or [likely]
    ends += [] if is_open else [likely]
    return Band(least=min(ends), likely=likely, most=max(ends), open=is_open)


def two_digits(number: float) -> str:
    """Formats two significant digits, without an exponent."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    decimals = 1 - math.floor(math.log10(abs(float(f"{number:.1e}"))))
    return f"{round(number, decimals):.{max(decimals, 0)}f}"
