"""Named mistakes of a rule or a drafter, and the distribution that the next token has under each of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

MISTAKES = {
    "over-acceptance": "a drafted token is accepted with the square root of its acceptance probability",
    "target as residual": "a rejected token is replaced by a draw from the target's distribution",
    "previous residual": "a rejected token is replaced by a draw from the residual of the position before it",
    "unwarped draft": "a drafted token is verified against the draft's distribution without its warp",
}
SHARES = (0.95, 0.25)  # of the positions at which a mistake is made
# One token says at most so much: rounding may let a token pass that the distribution read here excludes.
LARGEST_RATIO = 100.0


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


def evidence_sums(wrong: tuple[Array, ...], q_NV: Array, tokens_N: Array, tested_N: Array) -> dict[str, Array]:
    """Returns the fields of `Evidence` for one text, ``[M, S]`` each: one column for each of `SHARES`."""

    def sums(wrong_NV: Array, share: float) -> tuple[Array, ...]:
        ratio_NV = jnp.where(q_NV > 0, wrong_NV / jnp.where(q_NV > 0, q_NV, 1), LARGEST_RATIO)
        ratio_NV = jnp.where(wrong_NV > 0, jnp.minimum(ratio_NV, LARGEST_RATIO), q_NV == 0)
        log_NV = jnp.log1p(share * (ratio_NV - 1))
        true_NV = q_NV + share * (wrong_NV - q_NV)
        mean_N = (true_NV * log_NV).sum(-1)
        columns = (
            jnp.take_along_axis(log_NV, tokens_N[:, None], axis=-1)[:, 0],
            mean_N,
            (true_NV * log_NV**2).sum(-1) - mean_N**2,
            jnp.abs(true_NV - q_NV).sum(-1) / 2,
        )
        return tuple(column_N.sum(where=tested_N) for column_N in columns)

    table = jnp.array([[sums(wrong_NV, share) for share in SHARES] for wrong_NV in wrong])
    return dict(zip(("evidence_MS", "mean_MS", "variance_MS", "moved_MS"), jnp.moveaxis(table, -1, 0), strict=True))
