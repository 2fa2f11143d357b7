"""Likelihood-ratio tests of how tokens are distributed, with any number of tokens.

For a test with the alternatives a_1 .. a_S and the tokens x_1 .. x_N of all texts in turn,

    E = mean over s of  prod over n of  a_s(x_n | prefix) / q(x_n | prefix).

If tokens follow q, E is a martingale of mean one, so it ever exceeds 1 / level with a probability of at most
``level`` (Ville's inequality): 1 / E is a p-value. This needs no normal approximation and no number of tokens fixed in
advance. Several tests share a level by Bonferroni's inequality.

The alternatives are other odds of an event, such as that a drafted token is accepted.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from scipy import special, stats

from specsamp.evaluation.audit.subject import POWER

TILTS = (-1.0, -0.3, -0.1, 0.1, 0.3, 1.0)  # of the log-odds of an event


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """Log-likelihood ratios of T tests with S alternatives each; those of two sets of tokens add up.

    Attributes:
      evidence_TS: float64, log-likelihood ratio of each alternative.
      mean_TS, variance_TS: its mean and variance where the alternative is true.
      moved_TS: total variation between the alternative and q, summed over tokens.
      tokens_T: number of tokens that were tested.
    """

    evidence_TS: np.ndarray
    mean_TS: np.ndarray
    variance_TS: np.ndarray
    moved_TS: np.ndarray
    tokens_T: np.ndarray

    @property
    def p_values(self) -> np.ndarray:
        """Returns ``min(1, 1 / E)`` for each test, float64 [T]."""
        log_evidence_T = special.logsumexp(self.evidence_TS, axis=1) - np.log(self.evidence_TS.shape[1])
        return np.exp(-np.maximum(log_evidence_T, 0))

    @property
    def total_variation(self) -> np.ndarray:
        """Returns the probability that each alternative moves, averaged over the tested tokens, [T, S]."""
        return self.moved_TS / np.maximum(self.tokens_T, 1)[:, None]

    def power(self, level: float) -> np.ndarray:
        """Returns the probability [T, S] that a test at ``level`` rejects where the alternative is true.

        The evidence is a sum over many tokens, so its distribution is taken to be normal: an estimate, unlike the
        level, which is a bound.
        """
        threshold = np.log(self.evidence_TS.shape[1] / level)
        deviation_TS = np.sqrt(np.maximum(self.variance_TS, 1e-12))
        return stats.norm.sf((threshold - self.mean_TS) / deviation_TS)

    def is_seen(self, level: float) -> np.ndarray:
        """Returns whether each alternative is seen with `POWER` by a test at ``level``, [T, S]."""
        return self.power(level) >= POWER


def tilted(probs_NT: np.ndarray, happened_NT: np.ndarray, tested_NT: np.ndarray) -> Evidence:
    """Returns a test of each event's frequency: alternatives multiply its odds by ``exp(tilt)``.

    Args:
      probs_NT: float64, the events' probabilities at each token.
      happened_NT: bool.
      tested_NT: bool, tokens that count.
    """
    tilts_S = np.array(TILTS)
    # Rounding may leave a probability just outside [0, 1].
    probs_NTS = np.clip(probs_NT, 0, 1)[..., None]
    log_norm_NTS = np.log1p(probs_NTS * np.expm1(tilts_S))
    tilted_NTS = probs_NTS * np.exp(tilts_S - log_norm_NTS)

    def total(x_NTS):
        return np.sum(x_NTS * tested_NT[..., None], axis=0)

    return Evidence(
        evidence_TS=total(tilts_S * happened_NT[..., None] - log_norm_NTS),
        mean_TS=total(tilts_S * tilted_NTS - log_norm_NTS),
        variance_TS=total(tilts_S**2 * tilted_NTS * (1 - tilted_NTS)),
        moved_TS=total(np.abs(tilted_NTS - probs_NTS)),
        tokens_T=tested_NT.sum(axis=0),
    )
