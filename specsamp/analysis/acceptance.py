"""Numbers of drafted tokens that a round accepts, for any draft length K.

    profile = Profile.of_rate(0.8)                     # every drafted token is accepted with the same chance
    profile = Profile.of_positions((0.85, 0.8, 0.7))   # by position, given that the positions before were accepted
    profile = Profile.of_texts([completion.stats for completion in completions])
    profile.tokens_per_round(4)

Notation: n is the number of accepted tokens of a round, ``P(n >= i)`` the chance that it is at least i (the survival).

One profile serves every K. Under the token rule the chance at position i does not depend on how many positions follow.
Under the block rule ``P(n >= i) = E[c_i]`` with ``c_i = min(1, c_{i-1} q_i / p_i)``, which does not depend on K either
(Sun et al., arXiv 2403.10444). One thing does depend on K: where in the text rounds begin. After a rejection the next
round begins at a hard token, and long drafts end in rejections more often. `ByLength` holds one profile per measured K.

Texts differ in difficulty, and a batch is finished when its slowest row is. `Profile.of_texts` therefore keeps one
exponent per text: text t accepts at position i with ``by_position[i] ** texts[t]``. Observed rates scatter more than the
true ones, because counts are random; they are moved towards the common rate until only the excess variance is left
(method of moments; Louis 1984, Journal of the American Statistical Association 79, 393-398).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from specsamp import validate
from specsamp.decoding.results import RowStats

NORMAL_95 = 1.96  # standard errors on either side of a 95% interval
STEP = 1e-6  # of a chance, for numerical derivatives
HARDEST = 64.0  # the largest exponent of a text: next to nothing is accepted


def expected_tokens(alpha: float, draft_length: int) -> float:
    """Returns ``1 + alpha + ... + alpha^K``: tokens per round if each drafted token is accepted with chance alpha.

    Leviathan et al. (arXiv 2211.17192), equation 1.
    """
    return sum(alpha**n for n in range(draft_length + 1))


def rate_error(rate: float, num_verified: int) -> float:
    """Returns the standard error of an acceptance rate, nan where nothing was verified.

    Given the text so far, each verified token is accepted or rejected by one random draw, so the error is binomial. It is
    the error of the rate on these texts; other texts may differ by more.
    """
    return math.sqrt(rate * (1 - rate) / num_verified) if num_verified else math.nan


def mirrored_block_survival(alpha: float, draft_length: int) -> np.ndarray:
    """Returns ``P(n >= i)``, i = 1 .. K, float64, of the block rule for one pair of distributions of rate alpha.

    An acceptance rate alone does not determine what the block rule gains over the token rule. It gains nothing if every
    ratio of target to draft probability is either 0 or at least 1. It gains much if target and draft exchange the
    probabilities of two tokens (Sun et al., arXiv 2403.10444, section 2, with alpha = 2/3), which is computed here: the
    ratio is ``alpha / (2 - alpha)`` with chance ``(2 - alpha) / 2``, otherwise its inverse. This is an example, not an
    upper bound. The first i values do not depend on ``draft_length``.
    """
    alpha = validate.number("the acceptance rate", alpha, 0, 1)
    if alpha in (0.0, 1.0):
        return np.full(draft_length, alpha)
    down, factor = (2 - alpha) / 2, alpha / (2 - alpha)
    values = factor ** np.arange(draft_length + 1)
    steps = np.zeros(draft_length + 1)  # steps[m] = P(c = factor^m)
    steps[0] = 1
    survival = np.zeros(draft_length)
    for i in range(draft_length):
        fewer = np.append(steps[1:], 0)
        fewer[0] += steps[0]  # c never exceeds one
        steps = down * np.append(0, steps[:-1]) + (1 - down) * fewer
        survival[i] = steps @ values
    return survival


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """A value with its 95% confidence interval."""

    value: float
    lower: float
    upper: float

    @classmethod
    def around(cls, value: float, relative_error: float) -> Interval:
        """Makes the interval of a value whose standard error is ``relative_error * value`` (log-normal)."""
        width = NORMAL_95 * relative_error
        return cls(value=value, lower=value * math.exp(-width), upper=value * math.exp(width))

    @classmethod
    def over(cls, value: float, cases: Sequence[float], relative_error: float) -> Interval:
        """Makes the interval of a value that is one of ``cases``, each with the same standard error, nobody knows which."""
        ends = [cls.around(case, relative_error) for case in cases]
        return cls(value=value, lower=min(end.lower for end in ends), upper=max(end.upper for end in ends))

    @property
    def relative_error(self) -> float:
        """Returns the standard error divided by the value."""
        return math.log(self.upper / self.value) / NORMAL_95


class Profiles(Protocol):
    """Acceptance as `specsamp.analysis.planner.make_plan` needs it; `Profile` and `ByLength` provide it."""

    def at(self, draft_length: int) -> Profile:
        """Returns the profile of rounds with this K."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """Acceptance by drafted position.

    Attributes:
      by_position: ``P(n >= i | n >= i - 1)``, i = 1, 2, ...
      beyond: the same at all later positions.
      texts: one exponent per text: text t accepts with ``by_position ** texts[t]``; 1 is the average text.
      leave_one_out: the profile without each prompt in turn, for the uncertainty from the choice of prompts.
      num_verified: tokens behind each of ``by_position``, for the uncertainty of counts where there is one prompt only.
    """

    by_position: tuple[float, ...]
    beyond: float
    texts: tuple[float, ...] = (1.0,)
    leave_one_out: tuple[Profile, ...] = ()
    num_verified: tuple[int, ...] = ()

    @classmethod
    def of_rate(cls, rate: float, num_verified: int = 0) -> Profile:
        """Makes a profile with one chance at all positions, counted on ``num_verified`` tokens (0: known exactly)."""
        rate = validate.number("the acceptance rate", rate, 0, 1)
        return cls(by_position=(rate,), beyond=rate, num_verified=(num_verified,) if num_verified else ())

    @classmethod
    def of_positions(cls, by_position: Sequence[float]) -> Profile:
        """Makes a profile from chances given that all before were accepted; the last one holds for all later ones."""
        if not by_position:
            raise ValueError("the acceptance by position is empty: give at least one chance")
        chances = tuple(
            validate.number(f"the acceptance at position {i + 1}", x, 0, 1) for i, x in enumerate(by_position)
        )
        return cls(by_position=chances, beyond=chances[-1])

    @classmethod
    def of_histogram(cls, rounds_by_accepted: Sequence[int], reached: Sequence[int] | None = None) -> Profile:
        """Makes a profile from rounds by number of accepted tokens, 0 .. K.

        Args:
          reached: rounds in which position i was verified, where budgets and stops cut rounds short; by default all
            rounds that accepted the i - 1 tokens before it.

        Raises:
          ValueError: the counts are negative or no integers, or there is no round.
        """
        counts = np.asarray(rounds_by_accepted)
        are_counts = counts.ndim == 1 and len(counts) > 1 and counts.dtype.kind in "iu" and (counts >= 0).all()
        if not are_counts or not counts.sum():
            raise ValueError(f"a histogram is rounds by accepted tokens, 0 .. K, K >= 1; got {rounds_by_accepted!r}")
        at_least = np.cumsum(counts[::-1])[::-1]  # rounds that accepted n or more
        verified = at_least[:-1].copy() if reached is None else np.asarray(reached).copy()
        if verified.shape != at_least[1:].shape or (verified < at_least[1:]).any():
            raise ValueError(
                f"positions verified {verified.tolist()} times cannot have accepted {at_least[1:].tolist()}"
            )
        verified[0] = at_least[0]  # a round that drafted nothing accepted nothing
        known = verified > 0
        chances = np.where(known, at_least[1:] / np.maximum(verified, 1), 0.0)
        # Few rounds get far, so all positions but the first are pooled for those that no round has reached.
        later = slice(1, None) if verified[1:].sum() else slice(None)
        beyond = at_least[1:][later].sum() / verified[later].sum()
        seen = int(known.sum())
        return cls(
            by_position=tuple(chances[:seen].tolist()),
            beyond=float(beyond),
            num_verified=tuple(verified[:seen].tolist()),
        )

    @classmethod
    def of_texts(cls, stats: Sequence[RowStats], prompts: Sequence[int] | None = None) -> Profile:
        """Makes a profile from the counts of each text; texts without rounds are left out.

        Args:
          stats: one for each text, all with the same K >= 1.
          prompts: the number of the prompt that each text continues, by default one prompt per text. Several samples of
            a prompt are several texts, but only other prompts tell how much the choice of prompts matters. With a
            single prompt the interval is that of the counts.

        Raises:
          ValueError: no text has a round, or there are more or fewer prompts than texts.
        """
        numbers = range(len(stats)) if prompts is None else prompts
        if len(numbers) != len(stats):
            raise ValueError(f"{len(stats)} texts need as many numbers of prompts; got {len(numbers)}")
        counted = [(one, number) for one, number in zip(stats, numbers, strict=True) if one.rounds]
        if not counted:
            raise ValueError(f"{len(stats)} texts without rounds: no acceptance can be taken from them")
        texts = [one for one, _ in counted]
        whole = cls._of_sum(texts)
        rest = [
            [one for one, number in counted if number != left] for left in sorted({number for _, number in counted})
        ]
        leave_one_out = tuple(cls._of_sum(others) for others in rest) if len(rest) > 1 else ()
        return dataclasses.replace(whole, texts=_text_exponents(texts, whole), leave_one_out=leave_one_out)

    @classmethod
    def _of_sum(cls, stats: Sequence[RowStats]) -> Profile:
        accepted = np.sum([one.accepted_counts for one in stats], axis=0)
        return cls.of_histogram(accepted, np.sum([one.reached for one in stats], axis=0))

    def at(self, draft_length: int) -> Profile:
        """Returns itself: the same profile for every K."""
        return self

    def survival(self, draft_length: int, text: float = 1.0) -> np.ndarray:
        """Returns ``P(n >= i)``, i = 1 .. K, float64, of a text with this exponent."""
        chances = np.full(draft_length, self.beyond)
        known = self.by_position[:draft_length]
        chances[: len(known)] = known
        return np.cumprod(chances if text == 1.0 else chances**text)

    def tokens_per_round(self, draft_length: int) -> Interval:
        """Returns ``1 + sum_i P(n >= i)``, for rounds that no budget and no stop cuts short."""
        value = 1 + float(self.survival(draft_length).sum())
        return Interval.around(value, self._error(draft_length) / value)

    def _error(self, draft_length: int) -> float:
        """Returns the standard error of tokens per round: a jackknife over prompts, else that of the counts."""
        if self.leave_one_out:
            values = np.array([part.survival(draft_length).sum() for part in self.leave_one_out])
            return math.sqrt((len(values) - 1) / len(values) * ((values - values.mean()) ** 2).sum())
        variance = 0.0
        for i, verified in enumerate(self.num_verified):
            chance = self.by_position[i]
            ends = [self._with_chance(i, chance + step).survival(draft_length).sum() for step in (-STEP, STEP)]
            variance += ((ends[1] - ends[0]) / (2 * STEP)) ** 2 * chance * (1 - chance) / verified
        return math.sqrt(variance)

    def _with_chance(self, position: int, chance: float) -> Profile:
        """Changes one chance, and `beyond` with it as far as it was counted at this position."""
        pooled = self.num_verified if len(self.num_verified) == 1 else (0, *self.num_verified[1:])
        by_position = [*self.by_position]
        by_position[position] = chance
        moved = (chance - self.by_position[position]) * pooled[position] / sum(pooled)
        return dataclasses.replace(self, by_position=tuple(by_position), beyond=self.beyond + moved)


@dataclasses.dataclass(frozen=True)
class ByLength:
    """Acceptance counted at several draft lengths: one profile for each.

    Between two of them the chance at a position is interpolated linearly; positions that only the longer one has are the
    longer one's. Below the shortest and beyond the longest their own profiles are used.

    Raises:
      ValueError: there is no profile, or one for K < 1.
    """

    profiles: Mapping[int, Profile]  # by K

    def __post_init__(self):
        if not self.profiles or min(self.profiles) < 1:
            raise ValueError(f"profiles are needed at draft lengths >= 1; got {sorted(self.profiles)}")

    def at(self, draft_length: int) -> Profile:
        below = max((K for K in self.profiles if K <= draft_length), default=min(self.profiles))
        above = min((K for K in self.profiles if K >= draft_length), default=max(self.profiles))
        if below == above:
            return self.profiles[below]
        return _interpolate(self.profiles[below], self.profiles[above], (draft_length - below) / (above - below))


def _interpolate(short: Profile, long: Profile, weight: float) -> Profile:
    """Returns ``(1 - weight) * short + weight * long``.

    If both were counted on equally many prompts, these are taken to be the same ones in the same order, and the profiles
    without each prompt are interpolated, too. Otherwise those of ``long`` stand for the uncertainty.
    """
    more = len(short.by_position) - len(long.by_position)  # the longer one may have seen fewer positions
    of_long = long.by_position + (long.beyond,) * more
    by_position = tuple((1 - weight) * a + weight * b for a, b in zip(short.by_position, of_long))
    verified = tuple(
        round(1 / ((1 - weight) ** 2 / a + weight**2 / b)) for a, b in zip(short.num_verified, long.num_verified)
    )
    matched = len(short.leave_one_out) == len(long.leave_one_out)
    pairs = zip(short.leave_one_out, long.leave_one_out)
    return Profile(
        by_position=by_position + long.by_position[len(by_position) :],
        beyond=long.beyond,
        texts=short.texts + long.texts,
        leave_one_out=tuple(_interpolate(*pair, weight) for pair in pairs) if matched else long.leave_one_out,
        num_verified=verified + (short if more > 0 else long).num_verified[len(verified) :],
    )


def _text_exponents(texts: Sequence[RowStats], whole: Profile) -> tuple[float, ...]:
    """Returns the exponent of each text, from its acceptance rate beside the one that ``whole`` expects of it."""
    verified_TK = np.array([(sum(one.accepted_counts), *one.reached[1:]) for one in texts], np.float64)
    chances_K = np.array([*whole.by_position, *[0.0] * (verified_TK.shape[1] - len(whole.by_position))])
    verified_T = verified_TK.sum(1)
    expected_T = verified_TK @ chances_K / verified_T
    differs_T = np.array([one.accepted for one in texts]) / verified_T - expected_T
    chance_variance_T = verified_TK @ (chances_K * (1 - chances_K)) / verified_T**2
    if len(texts) < 2 or not chance_variance_T.any():
        return (1.0,) * len(texts)
    weight_T = verified_T / verified_T.sum()
    # The weighted mean of squared differences, less what chance contributes, is the variance between texts.
    by_chance = (weight_T * (1 - weight_T)) @ chance_variance_T
    between = max((weight_T @ differs_T**2 - by_chance) / (1 - weight_T @ weight_T), 0.0)
    kept_T = np.sqrt(between / np.maximum(between + chance_variance_T, 1e-12))
    rate_T = expected_T + kept_T * differs_T
    tried_E = np.geomspace(1e-3, HARDEST, 500)  # the expected rate falls with the exponent
    rates_TE = verified_TK @ chances_K[:, None] ** tried_E / verified_T[:, None]
    found = [np.interp(rate, rates_E[::-1], tried_E[::-1]) for rate, rates_E in zip(rate_T, rates_TE)]
    return tuple(np.where(chance_variance_T > 0, found, 1.0).tolist())
