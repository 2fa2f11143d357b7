"""The coupled rule's acceptance and residual as distributions, so that it can be enumerated like the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specsamp.sampling.coupled import CoupledRule
from specsamp.sampling.rejection import at_rows, log_ratios
from specsamp.sampling.rules import Draft

Array = jax.Array


class CoupledSplit(CoupledRule):
    """`CoupledRule`, with the distributions that its noise implies."""

    def acceptance(self, draft: Draft, target_log_probs: Array) -> Array:
        """The probability over the noise that the target also chooses ``d``, given that the draft did.

        ``1 / Phi(p(d) / q(d))`` with ``Phi(r) = sum_z max(p(z), r q(z))``, [B, K].
        """
        target = target_log_probs[:, : draft.tokens_BK.shape[1]]
        log_p = _draft_log_probs(draft, target)
        phi = jnp.maximum(jnp.exp(log_p), jnp.exp(target - log_ratios(draft, target_log_probs)[..., None])).sum(-1)
        at_token = jnp.take_along_axis(target, draft.tokens_BK[..., None], axis=-1)[..., 0]
        return jnp.where(draft.is_drafted_BK & (at_token > -jnp.inf), 1 / phi, 0)

    def residual(self, draft: Draft, target_log_probs: Array, num_accepted_B: Array) -> Array:
        """The distribution of the target's choice given that it is not the drafted token, [B, V].

        With exponential races ``E_z / p(z)`` and ``E_z / q(z)`` over common ``E``, draft x and target y
        meet with probability ``q(y) p(x) (G(p(x)/q(x)) - G(p(y)/q(y)))+``, ``G(r) = int_0^r Phi^-2``.
        Phi is linear between the sorted ratios, so the integral is a sum over intervals. `verify` does
        not need it (the target simply chooses); analysis and tests do.
        """
        num_tokens = draft.tokens_BK.shape[1]
        q_BV = jnp.exp(at_rows(target_log_probs, num_accepted_B))
        if num_tokens == 0:
            return q_BV
        index_B = jnp.minimum(num_accepted_B, num_tokens - 1)
        p_BV = jnp.exp(at_rows(_draft_log_probs(draft, target_log_probs[:, :-1]), index_B))
        token_B1 = jnp.take_along_axis(draft.tokens_BK, index_B[:, None], axis=1)
        integral_BV = _coupling_integral(p_BV, q_BV)
        at_token_B1 = jnp.take_along_axis(integral_BV, token_B1, axis=1)
        weights_BV = q_BV * jnp.maximum(at_token_B1 - integral_BV, 0)
        return jnp.where((num_accepted_B < draft.num_drafted_B)[:, None], weights_BV, q_BV)


def _draft_log_probs(draft: Draft, like_BKV: Array) -> Array:
    """The draft's distributions, written out where they are one-hot."""
    if draft.log_probs_BRV is not None:
        return draft.log_probs_BRV
    is_token = jnp.arange(like_BKV.shape[-1])[None, None, :] == draft.tokens_BK[..., None]
    return jnp.where(is_token, 0.0, -jnp.inf).astype(like_BKV.dtype)


def _coupling_integral(p_BV: Array, q_BV: Array) -> Array:
    """``G(p/q)`` of `CoupledRule.residual` for every token, [B, V]."""
    ratios_BV = jnp.where(q_BV > 0, p_BV / jnp.where(q_BV > 0, q_BV, 1), jnp.inf)
    # Phi(r) >= r: beyond 1e18 the integral grows by less than 1e-18, and Phi^2 would overflow float32.
    ratios_BV = jnp.minimum(ratios_BV, 1e18)
    order_BV = jnp.argsort(ratios_BV, axis=-1)

    def sort(x):
        return jnp.take_along_axis(x, order_BV, axis=-1)

    end, p, q = sort(ratios_BV), sort(p_BV), sort(q_BV)
    # On the interval that ends at end[k], tokens before k count with q and the others with p.
    p_mass = jnp.flip(jnp.cumsum(jnp.flip(p, -1), axis=-1), -1)
    q_mass = jnp.cumsum(q, axis=-1) - q
    start = jnp.pad(end[:, :-1], ((0, 0), (1, 0)))
    pieces = (end - start) / ((p_mass + q_mass * start) * (p_mass + q_mass * end))
    integral = jnp.cumsum(pieces, axis=-1)
    return jnp.take_along_axis(integral, jnp.argsort(order_BV, axis=-1), axis=-1)
