"""Likelihood-ratio tests of how tokens are distributed, with any number of tokens.

For a test with the alternatives a_1 .. a_S and the tokens x_1 .. x_N of all texts in turn,

    E = mean over s of  prod over n of  a_s(x_n | prefix) / q(x_n | prefix).

If tokens follow q, E is a martingale of mean one, so it ever exceeds 1 / level with a probability of at most
``level`` (Ville's inequality): 1 / E is a p-value. This needs no normal approximation and no number of tokens fixed in
advance. Several tests share a level by Bonferroni's inequality.

An alternative is a named mistake of a rule or a drafter (`MISTAKES`), or other odds of an event (`tilted`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special, stats

from specsamp.evaluation.audit.subject import POWER

Array = jax.Array

MISTAKES = {
    "over-acceptance": "a drafted token is accepted with the square root of its acceptance probability",
    "target as residual": "a rejected token is replaced by a draw from the target's distribution",
    "previous residual": "a rejected token is replaced by a draw from the residual of the position before it",
    "unwarped draft": "a drafted token is verified against the draft's distribution without its warp",
}
SHARE = 0.95  # of the positions at which a mistake is made
TILTS = (-1.0, -0.3, -0.1, 0.1, 0.3, 1.0)  # of the log-odds of an event
# One token says at most so much: rounding may let a token pass that the distribution read here excludes.
LARGEST_RATIO = 100.0


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


def wrong_distributions(q_NV: Array, p_NV: Array, unwarped_NV: Array, offsets_N: Array) -> tuple[Array, ...]:
    """Returns the distribution ``[N, V]`` of the next token under each of `MISTAKES`.

    Args:
      q_NV: the target's distribution.
      p_NV: the draft's.
      unwarped_NV: the draft's before its warp.
      offsets_N: how many drafted tokens the round has accepted before; 0 has no previous position.
    """

    def emitted(kept_NV: Array, residual_NV: Array) -> Array:
        """Adds what replaces rejected tokens; where there is no residual, the target's distribution."""
        mass_N1 = residual_NV.sum(-1, keepdims=True)
        residual_NV = jnp.where(mass_N1 > 0, residual_NV / jnp.where(mass_N1 > 0, mass_N1, 1), q_NV)
        return kept_NV + (1 - kept_NV.sum(-1, keepdims=True)) * residual_NV

    residual_NV = jnp.maximum(q_NV - p_NV, 0)
    kept_NV = jnp.minimum(p_NV, q_NV)
    previous_NV = jnp.roll(residual_NV, 1, axis=0)
    ratio_NV = q_NV / jnp.where(unwarped_NV > 0, unwarped_NV, 1)
    return (
        emitted(jnp.where(q_NV < p_NV, jnp.sqrt(p_NV * q_NV), p_NV), residual_NV),
        emitted(kept_NV, q_NV),
        jnp.where((offsets_N > 0)[:, None], emitted(kept_NV, previous_NV), q_NV),
        emitted(p_NV * jnp.minimum(ratio_NV, 1), jnp.maximum(q_NV - unwarped_NV, 0)),
    )


def mistake_sums(wrong: tuple[Array, ...], q_NV: Array, tokens_N: Array, tested_N: Array) -> Evidence:
    """Returns the evidence of one text: a test of each of `MISTAKES` with one alternative, arrays of float32."""

    def sums(wrong_NV: Array) -> Array:
        ratio_NV = jnp.where(q_NV > 0, wrong_NV / jnp.where(q_NV > 0, q_NV, 1), LARGEST_RATIO)
        ratio_NV = jnp.where(wrong_NV > 0, jnp.minimum(ratio_NV, LARGEST_RATIO), q_NV == 0)
        log_NV = jnp.log1p(SHARE * (ratio_NV - 1))
        true_NV = q_NV + SHARE * (wrong_NV - q_NV)
        mean_N = (true_NV * log_NV).sum(-1)
        columns = (
            jnp.take_along_axis(log_NV, tokens_N[:, None], axis=-1)[:, 0],
            mean_N,
            (true_NV * log_NV**2).sum(-1) - mean_N**2,
            jnp.abs(true_NV - q_NV).sum(-1) / 2,
        )
        return jnp.stack([column_N.sum(where=tested_N) for column_N in columns])

    evidence_TS, mean_TS, variance_TS, moved_TS = jnp.stack([sums(wrong_NV) for wrong_NV in wrong], axis=1)[..., None]
    return Evidence(
        evidence_TS=evidence_TS,
        mean_TS=mean_TS,
        variance_TS=variance_TS,
        moved_TS=moved_TS,
        tokens_T=jnp.full(len(wrong), tested_N.sum()),
    )
