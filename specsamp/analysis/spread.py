"""A median and its quartiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


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
