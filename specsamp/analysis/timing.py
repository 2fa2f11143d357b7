"""Measuring in turn, and what is reported of the samples.

A machine may be slow for minutes. So everything that is compared runs once before anything runs again, ratios are taken
within a turn, and medians over turns are reported. `take_turns` is the only loop of this kind; it never looks at a clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

Name = TypeVar("Name", bound=Hashable)
Answer = TypeVar("Answer")
# Of normal samples: the standard error of the median of N samples is this times the interquartile range over sqrt(N).
MEDIAN_ERROR = math.sqrt(math.pi / 2) / 1.349


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quartiles:
    """The median and the quartiles of samples."""

    median: float
    lower: float  # first quartile
    upper: float  # third quartile

    @classmethod
    def of(cls, samples: Sequence[float] | np.ndarray) -> Quartiles:
        lower, median, upper = np.quantile(np.asarray(samples, np.float64), (0.25, 0.5, 0.75))
        return cls(median=float(median), lower=float(lower), upper=float(upper))

    def relative_error(self, samples: int) -> float:
        """Returns the standard error of the median over the median, as for so many normal samples."""
        return MEDIAN_ERROR * (self.upper - self.lower) / self.median / math.sqrt(samples)


def take_turns(
    runs: Mapping[Name, Callable[[int], Answer]],
    turns: int,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[Name, list[Answer]]:
    """Calls every run with 0, then every run with 1, and so on.

    Args:
      runs: what takes turns, in this order; each gets the number of the turn.
      turns: how many.
      progress: is told the number of the turn.

    Returns:
      By name, what the run returned in each turn.
    """
    answers: dict[Name, list[Answer]] = {name: [] for name in runs}
    for turn in range(turns):
        progress(f"{turn + 1} of {turns}")
        for name, run in runs.items():
            answers[name].append(run(turn))
    return answers
