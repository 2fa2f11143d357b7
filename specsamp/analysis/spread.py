"""A median and its quartiles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

# Of a normal distribution: the standard error of a median of many samples, over the distance of its quartiles and by the root
# of their number.
MEDIAN_ERROR = math.sqrt(math.pi / 2) / 1.349


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """Of samples that were measured in turn with those of everything they are compared with."""

    median: float
    lower: float  # first quartile
    upper: float  # third quartile

    @classmethod
    def of(cls, samples: Sequence[float] | np.ndarray) -> Spread:
        lower, median, upper = np.quantile(np.asarray(samples, np.float64), (0.25, 0.5, 0.75))
        return cls(median=float(median), lower=float(lower), upper=float(upper))

    def relative_error(self, samples: int) -> float:
        """One standard error of the median over the median, were the samples normal."""
        return MEDIAN_ERROR * (self.upper - self.lower) / self.median / math.sqrt(samples)
