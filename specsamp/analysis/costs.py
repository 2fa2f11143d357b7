"""What a round costs, by draft length, batch and context: measured, or reported by a compiler.

All of them answer one question, ``round_ms(draft_length, batch, context)``; draft length 0 is a step of plain
decoding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from specsamp.analysis.acceptance import NORMAL_95
from specsamp.tpu.report import Program, Report


class Costs(Protocol):
    """What `specsamp.analysis.planner.make_plan` asks of costs.

    Attributes:
      error: one relative standard error of a round's time, 0 if it is taken for certain.
    """

    error: float

    def round_ms(self, draft_length: int, batch: int, context: int | None) -> float:
        """Milliseconds of one round of all rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """One known round."""

    draft_length: int
    ms: float
    batch: int = 1
    context: int | None = None  # slots of the caches, which attention reads

    def __post_init__(self):
        if self.draft_length < 0 or self.batch < 1 or not self.ms > 0:
            raise ValueError(f"a round has draft_length >= 0, batch >= 1 and ms > 0; got {self}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What tells the calls of a round apart, at one batch."""

    batch: int
    draft_ms: float  # of one call of the drafter
    further_ms: float  # what one more drafted token adds to a round, beyond the longest K that is known

    @classmethod
    def of(
        cls, batch: int, known_ms: Mapping[int, float], draft_ms: float, score: tuple[int, float],
        prefill: tuple[int, float],
    ) -> Parts:  # fmt: skip
        """From known rounds and what was timed beside them.

        A call of many tokens uses a processor better than one of a dozen, so tokens cost less and less: what another
        one adds lies between what the last one added, and what it would if scoring led straight to the prefill. Half
        of each is taken. (Where calls stream weights, both are the same.)

        Args:
          known_ms: rounds by draft length, two or more.
          score, prefill: tokens of a row, and ms, of the longest call that scores and of one that reads prompts.
        """
        near, far = sorted(known_ms)[-2:]
        last_ms = (known_ms[far] - known_ms[near]) / (far - near)
        (scored, score_ms), (read, prefill_ms) = score, prefill
        further_ms = last_ms
        if read > scored:
            further_ms = min(draft_ms + max(prefill_ms - score_ms, 0.0) / (read - scored), last_ms)
        return cls(batch=batch, draft_ms=draft_ms, further_ms=(last_ms + further_ms) / 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostTable:
    """Known rounds, and straight lines between them; along the draft length also beyond the last.

    Draft calls are added one by one and scored rows nearly so, hence lines. Along batch and context nothing is
    extrapolated: a new regime (arithmetic instead of streaming) would not be seen coming.

    Attributes:
      parts: of batches. Between two that have them the target's call is compared at equal rows, ``batch (K + 1)``,
        which is what it computes; else rounds are compared at equal K.
    """

    rounds: tuple[Round, ...]
    error: float = 0.0
    parts: tuple[Parts, ...] = ()

    def __post_init__(self):
        if not self.rounds:
            raise ValueError("costs need at least one round")

    def round_ms(self, draft_length: int, batch: int = 1, context: int | None = None) -> float:
        """Milliseconds of one round.

        Raises:
          ValueError: batch or context lie beyond what is known, or a K below it: with what is known.
        """
        contexts = sorted({known.context for known in self.rounds if known.context is not None})
        if context is None or not contexts:
            return self._at_context(None if len(contexts) != 1 else contexts[0], draft_length, batch)
        at = lambda one: self._at_context(one, draft_length, batch)
        return _between("context", context, {one: lambda one=one: at(one) for one in contexts})

    def _at_context(self, context: int | None, draft_length: int, batch: int) -> float:
        here = [known for known in self.rounds if context is None or known.context == context]
        by_batch: dict[int, dict[int, float]] = {}
        for known in here:
            by_batch.setdefault(known.batch, {})[known.draft_length] = known.ms
        parts = {one.batch: one for one in self.parts}
        low, high = _neighbours("batch", batch, sorted(by_batch))
        if low != high and {low, high} <= parts.keys():
            calls = (_Scoring(by_batch[size], parts[size]) for size in (low, high))
            return _at_equal_rows(*calls, draft_length, batch)
        further = {size: one.further_ms for size, one in parts.items()}
        at = {
            size: lambda size=size, ms=ms: _line(ms, draft_length, further.get(size)) for size, ms in by_batch.items()
        }
        return _between("batch", batch, at)


@dataclasses.dataclass(frozen=True)
class _Scoring:
    """The target's call at one batch: a round less the calls of its draft, by rows instead of draft length."""

    round_ms: dict[int, float]  # by draft length
    parts: Parts

    @property
    def least(self) -> int:
        return self.parts.batch * (min(self.round_ms) + 1)

    @property
    def most(self) -> int:
        return self.parts.batch * (max(self.round_ms) + 1)

    def ms(self, rows: int) -> float:
        """From `least` rows on."""
        draft_length = rows / self.parts.batch - 1
        return _line(self.round_ms, draft_length, self.parts.further_ms) - draft_length * self.parts.draft_ms


def _at_equal_rows(few: _Scoring, many: _Scoring, draft_length: int, batch: int) -> float:
    """A round of a batch between two that are known.

    A call takes its time for its rows and for the caches that it reads. Where the two batches reach the same number
    of rows they differ by the caches alone; each goes on as the other does where it is not known itself.
    """

    def of_few(rows: int) -> float:
        if rows <= few.most:
            return few.ms(rows)
        if many.least <= few.most:
            return few.ms(few.most) + many.ms(rows) - many.ms(few.most)
        ends = (few.most, many.least), (few.ms(few.most), many.ms(many.least))
        return many.ms(rows) if rows > many.least else float(np.interp(rows, *ends))

    rows, share = batch * (draft_length + 1), (batch - few.parts.batch) / (many.parts.batch - few.parts.batch)
    caches_ms = many.ms(many.least) - of_few(many.least)
    of_many = many.ms(rows) if rows >= many.least else of_few(rows) + caches_ms
    draft_ms = (1 - share) * few.parts.draft_ms + share * many.parts.draft_ms
    return (1 - share) * of_few(rows) + share * of_many + draft_length * draft_ms


@dataclasses.dataclass(frozen=True)
class PerCall:
    """A round takes ``target_ms + K draft_ms``, whatever it scores: a call streams weights (as Chen et al. assume).

    Batch and context do not count, so these are milliseconds at the ones that are meant.

    Raises:
      ValueError: a call that takes no time, or no end of it.
    """

    target_ms: float
    draft_ms: float
    error: float = 0.0

    def __post_init__(self):
        if not (0 < self.target_ms < math.inf and 0 <= self.draft_ms < math.inf):
            raise ValueError(f"calls take time: target {self.target_ms!r} ms, draft {self.draft_ms!r} ms")

    def round_ms(self, draft_length: int, batch: int = 1, context: int | None = None) -> float:
        return self.target_ms + draft_length * self.draft_ms


def compiled_costs(report: dict[str, Any], latency_us: float | None = None) -> CostTable:
    """From the ``report`` in what ``launch/compile_report.py`` wrote: a plain step, and a round of its K.

    Args:
      report: a `specsamp.tpu.report.Report` as JSON.
      latency_us: of one collective, which the compiler does not know; None takes the one that is fitted on
        published steps of TPU v4 (`specsamp.tpu.calibration`), with its error.

    Raises:
      ValueError: it is no such report, or its programs do not fit the slice.
    """
    try:
        programs = tuple(Program(**entry) for entry in report["programs"])
        compiled = Report(**{**report, "programs": programs})
        named = {name: compiled[name] for name in ("target step", "round")}
    except (KeyError, TypeError, StopIteration) as error:
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"no compile report with a target step and a round ({told})") from error
    if any(program.hbm_bytes is None for program in named.values()):
        raise ValueError(f"the programs of this compile report do not fit {compiled.topology}: they have no times")
    lengths, error = (0, compiled.draft_length), 0.0
    if latency_us is None:
        bands = [compiled.calibrated_ms(name) for name in named]
        times = [likely for _, likely, _ in bands]
        error = math.log(bands[1][2] / bands[1][0]) / (2 * NORMAL_95)
    else:
        times = [program.milliseconds(compiled.chip, latency_us) for program in named.values()]
    known = {"batch": compiled.batch, "context": compiled.slots}
    return CostTable(
        rounds=tuple(Round(draft_length=K, ms=ms, **known) for K, ms in zip(lengths, times, strict=True)), error=error
    )


def _neighbours(name: str, value: int, known: Iterable[int]) -> tuple[int, int]:
    """The known numbers next to ``value``, twice itself if it is one of them."""
    below = [one for one in known if one <= value]
    above = [one for one in known if one >= value]
    if not below or not above:
        raise ValueError(
            f"{name} {value} lies beyond the measured {', '.join(map(str, known))}: measure it, or take a roofline"
        )
    return max(below), min(above)


def _between(name: str, value: int, known: dict[int, Any]) -> float:
    """Linear between the neighbours of ``value``; ``known`` maps to functions without arguments."""
    low, high = _neighbours(name, value, sorted(known))
    if low == high:
        return known[low]()
    share = (value - low) / (high - low)
    return (1 - share) * known[low]() + share * known[high]()


def _line(ms: dict[int, float], draft_length: float, further_ms: float | None = None) -> float:
    """Linear between known draft lengths, and beyond the longest two unless it is known how it goes on."""
    lengths = sorted(ms)
    if draft_length < lengths[0] or (draft_length > lengths[-1] and len(lengths) == 1 and further_ms is None):
        raise ValueError(f"no cost at draft_length {draft_length}: known are {', '.join(map(str, lengths))}")
    if draft_length <= lengths[-1]:
        return float(np.interp(draft_length, lengths, [ms[n] for n in lengths]))
    if further_ms is None:
        near, far = lengths[-2:]
        further_ms = (ms[far] - ms[near]) / (far - near)
    return ms[lengths[-1]] + (draft_length - lengths[-1]) * further_ms


def median_rounds(rounds: Iterable[Round]) -> tuple[Round, ...]:
    """One round for each draft length, batch and context: the median of those given."""
    cells: dict[tuple, list[float]] = {}
    for one in rounds:
        cells.setdefault((one.draft_length, one.batch, one.context), []).append(one.ms)
    return tuple(
        Round(draft_length=K, batch=batch, context=context, ms=float(np.median(ms)))
        for (K, batch, context), ms in cells.items()
    )
