"""Lossless rejection rules for chains: token by token, and the block as a whole.

As in `specsamp.sampling.rules`, ``d_i`` is the i-th drafted token, ``p_i`` the draft's distribution
that it was drawn from, ``q_i`` the target's distribution at the same position, and ``n`` the number
of drafted tokens that are kept. These rules, and the lossy rules of `specsamp.sampling.lossy`, run
an independent random test for each drafted token. The tests that pass determine n. A rule has four
methods:

* ``acceptance(draft, q) -> [B, K]``: the probability that each test passes,
* ``num_accepted(passed) -> [B]``: n, given which tests passed,
* ``residual(draft, q, n) -> [B, V]``: the weights of the token that is appended after n tokens,
* ``verify``: runs the tests and draws the appended token.

The first three are deterministic, so tests of this package can enumerate the joint distribution of
the emitted tokens.

**Token rule** (Chen et al., arXiv 2302.01318, algorithm 2). Keep ``d_i`` with probability ``min(1,
q_i(d_i) / p_i(d_i))``, stop at the first rejection, and append a draw from ``norm((q_{n+1} -
p_{n+1})+)``. If the whole draft is kept, ``p_{n+1}`` is taken as 0, and the same formula draws the
bonus token: residual and bonus are one computation.

**Block rule** (Sun et al., arXiv 2403.10444, algorithm 2). Verifies the block as a whole and never
keeps fewer tokens in expectation. With ``c_0 = 1``, ``c_i = min(1, c_{i-1} q_i(d_i) / p_i(d_i))``
and ``A_i = sum_x (c_i q_{i+1}(x) - p_{i+1}(x))+``, the test of the prefix of length i passes with
probability ``h_i = A_i / (A_i + 1 - c_i)``, and the test of the whole draft with its ``c_i``. Keep
the *longest* prefix whose test passes, and append a draw from ``norm((c_n q_{n+1} - p_{n+1})+)``,
or from ``q_{n+1}`` after the whole draft.

Ratios are taken in log space and nothing is added to a denominator: an epsilon there is a bias. A
one-hot draft (prompt lookup) carries no distributions: ``log_probs_BRV`` is None and ``p_i(d_i) =
1``.
"""

import abc
import dataclasses

import jax
import jax.numpy as jnp

from specsamp.arrays import pad_axis
from specsamp.sampling.draw import draw
from specsamp.sampling.rng import Purpose, RoundKeys
from specsamp.sampling.rules import (
    Draft,
    Meter,
    Rule,
    TargetDistributions,
    Verdict,
    at_tokens,
    count_leading,
    divide,
    make_verdict,
    take_row,
)

Array = jax.Array


class RejectionRule(Rule):
    """Base of the rules that test each drafted token at random and sample the next token from a
    residual.
    """

    @abc.abstractmethod
    def acceptance(self, draft: Draft, target_log_probs: Array) -> Array:
        """Returns the probability that the test of each drafted token passes, ``[B, K]``; 0 where
        nothing was drafted.

        Args:
          draft: a chain of K tokens.
          target_log_probs: float32 ``[B, K+1, V]``, warped and normalised.
        """

    @abc.abstractmethod
    def num_accepted(self, passed_BK: Array) -> Array:
        """Returns the number of accepted tokens, ``[B]`` int32, given which tests passed, bool
        ``[B, K]``.
        """

    @abc.abstractmethod
    def residual(self, draft: Draft, target_log_probs: Array, num_accepted_B: Array) -> Array:
        """Returns weights ``[B, V]``, not normalised, of the token after ``num_accepted_B``
        accepted tokens.
        """

    def meter(self, draft: Draft, target_log_probs: Array, num_accepted_B: Array) -> Meter | None:
        """Returns the cost and the gain of a lossy rule; None, without any computation, for an
        exact rule.
        """
        return None

    def sample(self, log_probs_BV: Array, keys: RoundKeys, offset: Array | int) -> Array:
        """Draws a drafted token per row with noise addressed by ``offset``."""
        offsets_B1 = jnp.broadcast_to(jnp.asarray(offset), (log_probs_BV.shape[0], 1))
        uniforms_B2 = keys.uniforms(Purpose.DRAFT, offsets_B1)[:, 0]
        return draw(jnp.exp(log_probs_BV), uniforms_B2)

    def verify(self, draft: Draft, target: TargetDistributions, keys: RoundKeys) -> Verdict:
        """Tests the drafted tokens and draws the appended token."""
        target_log_probs = target.all()
        uniforms_BK = keys.accept_uniforms(*draft.tokens_BK.shape)
        num_accepted_B = self.num_accepted(uniforms_BK < self.acceptance(draft, target_log_probs))
        weights_BV = self.residual(draft, target_log_probs, num_accepted_B)
        # Where draft and target are equal, the residual is empty. If rounding rejects there, draw
        # from the target.
        # Also where the draft's distribution is NaN.
        empty_B1 = ~(weights_BV.sum(-1, keepdims=True) > 0)
        weights_BV = jnp.where(
            empty_B1, jnp.exp(take_row(target_log_probs, num_accepted_B)), weights_BV
        )
        last_B = draw(weights_BV, keys.uniforms(Purpose.RESIDUAL, num_accepted_B[:, None])[:, 0])
        return make_verdict(
            draft, num_accepted_B, last_B, meter=self.meter(draft, target_log_probs, num_accepted_B)
        )


@dataclasses.dataclass(frozen=True)
class TokenRule(RejectionRule):
    """Verifies token by token, as speculative sampling was published; lossless."""

    def acceptance(self, draft: Draft, target_log_probs: Array) -> Array:
        """Returns ``min(1, q(d) / p(d))`` per drafted token, ``[B, K]``; 0 where nothing was
        drafted.
        """
        return jnp.where(
            draft.is_drafted_BK, jnp.exp(jnp.minimum(log_ratios(draft, target_log_probs), 0)), 0
        )

    def num_accepted(self, passed_BK: Array) -> Array:
        """Returns the number of tokens before the first rejection, ``[B]`` int32."""
        return count_leading(passed_BK)

    def residual(self, draft: Draft, target_log_probs: Array, num_accepted_B: Array) -> Array:
        """Returns ``(q - p)+`` after ``num_accepted_B`` tokens, ``[B, V]``, not normalised."""
        return _residual(draft, target_log_probs, num_accepted_B, scale_B=None)


@dataclasses.dataclass(frozen=True)
class BlockRule(RejectionRule):
    """Verifies the block as a whole; lossless, at least as many tokens in expectation as the token
    rule.

    The same as the token rule for K = 1, under greedy decoding, and wherever the two distributions
    are equal.
    """

    def prefix_weights(self, draft: Draft, target_log_probs: Array) -> Array:
        """Returns ``log c_0 .. log c_K``, ``[B, K+1]``: c_i is the probability that at least i
        tokens are kept.
        """
        log_ratios_BK = log_ratios(draft, target_log_probs)
        log_c = [jnp.zeros_like(target_log_probs[:, 0, 0])]
        for i in range(log_ratios_BK.shape[1]):
            log_c.append(jnp.minimum(log_c[-1] + log_ratios_BK[:, i], 0))
        return jnp.stack(log_c, axis=1)

    def acceptance(self, draft: Draft, target_log_probs: Array) -> Array:
        """Returns ``h_1 .. h_K`` of the module's docstring, ``[B, K]``; 0 where nothing was
        drafted.
        """
        K = draft.tokens_BK.shape[1]
        c_BK = jnp.exp(self.prefix_weights(draft, target_log_probs)[:, 1:])
        if K == 0:
            return c_BK
        last = jnp.arange(1, K + 1)[None, :] == draft.num_drafted_B[:, None]
        # A_i looks one position ahead, so it exists for every drafted token but the last.
        mass_BK = pad_axis(self._mass_ahead(draft, target_log_probs, c_BK[:, :-1]), 1)
        total_BK = mass_BK + (1 - c_BK)  # the brackets make h exactly 1 at c = 1
        h_BK = divide(mass_BK, total_BK, 1)
        return jnp.where(draft.is_drafted_BK, jnp.where(last, c_BK, h_BK), 0)

    def num_accepted(self, passed_BK: Array) -> Array:
        """Returns the length of the longest prefix whose test passed, ``[B]`` int32."""
        positions = jnp.arange(1, passed_BK.shape[1] + 1, dtype=jnp.int32)
        return jnp.max(jnp.where(passed_BK, positions[None, :], 0), axis=1, initial=0)

    def residual(self, draft: Draft, target_log_probs: Array, num_accepted_B: Array) -> Array:
        """Returns ``(c_n q - p)+`` after ``n = num_accepted_B`` tokens, ``[B, V]``, not
        normalised.
        """
        log_c = self.prefix_weights(draft, target_log_probs)
        scale_B = jnp.exp(take_row(log_c, num_accepted_B))
        return _residual(draft, target_log_probs, num_accepted_B, scale_B)

    def _mass_ahead(self, draft: Draft, target_log_probs: Array, c: Array) -> Array:
        """Returns ``A_1 .. A_{K-1}``, ``[B, K-1]``."""
        target = target_log_probs[:, 1:-1]
        if draft.log_probs_BRV is None:  # the draft's whole mass lies on one token
            return c * -jnp.expm1(at_tokens(target, draft.tokens_BK[:, 1:]))
        return jnp.maximum(
            c[..., None] * jnp.exp(target) - jnp.exp(draft.log_probs_BRV[:, 1:]), 0
        ).sum(-1)


def log_ratios(draft: Draft, target_log_probs: Array) -> Array:
    """Returns ``log q_i(d_i) - log p_i(d_i)``, ``[B, K]``; ``-inf`` where the target excludes the
    token.
    """
    tokens_BK = draft.tokens_BK
    log_q = at_tokens(target_log_probs[:, : tokens_BK.shape[1]], tokens_BK)
    if draft.log_probs_BRV is None:
        return log_q
    log_p = at_tokens(draft.log_probs_BRV, tokens_BK)
    return jnp.where(log_q == -jnp.inf, -jnp.inf, log_q - log_p)


def _residual(
    draft: Draft, target_log_probs: Array, num_accepted_B: Array, scale_B: Array | None
) -> Array:
    """Returns ``(c q - p)+`` of the first position that was not accepted; q alone once the draft is
    used up.
    """
    target_BV = jnp.exp(take_row(target_log_probs, num_accepted_B))
    K = draft.tokens_BK.shape[1]
    if K == 0:
        return target_BV
    rejected_B1 = (num_accepted_B < draft.num_drafted_B)[:, None]
    draft_BV = draft.probs_at(num_accepted_B)
    if draft_BV is None:
        token_B = take_row(draft.tokens_BK, jnp.minimum(num_accepted_B, K - 1))
        draft_BV = jax.nn.one_hot(token_B, target_BV.shape[-1], dtype=target_BV.dtype)
    scaled_BV = target_BV if scale_B is None else scale_B[:, None] * target_BV
    return jnp.where(rejected_B1, jnp.maximum(scaled_BV - draft_BV, 0), target_BV)
