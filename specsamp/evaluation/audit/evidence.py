"""Likelihood-ratio tests of how often events happen, with any number of tokens.

For a test with the alternatives a_1 .. a_S and the tokens x_1 .. x_N of all texts in turn,

    E = mean over s of  prod over n of  a_s(x_n | prefix) / q(x_n | prefix).

If tokens follow q, E is a martingale of mean one, so it ever exceeds 1 / level with a probability of at most
``level`` (Ville's inequality): 1 / E is a p-value. This needs no normal approximation and no number of tokens fixed in
advance. Several tests share a level by Bonferroni's inequality.

The alternatives multiply the odds of an event, such as that a drafted token is accepted, by ``exp(t)``. If the event's
frequency is off by e per token, log E is at least ``t (N e - d) - N t^2 / 8 - log S`` for each t (Hoeffding's lemma). Its
deviation d stays below ``sqrt(N log(1 / (1 - POWER)) / 2)`` with probability `POWER` (Azuma's inequality). So an error is
seen if it is large enough for one t: `Evidence.error_seen`.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from scipy import special

from specsamp.evaluation.audit.subject import POWER

TILTS = np.array([-1.0, -0.3, -0.1, -0.03, 0.03, 0.1, 0.3, 1.0])  # t, of the log-odds of an event


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """Log-likelihood ratios of T tests with S alternatives each; the ratios of two sets of tokens add up.

    Attributes:
      log_ratios_TS: float64, log-likelihood ratio of each alternative.
      tokens_T: number of tokens that were tested.
      happened_T, expected_T: how often the events happened, and how often they were expected.
    """

    log_ratios_TS: np.ndarray
    tokens_T: np.ndarray
    happened_T: np.ndarray
    expected_T: np.ndarray

    @property
    def p_values(self) -> np.ndarray:
        """Returns ``min(1, 1 / E)`` for each test, float64 [T]."""
        log_evidence_T = special.logsumexp(self.log_ratios_TS, axis=1) - np.log(len(TILTS))
        return np.exp(-np.maximum(log_evidence_T, 0))

    def error_seen(self, level: float) -> np.ndarray:
        """Returns the smallest error of an event's frequency that a test at ``level`` sees with `POWER`, [T]."""
        tokens_T1, tilts = np.maximum(self.tokens_T, 1)[:, None], np.abs(TILTS)
        threshold, deviation_T1 = np.log(len(TILTS) / level), np.sqrt(np.log(1 / (1 - POWER)) / (2 * tokens_T1))
        return np.min(threshold / (tilts * tokens_T1) + deviation_T1 + tilts / 8, axis=1)


def tilted(probs_NT: np.ndarray, happened_NT: np.ndarray, tested_NT: np.ndarray) -> Evidence:
    """Returns a test of each event's frequency.

    Args:
      probs_NT: float64, the events' probabilities at each token.
      happened_NT: bool.
      tested_NT: bool, tokens that count.
    """
    # Rounding may leave a probability just outside [0, 1].
    log_norm_NTS = np.log1p(np.clip(probs_NT, 0, 1)[..., None] * np.expm1(TILTS))
    log_ratios_NTS = (TILTS * happened_NT[..., None] - log_norm_NTS) * tested_NT[..., None]
    return Evidence(
        log_ratios_TS=log_ratios_NTS.sum(axis=0),
        tokens_T=tested_NT.sum(axis=0),
        happened_T=(happened_NT & tested_NT).sum(axis=0),
        expected_T=(probs_NT * tested_NT).sum(axis=0),
    )
