"""Adaptive draft lengths: the early end of a draft, and the length of each sequence's next draft.

    generate(pair, prompts, draft_length=Adaptive(lengths=(8,), stop=Confidence(0.3)))
    generate(pair, prompts, draft_length=Adaptive(lengths=(0, 1, 2, 4, 8), costs_ms=(5.1, 7.0, 7.6,
    8.9, 11.4), usual=4))

Whether token k is submitted depends on earlier tokens only: this keeps adaptive drafts exact. A
*stop* depends on the tokens of a draft up to k and may cancel token k + 1. The *length* of a round
is chosen before the round begins, from the acceptance in the earlier rounds of the sequence. It
maximises the tokens per time

    E(alpha, k) / costs_ms[k],    E(alpha, k) = 1 + alpha + ... + alpha^k

(Leviathan et al., arXiv 2211.17192; goodput of Liu et al., arXiv 2406.14066). A length of 0 is
plain decoding.

A draft ends at its first rejection. So the maximum-likelihood estimate of the acceptance is
accepted / (accepted + rejections); accepted / drafted would be too small. The counts of earlier
rounds decay.

A length depends neither on other sequences nor on a clock. But a round is as wide as its longest
draft, and a batch ends with its slowest sequence. So in a batch, a sequence uses `Adaptive.usual`
until its own acceptance clearly favours a shorter draft. It never takes a longer draft, except the
shortest one if the usual length is 0. With the same seed, the tokens of a sequence thus depend on
the number of sequences in the batch, and on nothing else in the batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specsamp import validate
from specsamp.pytrees import pytree

Array = jax.Array

LENGTHS = (0, 1, 2, 4, 8)
LONGEST_PAUSE = 16  # times the first pause
# The gain in tokens per time from which a length replaces the usual length. A single sequence loses
# little by trying. In a batch, a sequence that drafts less than the rest saves no time, falls
# behind, and delays the end of the batch.
MARGIN, MARGIN_OF_SEVERAL = 0.05, 0.5
PAUSE = 8  # rounds, for each sequence of the batch
MOST_CERTAIN = 0.999  # the largest acceptance for which 1 - alpha is accurate enough in float32


class Stop:
    """A condition that ends a draft early; a subclass is a frozen dataclass of numbers.

    It is called after every drafted token except the last, and decides about the next token alone.
    """

    def goes_on(self, log_probs_BV: Array, log_prob_B: Array) -> Array:
        """Returns whether to draft the next token, bool ``[B]``.

        Args:
          log_probs_BV: float32, the warped draft distribution that the last token was drawn from;
            for greedy rows the distribution before warping, since the warped distribution is
            one-hot.
          log_prob_B: float32, the log-probability of all tokens of the draft so far, under these
            distributions.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no goes_on(): define when a draft goes on"
        )


@dataclasses.dataclass(frozen=True)
class Entropy(Stop):
    """Goes on while ``1 - sqrt(weight * H) >= least``, H the entropy in nats (AdaEDL, arXiv
    2410.18351).

    The left side is an empirical lower bound of the acceptance. AdaEDL drops the token whose
    distribution is too uncertain. Here this token is kept and the next token is cancelled: its
    draft call has been made, and it may be accepted.
    """

    least: float = 0.4  # in [0, 1]
    weight: float = 0.2  # above 0

    def __post_init__(self):
        validate.number("Entropy's least", self.least, 0, 1)
        validate.number("Entropy's weight", self.weight, 0, math.inf, above=True)

    def goes_on(self, log_probs_BV, log_prob_B):
        probs_BV = jnp.exp(log_probs_BV)
        entropy_B = -jnp.sum(jnp.where(probs_BV > 0, probs_BV * log_probs_BV, 0), axis=-1)
        return 1 - jnp.sqrt(self.weight * entropy_B) >= self.least


@dataclasses.dataclass(frozen=True)
class Confidence(Stop):
    """Goes on while the draft's own probability of all its tokens so far is at least ``least``."""

    least: float = 0.3  # in [0, 1]

    def __post_init__(self):
        validate.number("Confidence's least", self.least, 0, 1)

    def goes_on(self, log_probs_BV, log_prob_B):
        return log_prob_B >= jnp.log(self.least)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adaptive:
    """An adaptive draft length: the argument ``draft_length`` of `generate`.

    Its numbers are compiled into the loop, so keep the numbers of a calibration: new numbers
    compile a new program.

    Attributes:
      lengths: the draft lengths to choose from, ascending, 0 or more; the last is the drafter's K.
      costs_ms: for each length, the milliseconds, not falling, of a round in which all sequences
        draft that many tokens. `specsamp.analysis.draft_length.calibrate` measures them,
        `Costs.round_ms` forecasts them. Only ratios matter.
      stop: ends drafts before their length; None: every draft has its full length.
      usual: the best length for the batch as a whole, as `specsamp.analysis.draft_length.calibrate`
        measures it. A sequence uses it until another length is clearly better. Default: the best
        length if ``acceptance`` is right.
      acceptance: the prior of the acceptance of a drafted token, before any token was verified.
      trust: the weight of this prior, as a number of verified tokens. With less, chance pauses
        sequences that draft well.
      decay: the factor by which the counts of earlier rounds shrink in a round that drafts.
      margin: the relative gain in tokens per time from which a length replaces the usual length.
        Default: 0.05, and 0.5 in batches, where a sequence that drafts less than the rest only
        falls behind.
      pause: rounds without a draft after which drafting is tried again (`trial`). The pause
        doubles, up to sixteenfold, as long as drafting does not pay. Default: 8 for each sequence
        of the batch.
      longest: the longest draft of a sequence, besides the usual length. Default: the last length;
        in batches, the usual length, or the shortest length above 0 if the usual length is 0.
      depths: for each length, the largest number of accepted tokens, which is smaller in a tree;
        None: the lengths.

    Raises:
      ValueError: naming the value and the fix.
    """

    lengths: tuple[int, ...] = LENGTHS
    costs_ms: tuple[float, ...] | None = None
    stop: Stop | None = None
    usual: int | None = None
    acceptance: float = 0.7
    trust: float = 12.0
    decay: float = 0.98
    margin: float | None = None
    pause: int | None = None
    longest: int | None = None
    depths: tuple[int, ...] | None = None

    def __post_init__(self):
        lengths = validate.integers("lengths", self.lengths)
        if not lengths or lengths[-1] < 1 or sorted(set(lengths)) != lengths:
            raise ValueError(
                f"lengths must rise, from 0 or more to at least 1, such as {LENGTHS}; got "
                f"{self.lengths!r}"
            )
        object.__setattr__(self, "lengths", tuple(lengths))
        if self.stop is not None:
            validate.instance("stop", self.stop, Stop, "Entropy() or Confidence(0.3)")
        self._check_costs()
        for name in ("usual", "longest"):
            if getattr(self, name) is not None:
                validate.choice(name, validate.integer(name, getattr(self, name)), self.lengths)
        validate.number("acceptance", self.acceptance, 0, 1)
        validate.number("trust", self.trust, 0, math.inf, above=True)
        validate.number("decay", self.decay, 0, 1)
        if self.margin is not None:
            validate.number("margin", self.margin, 0, math.inf)
        if self.pause is not None:
            validate.integer("pause", self.pause, 1, 2**27)

    def _check_costs(self) -> None:
        """Raises ValueError if ``costs_ms`` does not fit the lengths, or if nothing adapts."""
        count = len(self.lengths)
        if count == 1 and self.stop is None:
            raise ValueError(
                f"lengths={self.lengths!r} without a stop never adapts: give stop=Confidence(), or "
                "a number"
            )
        if count == 1 and self.costs_ms is None:
            return
        costs = tuple(self.costs_ms) if hasattr(self.costs_ms, "__len__") else ()
        if len(costs) != count:
            raise ValueError(
                f"costs_ms must be {count} numbers, the milliseconds of a round with each of "
                f"lengths={self.lengths!r}, as specsamp.analysis.draft_length.calibrate measures "
                f"them; got {self.costs_ms!r}"
            )
        for i, cost in enumerate(costs):
            validate.number(f"costs_ms[{i}]", cost, 0, above=True)
        if sorted(costs) != list(costs):
            raise ValueError(
                f"costs_ms must not fall, got {self.costs_ms!r}: measure again, with more repeats"
            )
        object.__setattr__(self, "costs_ms", costs)

    @property
    def K(self) -> int:
        """Returns the largest length, which is the drafter's K."""
        return self.lengths[-1]

    @property
    def widths(self) -> tuple[int, ...]:
        """Returns the lengths that rounds are compiled for; a round uses the smallest width that
        holds all drafts.

        On a CPU, where each scored position costs time, all lengths; elsewhere the last one, and 0
        if it is a length.
        """
        if jax.default_backend() == "cpu":
            return self.lengths
        return (0, self.K) if self.lengths[0] == 0 else (self.K,)

    @property
    def shortest(self) -> int:
        """Returns the smallest length above 0."""
        return next(length for length in self.lengths if length)

    @property
    def trial(self) -> int:
        """Returns the length that is tried after a pause, with the defaults filled in: the best for
        ``acceptance``.

        A longer draft tells more about the acceptance than the shortest draft, and loses little
        where it is accepted.
        """
        most = max(self.longest, self.usual) or self.shortest
        return self._best_of([length for length in self.lengths if 0 < length <= most])

    def _best_of(self, lengths: Sequence[int]) -> int:
        """Returns the length with the most expected tokens per time if ``acceptance`` is right."""
        goodput_L = self._goodput(np.float64([self.acceptance]))[0]
        return max(lengths, key=dict(zip(self.lengths, goodput_L)).get)

    def _goodput(self, rate_B: Array | np.ndarray) -> Array | np.ndarray:
        """Returns the expected tokens per time with each length, ``[B, L]``, given the acceptance
        of each row.
        """
        costs_L = np.array(self.costs_ms or [1.0], rate_B.dtype)
        return tokens_per_round(rate_B, self.depths or self.lengths) / costs_L[None, :]

    def for_batch(self, batch: int, depths: tuple[int, ...] | None = None) -> Adaptive:
        """Returns these numbers with their defaults filled in, for ``batch`` sequences that are
        decoded together.

        Args:
          depths: the depth of a draft of each length, if these numbers have none; None: the
            lengths.
        """
        depths = self.depths or (None if depths == self.lengths else depths)
        whole = dataclasses.replace(self, depths=depths)
        usual = whole._best_of(self.lengths) if self.usual is None else self.usual
        defaults = dict(
            usual=usual,
            margin=MARGIN if batch == 1 else MARGIN_OF_SEVERAL,
            pause=PAUSE * batch,
            longest=self.K if batch == 1 else usual or self.shortest,
        )
        chosen = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return dataclasses.replace(whole, **chosen)

    def begin(self, lengths_B: Array, falls_behind: bool) -> AdaptiveState:
        """Returns the initial adaptive state, after prefill."""
        nothing_B = jnp.zeros(lengths_B.shape, jnp.float32)
        return AdaptiveState(
            draft_lengths_B=self._best(nothing_B, nothing_B),
            accepted_B=nothing_B,
            rejected_B=nothing_B,
            idle_B=jnp.zeros_like(lengths_B),
            pause_B=jnp.full_like(lengths_B, self.pause),
            seen_B=lengths_B if falls_behind and self.widths[0] == 0 else None,
        )

    def learn(
        self, state: AdaptiveState, running_B: Array, num_drafted_B: Array, num_accepted_B: Array
    ) -> AdaptiveState:
        """Returns the adaptive state after a round; the state of finished rows does not change."""
        tried_B = state.draft_lengths_B > 0
        # A draft without tokens counts as a rejection: the round's width was paid for all the same.
        rejected_B = tried_B & ((num_accepted_B < num_drafted_B) | (num_drafted_B == 0))
        decay_B = jnp.where(tried_B, self.decay, 1)
        accepted_B = decay_B * state.accepted_B + num_accepted_B
        rejected_B = decay_B * state.rejected_B + rejected_B
        idle_B = jnp.where(tried_B, 0, state.idle_B + 1)
        best_B = self._best(accepted_B, rejected_B)
        longer_B = jnp.minimum(2 * state.pause_B, LONGEST_PAUSE * self.pause)
        pause_B = jnp.where(best_B > 0, self.pause, jnp.where(tried_B, longer_B, state.pause_B))
        tries_B = (best_B == 0) & (idle_B >= pause_B)
        after = dataclasses.replace(
            state,
            draft_lengths_B=jnp.where(tries_B, self.trial, best_B),
            accepted_B=accepted_B,
            rejected_B=rejected_B,
            idle_B=idle_B,
            pause_B=pause_B,
        )
        return jax.tree.map(
            lambda new, old: jnp.where(running_B, new, old).astype(old.dtype), after, state
        )

    def _best(self, accepted_B: Array, rejected_B: Array) -> Array:
        """Returns the length with the most expected tokens per time if its gain exceeds the margin,
        else `usual`.
        """
        believed_B = self.acceptance * self.trust + accepted_B
        rate_B = believed_B / (self.trust + accepted_B + rejected_B)
        lengths = [length for length in self.lengths if length <= max(self.longest, self.usual)]
        goodput_BL = self._goodput(rate_B)[:, : len(lengths)]
        best_B = jnp.asarray(lengths, jnp.int32)[jnp.argmax(goodput_BL, axis=1)]
        is_clear_B = (
            goodput_BL.max(axis=1) > (1 + self.margin) * goodput_BL[:, lengths.index(self.usual)]
        )
        return jnp.where(is_clear_B, best_B, self.usual)


@pytree
class AdaptiveState:
    """The acceptance of each row so far and its next draft length; the leading axis of every leaf
    is the batch.
    """

    draft_lengths_B: Array  # int32, the most tokens to draft in the next round
    accepted_B: Array  # float32, accepted tokens, with decay
    rejected_B: Array  # float32, rounds with a rejection or without a proposal, with decay
    idle_B: Array  # int32, rounds since the last draft
    pause_B: Array  # int32, rounds without a draft after which drafting is tried
    # int32, the tokens at the beginning of the row that the drafter's state covers; None: it never
    # falls behind
    seen_B: Array | None = None


def tokens_per_round(rate_B: Array | np.ndarray, lengths: Sequence[int]) -> Array | np.ndarray:
    """Returns the tokens of a round, ``1 + alpha + ... + alpha^k``, for each length k, ``[B, L]``.

    Args:
      rate_B: alpha, the acceptance of a drafted token.
    """
    rate_B1 = rate_B[:, None].clip(None, MOST_CERTAIN)
    return (1 - rate_B1 ** (1 + np.array(lengths, np.int32))[None, :]) / (1 - rate_B1)
