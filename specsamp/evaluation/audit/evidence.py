"""Tests of how often events happen, with any number of tokens.

Let d be how much oftener an event happened at N tokens than its probabilities say. If tokens follow these probabilities,

    E = sqrt(r / (r + v)) exp(d^2 / (2 (r + v))),        v = N / 4

is at most a martingale of mean one, for any constant r (Robbins 1970: a mixture over t of Hoeffding's exp(t d - t^2 v / 2)).
So it ever exceeds 1 / level with a probability of at most ``level`` (Ville's inequality): 1 / E is a p-value. This needs no
normal approximation and no number of tokens fixed in advance. Several tests share a level by Bonferroni's inequality.

If the event's frequency is off by e per token, d stays below ``N e - sqrt(N log(1 / (1 - POWER)) / 2)`` with a probability
of at most 1 - POWER (Azuma's inequality), which says how large an error is seen: `Evidence.error_seen`.
"""

from __future__ import annotations

import dataclasses
from typing import Self

import jax
import numpy as np

from specsamp.evaluation.audit.subject import POWER

MIXED = 100  # r: tests of about 4 r tokens and more are sharp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """Counts of the events of T tests; those of two sets of tokens add up.

    Attributes:
      tokens_T: number of tokens that were tested.
      happened_T, expected_T: how often the events happened, and the sum of their probabilities.
    """

    tokens_T: np.ndarray
    happened_T: np.ndarray
    expected_T: np.ndarray

    @classmethod
    def of(cls, probs_NT: np.ndarray, happened_NT: np.ndarray, tested_NT: np.ndarray) -> Self:
        """Counts events at the tokens that are tested; all arguments are broadcast to ``[N, T]``."""
        probs_NT, happened_NT, tested_NT = np.broadcast_arrays(probs_NT.astype(np.float64), happened_NT, tested_NT)
        return cls(
            tokens_T=tested_NT.sum(0),
            happened_T=(happened_NT & tested_NT).sum(0),
            expected_T=(probs_NT * tested_NT).sum(0),
        )

    @property
    def p_values(self) -> np.ndarray:
        """Returns ``min(1, 1 / E)`` for each test, float64 [T]."""
        spread_T = MIXED + self.tokens_T / 4
        log_evidence_T = (np.log(MIXED / spread_T) + (self.happened_T - self.expected_T) ** 2 / spread_T) / 2
        return np.exp(-np.maximum(log_evidence_T, 0))

    def error_seen(self, level: float) -> np.ndarray:
        """Returns the smallest error of an event's frequency that a test at ``level`` sees with `POWER`, [T]."""
        tokens_T = np.maximum(self.tokens_T, 1)
        spread_T = MIXED + tokens_T / 4
        threshold_T = np.sqrt(spread_T * (2 * np.log(1 / level) + np.log(spread_T / MIXED)))
        return (threshold_T + np.sqrt(tokens_T * np.log(1 / (1 - POWER)) / 2)) / tokens_T
