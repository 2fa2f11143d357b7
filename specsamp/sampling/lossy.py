"""Lossy rules: they accept more tokens than the target's distribution allows, and measure the
resulting bias.

    completions = generate(pair, prompts, sampling=chain(temperature(1.0)), rule=Bounded(EARS(0.3),
    tv_per_token=0.01))

Rules have the methods of `specsamp.sampling.rejection`; q is the target's distribution and p the
draft's.

* `EARS` (arXiv 2512.13194) accepts with ``min(1, q/p + beta (1 - max q))``: more if the target is
less certain.
* `Lenience` (Leviathan et al., arXiv 2211.17192, appendix A.5) accepts with ``min(1, q / (l p))``.
* `Typical` (Medusa, arXiv 2401.10774, section 2.3.1) accepts where ``q > min(epsilon, delta
exp(-H(q)))``.
* `JointThreshold` (MTAD, arXiv 2407.09722) accepts while the joint probability of the tokens is
above ``tau`` times the draft's.
* `Bounded` mixes one of these rules with the exact rule, so that no token costs more than a budget.

**The meter.** A rule verifies token by token, accepts x with probability a(x), and replaces a
rejected token by a draw from r. If all earlier tokens were accepted, a token has the distribution
``o = p a + (1 - sum p a) r``. Its cost is the total variation ``sum (o - q)+``. With r = norm((q -
p)+) and a at least min(1, q/p), the cost ``sum (p a - q)+`` equals the gain in acceptance.

Under greedy decoding these rules emit the target's tokens: q is one-hot, and no other token is
accepted.
"""

from __future__ import annotations

import abc
import dataclasses
import math

import jax
import jax.numpy as jnp

from specsamp import validate
from specsamp.arrays import pad_axis
from specsamp.sampling.rejection import RejectionRule, TokenRule
from specsamp.sampling.rules import Draft, Meter, at_tokens, divide, take_row

Array = jax.Array


class LossyTokenRule(RejectionRule):
    """Base of the lossy rules, which verify token by token; subclasses define acceptance and
    replacement.
    """

    exact = False
    metered = True
    num_accepted = TokenRule.num_accepted

    @abc.abstractmethod
    def accepts(self, log_q: Array, log_p: Array) -> Array:
        """Returns the probability that each token is accepted if it is drafted and all earlier
        tokens were accepted, ``[..., V]``.

        Args:
          log_q: float32 ``[..., V]``, the target's distribution, warped and normalised.
          log_p: float32 ``[..., V]``, the draft's distribution; one-hot if the token was not drawn.
        """

    def replaces(self, log_q: Array, log_p: Array) -> Array:
        """Returns weights ``[..., V]``, not normalised, of the token after a rejection: ``(q -
        p)+``.
        """
        return jnp.maximum(jnp.exp(log_q) - jnp.exp(log_p), 0)

    def given(self, draft: Draft, target_log_probs: Array) -> LossyTokenRule:
        """Returns the rule whose methods get all rows ``[B, K, V]`` of a draft; for rules that look
        at earlier tokens.
        """
        return self

    def acceptance(self, draft: Draft, target_log_probs: Array) -> Array:
        """Returns `accepts` at the drafted tokens, ``[B, K]``; 0 where nothing was drafted."""
        rule, log_q, log_p = self._judged(draft, target_log_probs)
        accepted_BK = at_tokens(rule.accepts(log_q, log_p), draft.tokens_BK)
        return jnp.where(draft.is_drafted_BK, accepted_BK, 0)

    def residual(self, draft: Draft, target_log_probs: Array, num_accepted_B: Array) -> Array:
        """Returns `replaces` after ``num_accepted_B`` tokens; the target's distribution if all are
        accepted, ``[B, V]``.
        """
        log_q_BV, K = take_row(target_log_probs, num_accepted_B), draft.tokens_BK.shape[1]
        if K == 0:
            return jnp.exp(log_q_BV)
        rule, log_q, log_p = self._judged(draft, target_log_probs)
        replaced_BV = take_row(rule.replaces(log_q, log_p), jnp.minimum(num_accepted_B, K - 1))
        rejected_B1 = (num_accepted_B < draft.num_drafted_B)[:, None]
        return jnp.where(rejected_B1, replaced_BV, jnp.exp(log_q_BV))

    def meter(self, draft: Draft, target_log_probs: Array, num_accepted_B: Array) -> Meter:
        """Returns the total variation of `output` at each emitted token, and the acceptance beyond
        ``sum min(p, q)``.
        """
        rule, log_q, log_p = self._judged(draft, target_log_probs)
        exact_BK = jnp.exp(jnp.minimum(log_q, log_p)).sum(-1)
        extra_BK = (jnp.exp(log_p) * rule.accepts(log_q, log_p)).sum(-1) - exact_BK
        counts_BK = draft.is_drafted_BK & (
            jnp.arange(draft.tokens_BK.shape[1])[None, :] <= num_accepted_B[:, None]
        )

        def padded(x_BK: Array) -> Array:
            """Adds a column for the appended token, and sets tokens that were not drafted or are
            not emitted to 0.
            """
            return pad_axis(jnp.where(counts_BK, x_BK, 0), 1).astype(log_q.dtype)

        return Meter(variation=padded(rule.variation(log_q, log_p)), extra=padded(extra_BK))

    def _judged(self, draft: Draft, target_log_probs: Array) -> tuple[LossyTokenRule, Array, Array]:
        """Returns the `given` rule, and both distributions of all rows."""
        rule = self.given(draft, target_log_probs)
        return rule, target_log_probs[:, :-1], draft.laws(target_log_probs)

    def output(self, log_q: Array, log_p: Array) -> Array:
        """Returns the distribution of a token, given that all earlier tokens were accepted, ``[...,
        V]``.
        """
        return jnp.exp(log_p) * self.accepts(log_q, log_p) + self.replaced(log_q, log_p)

    def replaced(self, log_q: Array, log_p: Array) -> Array:
        """Returns the probabilities that the drafted token is rejected and replaced by each token,
        ``[..., V]``.
        """
        rejected = 1 - (jnp.exp(log_p) * self.accepts(log_q, log_p)).sum(-1, keepdims=True)
        weights = self.replaces(log_q, log_p)
        # As `verify` draws.
        norm = divide(weights, weights.sum(-1, keepdims=True), jnp.exp(log_q))
        return jnp.maximum(rejected, 0) * norm

    def variation(self, log_q: Array, log_p: Array) -> Array:
        """Returns the total variation between `output` and the target's distribution, ``[...]``."""
        return jnp.maximum(self.output(log_q, log_p) - jnp.exp(log_q), 0).sum(-1)


@dataclasses.dataclass(frozen=True)
class EARS(LossyTokenRule):
    """Accepts with ``min(1, q/p + beta (1 - max q))``; unlike the paper, never tokens that the
    target excludes.

    Attributes:
      beta: in [0, 1]; usually 0.3 to 0.5.
    """

    beta: float = 0.3

    def __post_init__(self):
        validate.number("EARS's beta", self.beta, 0, 1)

    def accepts(self, log_q: Array, log_p: Array) -> Array:
        tolerance = self.beta * (1 - jnp.exp(log_q.max(-1, keepdims=True)))
        accepted = jnp.minimum(_exact_accepts(log_q, log_p) + tolerance, 1)
        return jnp.where(log_q == -jnp.inf, 0, accepted)


@dataclasses.dataclass(frozen=True)
class Lenience(LossyTokenRule):
    """Accepts with ``min(1, q / (lenience p))``; replaces a rejected token like the exact rule,
    which costs least.

    Attributes:
      lenience: in (0, 1]; 1 is exact.
    """

    lenience: float = 0.5

    def __post_init__(self):
        validate.number("Lenience's lenience", self.lenience, 0, 1, above=True)

    def accepts(self, log_q: Array, log_p: Array) -> Array:
        return _exact_accepts(log_q, log_p, log_scale=-math.log(self.lenience))


@dataclasses.dataclass(frozen=True)
class Typical(LossyTokenRule):
    """Accepts a token if ``q > min(epsilon, delta exp(-H(q)))``, else draws from the target.

    Published for drafts of most probable tokens; here drafts may also be sampled. If the rule
    accepts less than the exact rule, ``extra`` of its meter is negative.

    Attributes:
      epsilon: in (0, 1].
      delta: in (0, 1], usually the square root of epsilon.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self):
        validate.number("Typical's epsilon", self.epsilon, 0, 1, above=True)
        validate.number("Typical's delta", self.delta, 0, 1, above=True)

    def accepts(self, log_q: Array, log_p: Array) -> Array:
        q = jnp.exp(log_q)
        entropy = -jnp.sum(jnp.where(q > 0, q * log_q, 0), axis=-1, keepdims=True)
        return (q > jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))).astype(q.dtype)

    def replaces(self, log_q: Array, log_p: Array) -> Array:
        return jnp.exp(log_q)


@dataclasses.dataclass(frozen=True)
class JointThreshold(LossyTokenRule):
    """Accepts a token if ``prod q_i(d_i) / p_i(d_i) > tau`` up to it, else draws from the target
    (MTAD).

    Published with the most probable draft of a search, `BeamDrafter`, which comes with its
    probabilities p in ``Draft.scores_BK``; else p is the distribution that a token was drawn from,
    or 1 for one-hot drafts. A draft ends at the first token that fails. (In the paper a later
    success makes up for it; then the law of a token depends on the tokens after it, and neither
    meter nor budget would be that of a token.)

    Attributes:
      tau: in (0, 1].
      margin: within a round, the logarithm of the product before each token, ``[B, K, 1]``.
    """

    tau: float = 0.5
    margin: Array | float = dataclasses.field(default=0.0, compare=False, repr=False)

    def __post_init__(self):
        validate.number("JointThreshold's tau", self.tau, 0, 1, above=True)

    def given(self, draft: Draft, target_log_probs: Array) -> JointThreshold:
        drawn_BK = at_tokens(draft.laws(target_log_probs), draft.tokens_BK)
        scores_BK = drawn_BK if draft.scores_BK is None else draft.scores_BK
        ratios_BK = at_tokens(target_log_probs[:, :-1], draft.tokens_BK) - scores_BK
        ratios_BK = jnp.where(draft.is_drafted_BK, ratios_BK, 0)
        before_BK = jnp.cumsum(pad_axis(ratios_BK, 0, before=1)[:, :-1], axis=1)
        return dataclasses.replace(self, margin=(before_BK + drawn_BK - scores_BK)[..., None])

    def accepts(self, log_q: Array, log_p: Array) -> Array:
        return (self.margin + log_q - log_p > math.log(self.tau)).astype(log_q.dtype)

    def replaces(self, log_q: Array, log_p: Array) -> Array:
        return jnp.exp(log_q)


@dataclasses.dataclass(frozen=True)
class Bounded(LossyTokenRule):
    """Mixes a lossy rule with the exact rule, so that each token costs at most a budget.

    If the rule costs a total variation v above the budget b, it is applied with probability b / v.
    The mixture costs ``min(v, b)``, since the exact rule costs nothing. So n tokens cost at most n
    b.

    Attributes:
      rule: `EARS`, `Lenience`, `Typical`, `JointThreshold`, or another `LossyTokenRule`.
      tv_per_token: the budget, in [0, 1].
    """

    rule: LossyTokenRule
    tv_per_token: float = 0.01

    def __post_init__(self):
        validate.number("Bounded's tv_per_token", self.tv_per_token, 0, 1)
        if not isinstance(self.rule, LossyTokenRule) or isinstance(self.rule, Bounded):
            raise ValueError(
                "Bounded takes a lossy rule that verifies token by token, such as EARS(0.3) or "
                f"Typical(); got {self.rule!r}"
            )

    def accepts(self, log_q: Array, log_p: Array) -> Array:
        share = self._share(log_q, log_p)
        return share * self.rule.accepts(log_q, log_p) + (1 - share) * _exact_accepts(log_q, log_p)

    def replaces(self, log_q: Array, log_p: Array) -> Array:
        """Returns the probabilities that the drafted token is rejected and replaced by each token,
        ``[..., V]``.
        """
        share = self._share(log_q, log_p)
        return share * self.rule.replaced(log_q, log_p) + (1 - share) * super().replaces(
            log_q, log_p
        )

    def given(self, draft: Draft, target_log_probs: Array) -> Bounded:
        return dataclasses.replace(self, rule=self.rule.given(draft, target_log_probs))

    def _share(self, log_q: Array, log_p: Array) -> Array:
        """Returns the probability with which the lossy rule is applied, ``[..., 1]``."""
        variation = self.rule.variation(log_q, log_p)[..., None]
        is_above = variation > self.tv_per_token
        return jnp.where(is_above, self.tv_per_token / jnp.where(is_above, variation, 1), 1)


def _exact_accepts(log_q: Array, log_p: Array, log_scale: float = 0.0) -> Array:
    """Returns ``min(1, scale q / p)``, ``[..., V]``; 1 where p is 0."""
    return jnp.where(log_p == -jnp.inf, 1, jnp.exp(jnp.minimum(log_q - log_p + log_scale, 0)))
