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
class CostTable:
    """Known rounds, and straight lines between them; along the draft length also beyond the longest.

    Draft calls are added one by one, and rows and caches nearly so, hence lines. What need not lie on a line are the
    products with the target's matrices: a kernel may take a step up at some number of rows. Where they are known for
    themselves, lines are drawn through what is left of the rounds. Along batch and context nothing is extrapolated: a
    new regime (arithmetic instead of streaming) would not be seen coming.

    Attributes:
      error: one relative standard error of a round's time.
      products_ms: of so many rows with all of the target's matrices, by rows, ``((rows, ms), ...)``; a round has
        ``batch (K + 1)``. On lines between known numbers of rows, and beyond.
    """

    rounds: tuple[Round, ...]
    error: float = 0.0
    products_ms: tuple[tuple[int, float], ...] = ()

    def __post_init__(self):
        if not self.rounds:
            raise ValueError("costs need at least one round")

    def round_ms(self, draft_length: int, batch: int = 1, context: int | None = None) -> float:
        """Milliseconds of one round.

        Raises:
          ValueError: batch or context lie beyond what is known, or a K below it, or no context is given where
            several are known: with what is known.
        """
        contexts = sorted({known.context for known in self.rounds if known.context is not None})
        if context is None and len(contexts) > 1:
            raise ValueError(f"costs are known at contexts {', '.join(map(str, contexts))}: say which is meant")
        if context is None or not contexts:
            return self._at_context(contexts[0] if contexts else None, draft_length, batch)

        def at(one):
            return self._at_context(one, draft_length, batch)

        return _between("context", context, {one: lambda one=one: at(one) for one in contexts})

    def _at_context(self, context: int | None, draft_length: int, batch: int) -> float:
        by_batch: dict[int, dict[int, float]] = {}  # what is left of the rounds, by draft length
        for known in self.rounds:
            if context is None or known.context == context:
                left_ms = known.ms - self._products_ms(known.batch * (known.draft_length + 1))
                by_batch.setdefault(known.batch, {})[known.draft_length] = left_ms
        at = {size: lambda left=left: _line(left, draft_length) for size, left in by_batch.items()}
        return _between("batch", batch, at) + self._products_ms(batch * (draft_length + 1))

    def _products_ms(self, rows: int) -> float:
        known = dict(self.products_ms)
        if len(known) < 2:
            return 0.0  # they tell nothing of the shape
        return _line(known, max(rows, min(known)))


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
        fields = {_OLD_FIELDS.get(name, name): value for name, value in report.items()}
        compiled = Report(**{**fields, "programs": programs})
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


_OLD_FIELDS = {"draft_ways": "draft_model_parallelism"}  # of reports that were written before the new name


def _between(name: str, value: int, known: dict[int, Any]) -> float:
    """Linear between the neighbours of ``value``; ``known`` maps to functions without arguments."""
    below = [one for one in known if one <= value]
    above = [one for one in known if one >= value]
    if not below or not above:
        raise ValueError(
            f"{name} {value} lies beyond the measured {', '.join(map(str, sorted(known)))}: measure it, or take a "
            "roofline"
        )
    low, high = max(below), min(above)
    if low == high:
        return known[low]()
    share = (value - low) / (high - low)
    return (1 - share) * known[low]() + share * known[high]()


def _line(ms: Mapping[int, float], where: int) -> float:
    """Linear between known draft lengths, or rows; beyond the longest as it and half of it lead, but not down."""
    known = sorted(ms)
    if where < known[0] or (where > known[-1] and len(known) == 1):
        raise ValueError(f"no cost at draft_length {where}: known are {', '.join(map(str, known))}")
    if where <= known[-1]:
        return float(np.interp(where, known, [ms[n] for n in known]))
    far = known[-1]
    near = max(n for n in known if n <= max(far / 2, known[0]))
    return ms[far] + (where - far) * max((ms[far] - ms[near]) / (far - near), 0.0)


def median_rounds(rounds: Iterable[Round]) -> tuple[Round, ...]:
    """One round for each draft length, batch and context: the median of those given."""
    cells: dict[tuple, list[float]] = {}
    for one in rounds:
        cells.setdefault((one.draft_length, one.batch, one.context), []).append(one.ms)
    return tuple(
        Round(draft_length=K, batch=batch, context=context, ms=float(np.median(ms)))
        for (K, batch, context), ms in cells.items()
    )
