"""Milliseconds of a round, by draft length, batch and context: measured, or given per call.

Every class has ``round_ms(draft_length, batch, context)``; draft length 0 is a step of plain decoding.
`specsamp.tpu.costs` adds the costs of a roofline, and those of programs that were compiled for a TPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from specsamp import validate

# Relative standard error of a clock from one session to the next: the least with which 95% bands hold 95% of the 52
# points of notebooks/results/python_pair_agreement.json; found on three of its four curves, it holds 50 of them.
CLOCK_DRIFT = 0.016


def clock_error(errors: Iterable[float]) -> float:
    """Returns the relative standard error of rounds that were timed, from those of their medians."""
    return math.hypot(float(np.median([*errors])), CLOCK_DRIFT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs as `specsamp.analysis.planner.make_plan` needs them."""

    error: float = 0.0  # the relative standard error of a round's time; 0 if it is known exactly
    bounds: tuple[Costs, ...] = ()  # the lowest and the highest costs, where a forecast has a band
    scenarios: tuple[Costs, ...] = ()  # one of them is true: a speedup compares two programs within each
    is_range: bool = False  # no value between the bounds is likelier than another

    def round_ms(self, draft_length: int, batch: int = 1, context: int | None = None) -> float:
        """Returns the milliseconds of one round of all rows."""
        raise NotImplementedError

    def tree_ms(self, depth: int, rows: int, batch: int = 1, context: int | None = None) -> float:
        """Returns the milliseconds of a round of a token tree; raises ValueError if these costs know chains alone.

        Args:
          depth: of the tree; each level is a call of the draft.
          rows: scored rows, the pending token included.
        """
        raise ValueError(f"{type(self).__name__} knows the rounds of chains alone: give costs of calls, or a roofline")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """The measured time of one round."""

    draft_length: int
    ms: float
    batch: int = 1

    def __post_init__(self):
        validate.integer("draft_length of a round", self.draft_length, 0)
        validate.integer("batch of a round", self.batch, 1)
        validate.number("ms of a round", self.ms, 0, above=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostTable(Costs):
    """Measured rounds, interpolated linearly; along the draft length also extrapolated.

    The batch is never extrapolated: arithmetic could take over from streaming there.
    """

    rounds: tuple[Round, ...]
    context: int | None = None  # slots of their caches, which attention reads; None: the rounds serve any number

    def __post_init__(self):
        if not self.rounds:
            raise ValueError("costs need at least one round")

    def round_ms(self, draft_length: int, batch: int = 1, context: int | None = None) -> float:
        """Returns the milliseconds of one round; raises ValueError beyond the measured contexts, batches and lengths."""
        if None not in (context, self.context) and context != self.context:
            raise ValueError(f"context {context} is not the measured {self.context}: measure it, or take a roofline")
        by_batch: dict[int, dict[int, float]] = {}
        for known in self.rounds:
            by_batch.setdefault(known.batch, {})[known.draft_length] = known.ms
        below, above = [size for size in by_batch if size <= batch], [size for size in by_batch if size >= batch]
        if not below or not above:
            listed = ", ".join(map(str, sorted(by_batch)))
            raise ValueError(f"batch {batch} lies beyond the measured {listed}: measure it, or take a roofline")
        ends = max(below), min(above)
        return float(np.interp(batch, ends, [_line(by_batch[end], draft_length) for end in ends]))


@dataclasses.dataclass(frozen=True)
class PerCall(Costs):
    """A round takes ``target_ms + K * draft_ms`` (as in Chen et al., arXiv 2302.01318) at every batch and context."""

    target_ms: float
    draft_ms: float

    def __post_init__(self):
        validate.number("target_ms", self.target_ms, 0, above=True)
        validate.number("draft_ms", self.draft_ms, 0)

    def round_ms(self, draft_length: int, batch: int = 1, context: int | None = None) -> float:
        return self.target_ms + draft_length * self.draft_ms

    def tree_ms(self, depth: int, rows: int, batch: int = 1, context: int | None = None) -> float:
        return self.round_ms(depth, batch, context)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallCosts(Costs):
    """A round scores K + 1 positions, interpolated between timed numbers of positions, and drafts K tokens at equal cost.

    Attributes:
      target_ms: milliseconds of the target's call, by scored positions.
      draft_ms: milliseconds of a drafted token.
    """

    target_ms: Mapping[int, float]
    draft_ms: float

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> CallCosts:
        """Reads costs from a file."""
        return cls(target_ms={int(T): ms for T, ms in fields["target_ms"].items()}, draft_ms=fields["draft_ms"])

    def round_ms(self, draft_length: int, batch: int = 1, context: int | None = None) -> float:
        """Returns the milliseconds of a round of the batch that was timed; raises ValueError beyond the timed positions."""
        longest = max(self.target_ms) - 1
        if draft_length > longest:
            raise ValueError(f"draft_length {draft_length} lies beyond {longest}, the longest that was timed")
        scored_ms = np.interp(draft_length + 1, [*self.target_ms], [*self.target_ms.values()])
        return float(scored_ms) + draft_length * self.draft_ms


def _line(ms: Mapping[int, float], where: int) -> float:
    """Interpolates between known draft lengths, and extrapolates with the slope of the longest half.

    The slope beyond the longest is never negative: a noisy clock must not make longer rounds ever shorter.
    """
    known = sorted(ms)
    if where < known[0] or (where > known[-1] and len(known) == 1):
        raise ValueError(f"no cost at draft_length {where}: known are {', '.join(map(str, known))}")
    if where <= known[-1]:
        return float(np.interp(where, known, [ms[n] for n in known]))
    far = known[-1]
    near = max(n for n in known if n <= max(far / 2, known[0]))
    return ms[far] + (where - far) * max((ms[far] - ms[near]) / (far - near), 0.0)
