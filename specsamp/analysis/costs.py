"""Milliseconds of a round, by draft length, batch and context: measured, or given per call.

Every class has ``round_ms(draft_length, batch, context)``; draft length 0 is a step of plain
decoding. `specsamp.tpu.work.Roofline` adds lower bounds, `specsamp.tpu.pair_report.compiled_costs`
costs of compiled programs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from specsamp import validate

# Relative standard error of a clock from one session to the next: the least with which 95% bands
# hold 95% of the 52 points of notebooks/results/python_pair_agreement.json; found on three of its
# four curves, it holds 50 of them.
CLOCK_DRIFT = 0.016


def clock_error(errors: Iterable[float]) -> float:
    """Returns the relative standard error of timed rounds, from the errors of their medians."""
    return math.hypot(float(np.median([*errors])), CLOCK_DRIFT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs as `specsamp.analysis.planner.make_plan` needs them."""

    error: float = 0.0  # the relative standard error of a round's time; 0 if it is exact
    bounds: tuple[Costs, ...] = ()  # the lowest and the highest costs, where a forecast has a band
    # One of them is true: a speedup compares two programs within each.
    scenarios: tuple[Costs, ...] = ()
    is_range: bool = False  # no value between the bounds is likelier than another

    def round_ms(self, draft_length: int, batch: int = 1, context: int | None = None) -> float:
        """Returns the milliseconds of one round of all rows: a chain is a tree of one branch."""
        return self.tree_ms(draft_length, draft_length + 1, batch, context)

    def tree_ms(self, depth: int, rows: int, batch: int = 1, context: int | None = None) -> float:
        """Returns the milliseconds of a round of a token tree; raises ValueError if these costs
        are of chains alone.

        Args:
          depth: of the tree; each level is a call of the draft.
          rows: scored rows, the pending token included.
        """
        raise ValueError(
            f"{type(self).__name__} knows the rounds of chains alone: give costs of calls, or a "
            "roofline"
        )


@dataclasses.dataclass(frozen=True)
class CostTable(Costs):
    """Measured rounds, interpolated linearly; along the draft length also extrapolated.

    The batch is never extrapolated: arithmetic could take over from streaming there.
    """

    ms: Mapping[int, Mapping[int, float]]  # of a round, by batch and then by draft length
    # Slots of their caches, which attention reads; None: the rounds serve any number.
    context: int | None = None

    def __post_init__(self):
        if not self.ms or not all(self.ms.values()):
            raise ValueError("costs need at least one round of each batch")
        for batch, by_length in self.ms.items():
            validate.integer("batch of a round", batch, 1)
            for K, ms in by_length.items():
                validate.integer("draft_length of a round", K, 0)
                validate.number("ms of a round", ms, 0, above=True)

    def round_ms(self, draft_length: int, batch: int = 1, context: int | None = None) -> float:
        """Returns the milliseconds of one round; raises ValueError beyond the measured contexts,
        batches and lengths.
        """
        if None not in (context, self.context) and context != self.context:
            raise ValueError(
                f"context {context} is not the measured {self.context}: measure it, or take a "
                "roofline"
            )
        sizes = sorted(self.ms)
        if not sizes[0] <= batch <= sizes[-1]:
            raise ValueError(
                f"batch {batch} lies beyond the measured {', '.join(map(str, sizes))}: measure it, "
                "or take a roofline"
            )
        ends = max(n for n in sizes if n <= batch), min(n for n in sizes if n >= batch)
        return float(np.interp(batch, ends, [_line(self.ms[end], draft_length) for end in ends]))


@dataclasses.dataclass(frozen=True)
class PerCall(Costs):
    """A round scores K + 1 positions and drafts K tokens at equal cost (as in Chen et al., arXiv
    2302.01318).

    Attributes:
      target_ms: milliseconds of the target's call, at every batch and context; or by scored
        positions, interpolated.
      draft_ms: milliseconds of a drafted token.
    """

    target_ms: float | Mapping[int, float]
    draft_ms: float

    def __post_init__(self):
        is_table = isinstance(self.target_ms, Mapping)
        for ms in self.target_ms.values() if is_table else (self.target_ms,):
            validate.number("target_ms", ms, 0, above=True)
        validate.number("draft_ms", self.draft_ms, 0)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> PerCall:
        """Reads timed costs from a file."""
        return cls({int(T): ms for T, ms in fields["target_ms"].items()}, fields["draft_ms"])

    def tree_ms(self, depth: int, rows: int, batch: int = 1, context: int | None = None) -> float:
        """Returns the milliseconds of a round; raises ValueError beyond the timed positions."""
        scored_ms = self.target_ms
        if isinstance(scored_ms, Mapping):
            known = sorted(scored_ms)
            if rows > known[-1]:
                raise ValueError(
                    f"draft_length {rows - 1} lies beyond {known[-1] - 1}, the longest that was "
                    "timed"
                )
            scored_ms = float(np.interp(rows, known, [scored_ms[n] for n in known]))
        return scored_ms + depth * self.draft_ms


def _line(ms: Mapping[int, float], where: int) -> float:
    """Interpolates between measured draft lengths, and extrapolates with the slope of the longest
    half.

    The slope beyond the longest is never negative: a noisy clock must not make longer rounds ever
    shorter.
    """
    known = sorted(ms)
    far = known[-1]
    if where < known[0] or (where > far and len(known) == 1):
        raise ValueError(f"no cost at draft_length {where}: known are {', '.join(map(str, known))}")
    if where <= far:
        return float(np.interp(where, known, [ms[n] for n in known]))
    near = max(n for n in known if n <= max(far / 2, known[0]))
    return ms[far] + (where - far) * max((ms[far] - ms[near]) / (far - near), 0.0)
