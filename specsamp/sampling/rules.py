"""Acceptance rules: which drafted tokens stay, and what follows them.

A rule sees the drafted tokens ``d_1 .. d_K``, the draft's distributions ``p_1 .. p_K`` they were drawn from,
and the target's distributions ``q_1 .. q_{K+1}`` (``q_i`` and ``p_i`` condition on ``d_1 .. d_{i-1}``). It keeps
``n`` drafted tokens and appends one of the target's: a *correction* if ``n`` is short of what was
drafted, a *bonus* otherwise. Every rule here is split into

* an acceptance distribution, ``acceptance(draft, q) -> [B, K]`` probabilities,
* how independent yes/no answers with these probabilities become ``n``, ``num_accepted``,
* a residual distribution, ``residual(draft, q, n) -> [B, V]`` weights of the appended token,
* the draw, ``verify``, which adds the noise;

so the tests can enumerate the joint distribution of what is emitted without drawing anything.

**Token rule** (Chen et al., arXiv 2302.01318, algorithm 2). Keep ``d_i`` with probability
``min(1, q_i(d_i) / p_i(d_i))``, stop at the first rejection, and append a draw from
``norm((q_{n+1} - p_{n+1})+)``. With nothing left to subtract the same formula is the bonus, so
residual and bonus are one computation.

**Block rule** (Sun et al., arXiv 2403.10444, algorithm 2). Judges the block as a whole and never
keeps fewer tokens in expectation. With ``c_0 = 1``, ``c_i = min(1, c_{i-1} q_i(d_i) / p_i(d_i))`` and
``A_i = sum_x (c_i q_{i+1}(x) - p_{i+1}(x))+``, answer "is the prefix of length i kept?" with
probability ``h_i = A_i / (A_i + 1 - c_i)``, at the end of the draft with ``c``; keep the *longest*
prefix answered with yes, and append from ``norm((c_n q_{n+1} - p_{n+1})+)``.

**Coupled rule** (Gumbel coupling; arXiv 2408.07978). Draft and target take the argmax of their
log-probabilities plus the *same* Gumbel noise, addressed by absolute position. What is emitted is
always the target's own choice, so for one seed the speculative stream is the autoregressive one,
whatever the draft; a drafted token is accepted when the two choices agree.

Ratios are taken in log space and nothing is added to a denominator: an epsilon there is a bias.
A one-hot draft (prompt lookup) carries no distributions: ``log_probs_BKV`` is None and ``p_i(d_i) = 1``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

from specsamp.sampling.draw import draw
from specsamp.sampling.rng import Purpose, RoundKeys

Array = jax.Array
Draw = Callable[[Array, Array | int, int], Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """What a drafter proposes for one round."""

    tokens_BK: Array  # int32
    num_drafted_B: Array  # int32 in [0, K]; later tokens are padding
    log_probs_BKV: Array | None = None  # float32, the distribution each token was drawn from; None: one-hot

    @property
    def is_drafted_BK(self) -> Array:
        return jnp.arange(self.tokens_BK.shape[1])[None, :] < self.num_drafted_B[:, None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a rule makes of a draft, before stop tokens and budgets."""

    tokens_BT: Array  # int32 [B, K+1]: the accepted tokens, then one of the target's, then -1
    num_accepted_B: Array  # int32 in [0, K]

    @property
    def num_emitted_B(self) -> Array:
        return self.num_accepted_B + 1


class Rule(Protocol):
    """What the loop asks of a rule. Static and hashable; it owns the addresses of its noise.

    Attributes:
      exact: whether what is emitted follows the target's distribution.
    """

    exact: bool

    def draw_draft(self, keys: RoundKeys) -> Draw:
        """The way a drafter draws: ``(log_probs_BV, offset, drafter) -> tokens_B``."""

    def verify(self, draft: Draft, target_log_probs: Array, keys: RoundKeys) -> Verdict:
        """Decides; ``target_log_probs`` is float32 [B, K+1, V], warped and normalised."""


@dataclasses.dataclass(frozen=True)
class TokenRule:
    """Speculative sampling as published: token by token, lossless."""

    exact = True

    def draw_draft(self, keys: RoundKeys) -> Draw:
        """The drafter's way to draw: ``(log_probs_BV, offset, drafter) -> tokens_B``."""
        return _independent_draw(keys)

    def acceptance(self, draft: Draft, target_log_probs: Array) -> Array:
        """``min(1, q(d) / p(d))`` per drafted token, [B, K]; 0 where nothing was drafted."""
        return jnp.where(draft.is_drafted_BK, jnp.exp(jnp.minimum(_log_ratios(draft, target_log_probs), 0)), 0)

    def num_accepted(self, passed_BK: Array) -> Array:
        """The tokens before the first refusal, [B] int32."""
        return jnp.sum(jnp.cumprod(passed_BK, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)

    def residual(self, draft: Draft, target_log_probs: Array, num_accepted_B: Array) -> Array:
        """``(q - p)+`` after ``num_accepted_B`` tokens, [B, V], not normalised."""
        return _residual(draft, target_log_probs, num_accepted_B, scale_B=None)

    def verify(self, draft: Draft, target_log_probs: Array, keys: RoundKeys) -> Verdict:
        """Draws the verdict. ``target_log_probs`` is float32 [B, K+1, V], warped and normalised."""
        return _verify_independently(self, draft, target_log_probs, keys)


@dataclasses.dataclass(frozen=True)
class BlockRule:
    """Block verification: lossless, at least as many tokens in expectation as the token rule.

    The same as the token rule for K = 1, under greedy decoding, and wherever the two distributions are equal.
    """

    exact = True

    def draw_draft(self, keys: RoundKeys) -> Draw:
        """The drafter's way to draw: ``(log_probs_BV, offset, drafter) -> tokens_B``."""
        return _independent_draw(keys)

    def prefix_weights(self, draft: Draft, target_log_probs: Array) -> Array:
        """``log c_0 .. log c_K``, [B, K+1]: c_i is the probability that at least i tokens are kept."""
        log_ratios_BK = _log_ratios(draft, target_log_probs)
        log_c = [jnp.zeros_like(target_log_probs[:, 0, 0])]
        for i in range(log_ratios_BK.shape[1]):
            log_c.append(jnp.minimum(log_c[-1] + log_ratios_BK[:, i], 0))
        return jnp.stack(log_c, axis=1)

    def acceptance(self, draft: Draft, target_log_probs: Array) -> Array:
        """``h_1 .. h_K`` of the module's docstring, [B, K]; 0 where nothing was drafted."""
        num_tokens = draft.tokens_BK.shape[1]
        c_BK = jnp.exp(self.prefix_weights(draft, target_log_probs)[:, 1:])
        if num_tokens == 0:
            return c_BK
        last = jnp.arange(1, num_tokens + 1)[None, :] == draft.num_drafted_B[:, None]
        # A_i looks one position ahead, so it exists for every drafted token but the last.
        mass = self._mass_ahead(draft, target_log_probs, c_BK[:, :-1])
        mass_BK = jnp.pad(mass, ((0, 0), (0, 1)))
        total_BK = mass_BK + (1 - c_BK)  # in this order: at c = 1 the prefix is kept for sure
        h_BK = jnp.where(total_BK > 0, mass_BK / jnp.where(total_BK > 0, total_BK, 1), 1)
        return jnp.where(draft.is_drafted_BK, jnp.where(last, c_BK, h_BK), 0)

    def num_accepted(self, passed_BK: Array) -> Array:
        """The longest prefix that was answered with yes, [B] int32; a refusal before it is no matter."""
        positions = jnp.arange(1, passed_BK.shape[1] + 1, dtype=jnp.int32)
        return jnp.max(jnp.where(passed_BK, positions[None, :], 0), axis=1, initial=0)

    def residual(self, draft: Draft, target_log_probs: Array, num_accepted_B: Array) -> Array:
        """``(c_n q - p)+`` after ``n = num_accepted_B`` tokens, [B, V], not normalised."""
        log_c = self.prefix_weights(draft, target_log_probs)
        scale_B = jnp.exp(jnp.take_along_axis(log_c, num_accepted_B[:, None], axis=1)[:, 0])
        return _residual(draft, target_log_probs, num_accepted_B, scale_B)

    def verify(self, draft: Draft, target_log_probs: Array, keys: RoundKeys) -> Verdict:
        """Draws the verdict. ``target_log_probs`` is float32 [B, K+1, V], warped and normalised."""
        return _verify_independently(self, draft, target_log_probs, keys)

    def _mass_ahead(self, draft: Draft, target_log_probs: Array, c: Array) -> Array:
        """``A_1 .. A_{K-1}``, [B, K-1]."""
        target = target_log_probs[:, 1:-1]
        if draft.log_probs_BKV is None:  # the draft's whole mass lies on one token
            at_token = jnp.take_along_axis(target, draft.tokens_BK[:, 1:, None], axis=-1)[..., 0]
            return c * -jnp.expm1(at_token)
        return jnp.maximum(c[..., None] * jnp.exp(target) - jnp.exp(draft.log_probs_BKV[:, 1:]), 0).sum(-1)


@dataclasses.dataclass(frozen=True)
class CoupledRule:
    """Common random numbers: the emitted stream does not depend on the draft. Accepts less often."""

    exact = True

    def draw_draft(self, keys: RoundKeys) -> Draw:
        """The drafter's way to draw: the argmax under the noise that the target will use."""

        def draw_one(log_probs_BV: Array, offset: Array | int, drafter: int = 0) -> Array:
            del drafter  # every drafter meets the target's noise
            gumbels_BV = keys.position_gumbels(offset, log_probs_BV.shape[-1])
            return jnp.argmax(log_probs_BV + gumbels_BV, axis=-1).astype(jnp.int32)

        return draw_one

    def acceptance(self, draft: Draft, target_log_probs: Array) -> Array:
        """The probability over the noise that the target also chooses ``d``, given that the draft did.

        ``1 / Phi(p(d) / q(d))`` with ``Phi(r) = sum_z max(p(z), r q(z))``, [B, K].
        """
        target = target_log_probs[:, : draft.tokens_BK.shape[1]]
        log_p = _draft_log_probs(draft, target)
        phi = jnp.maximum(jnp.exp(log_p), jnp.exp(target - _log_ratios(draft, target_log_probs)[..., None])).sum(-1)
        at_token = jnp.take_along_axis(target, draft.tokens_BK[..., None], axis=-1)[..., 0]
        return jnp.where(draft.is_drafted_BK & (at_token > -jnp.inf), 1 / phi, 0)

    def num_accepted(self, passed_BK: Array) -> Array:
        """The tokens before the first disagreement, [B] int32."""
        return TokenRule().num_accepted(passed_BK)

    def residual(self, draft: Draft, target_log_probs: Array, num_accepted_B: Array) -> Array:
        """The distribution of the target's choice given that it is not the drafted token, [B, V].

        With exponential races ``E_z / p(z)`` and ``E_z / q(z)`` over common ``E``, draft x and target y
        meet with probability ``q(y) p(x) (G(p(x)/q(x)) - G(p(y)/q(y)))+``, ``G(r) = int_0^r Phi^-2``.
        Phi is linear between the sorted ratios, so the integral is a sum over intervals. `verify` does
        not need it (the target simply chooses); analysis and tests do.
        """
        num_tokens = draft.tokens_BK.shape[1]
        q_BV = jnp.exp(_at(target_log_probs, num_accepted_B))
        if num_tokens == 0:
            return q_BV
        index_B = jnp.minimum(num_accepted_B, num_tokens - 1)
        p_BV = jnp.exp(_at(_draft_log_probs(draft, target_log_probs[:, :-1]), index_B))
        token_B1 = jnp.take_along_axis(draft.tokens_BK, index_B[:, None], axis=1)
        integral_BV = _coupling_integral(p_BV, q_BV)
        at_token_B1 = jnp.take_along_axis(integral_BV, token_B1, axis=1)
        weights_BV = q_BV * jnp.maximum(at_token_B1 - integral_BV, 0)
        return jnp.where((num_accepted_B < draft.num_drafted_B)[:, None], weights_BV, q_BV)

    def verify(self, draft: Draft, target_log_probs: Array, keys: RoundKeys) -> Verdict:
        """Draws the verdict. ``target_log_probs`` is float32 [B, K+1, V], warped and normalised."""
        num_rows, vocab_size = target_log_probs.shape[1:]
        gumbels = [keys.position_gumbels(offset, vocab_size) for offset in range(num_rows)]
        choices_BT = jnp.argmax(target_log_probs + jnp.stack(gumbels, axis=1), axis=-1).astype(jnp.int32)
        num_accepted_B = self.num_accepted((choices_BT[:, :-1] == draft.tokens_BK) & draft.is_drafted_BK)
        emitted = jnp.arange(num_rows)[None, :] <= num_accepted_B[:, None]
        return Verdict(tokens_BT=jnp.where(emitted, choices_BT, -1), num_accepted_B=num_accepted_B)


def _independent_draw(keys: RoundKeys) -> Draw:
    def draw_one(log_probs_BV: Array, offset: Array | int, drafter: int = 0) -> Array:
        offsets_B1 = jnp.broadcast_to(jnp.asarray(offset), (log_probs_BV.shape[0], 1))
        uniforms_B2 = keys.uniforms(Purpose.DRAFT, offsets_B1, drafter)[:, 0]
        return draw(jnp.exp(log_probs_BV), uniforms_B2)

    return draw_one


def _verify_independently(
    rule: TokenRule | BlockRule, draft: Draft, target_log_probs: Array, keys: RoundKeys
) -> Verdict:
    batch, num_tokens = draft.tokens_BK.shape
    offsets_BK = jnp.broadcast_to(jnp.arange(num_tokens), (batch, num_tokens))
    uniforms_BK = keys.uniforms(Purpose.ACCEPT, offsets_BK)[..., 0]
    num_accepted_B = rule.num_accepted(uniforms_BK < rule.acceptance(draft, target_log_probs))
    weights_BV = rule.residual(draft, target_log_probs, num_accepted_B)
    # Equal distributions leave no residual and are never rejected, except by rounding: then fall back to the target.
    empty_B1 = ~(weights_BV.sum(-1, keepdims=True) > 0)  # and where the draft's distribution is NaN
    weights_BV = jnp.where(empty_B1, jnp.exp(_at(target_log_probs, num_accepted_B)), weights_BV)
    last_B = draw(weights_BV, keys.uniforms(Purpose.RESIDUAL, num_accepted_B[:, None])[:, 0])
    positions = jnp.arange(num_tokens + 1)[None, :]
    n_B1 = num_accepted_B[:, None]
    tokens_BT = jnp.where(positions < n_B1, jnp.pad(draft.tokens_BK, ((0, 0), (0, 1))), -1)
    return Verdict(tokens_BT=jnp.where(positions == n_B1, last_B[:, None], tokens_BT), num_accepted_B=num_accepted_B)


def _log_ratios(draft: Draft, target_log_probs: Array) -> Array:
    """``log q_i(d_i) - log p_i(d_i)``, [B, K]; ``-inf`` where the target excludes the token."""
    tokens = draft.tokens_BK[..., None]
    log_q = jnp.take_along_axis(target_log_probs[:, : tokens.shape[1]], tokens, axis=-1)[..., 0]
    if draft.log_probs_BKV is None:
        return log_q
    log_p = jnp.take_along_axis(draft.log_probs_BKV, tokens, axis=-1)[..., 0]
    return jnp.where(log_q == -jnp.inf, -jnp.inf, log_q - log_p)


def _residual(draft: Draft, target_log_probs: Array, num_accepted_B: Array, scale_B: Array | None) -> Array:
    """``(c q - p)+`` of the first position that was not accepted; q alone once the draft is used up."""
    target_BV = jnp.exp(_at(target_log_probs, num_accepted_B))
    num_tokens = draft.tokens_BK.shape[1]
    if num_tokens == 0:
        return target_BV
    refused_B1 = (num_accepted_B < draft.num_drafted_B)[:, None]
    index_B = jnp.minimum(num_accepted_B, num_tokens - 1)
    if draft.log_probs_BKV is None:
        token_B1 = jnp.take_along_axis(draft.tokens_BK, index_B[:, None], axis=1)
        draft_BV = (jnp.arange(target_BV.shape[-1])[None, :] == token_B1).astype(target_BV.dtype)
    else:
        draft_BV = jnp.exp(_at(draft.log_probs_BKV, index_B))
    scaled_BV = target_BV if scale_B is None else scale_B[:, None] * target_BV
    return jnp.where(refused_B1, jnp.maximum(scaled_BV - draft_BV, 0), target_BV)


def _at(rows_BTV: Array, index_B: Array) -> Array:
    """Row ``index_B`` of each batch entry, [B, V]."""
    return jnp.take_along_axis(rows_BTV, index_B[:, None, None], axis=1)[:, 0]


def _draft_log_probs(draft: Draft, like_BKV: Array) -> Array:
    """The draft's distributions, written out where they are one-hot."""
    if draft.log_probs_BKV is not None:
        return draft.log_probs_BKV
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
