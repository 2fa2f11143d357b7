"""Acceptance of drafted tokens by position, from which tokens per round follow for any draft length
K.

    profile = Profile.of_rate(0.8)                    # the same rate at every position
    profile = Profile.of_positions((0.85, 0.8, 0.7))  # each given that earlier ones are accepted
    profile = Profile.of_texts([completion.stats for completion in completions])
    profile.tokens_per_round(4)

Notation: n is the number of accepted tokens of a round, ``P(n >= i)`` the chance that it is at
least i (the survival).

Under the token rule and the block rule the chance at position i does not depend on how many
positions follow (Sun et al., arXiv 2403.10444), so one profile serves every K. It does depend on
where in the text rounds begin: after a rejection the next round begins at a hard token, and long
drafts end in rejections more often. Where acceptance was counted at several K, a dict ``{K:
Profile}`` holds one profile for each, see `profile_at`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from specsamp import validate
from specsamp.decoding.results import RowStats

NORMAL_95 = 1.96  # standard errors on either side of a 95% interval


def expected_tokens(alpha: float, draft_length: int) -> float:
    """Returns ``1 + alpha + ... + alpha^K``: tokens per round if each drafted token is accepted
    with chance alpha.

    Leviathan et al. (arXiv 2211.17192), equation 1.
    """
    return sum(alpha**n for n in range(draft_length + 1))


def rate_error(rate: float, num_verified: int) -> float:
    """Returns the standard error of an acceptance rate on these texts, nan where nothing was
    verified.

    Given the text before it, each verified token is accepted or rejected by one random draw, so the
    error is binomial.
    """
    return math.sqrt(rate * (1 - rate) / num_verified) if num_verified else math.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """A value with its 95% confidence interval."""

    value: float
    lower: float
    upper: float

    @classmethod
    def around(cls, value: float, relative_error: float, ends: Sequence[float] = ()) -> Interval:
        """Makes the interval of a value whose standard error is ``relative_error * value``
        (log-normal), around all ends.
        """
        factor = math.exp(NORMAL_95 * relative_error)
        ends = ends or (value,)
        return cls(value=value, lower=min(ends) / factor, upper=max(ends) * factor)

    @property
    def relative_error(self) -> float:
        """Returns the standard error divided by the value."""
        return math.log(self.upper / self.value) / NORMAL_95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """Acceptance by drafted position.

    Attributes:
      by_position: ``P(n >= i | n >= i - 1)``, i = 1, 2, ...
      beyond: the same at all later positions.
      error: the relative standard error of tokens per round; 0 if they are exact.
    """

    by_position: tuple[float, ...]
    beyond: float
    error: float = 0.0

    @classmethod
    def of_rate(cls, rate: float) -> Profile:
        """Makes a profile with one chance at all positions."""
        return cls.of_positions((rate,))

    @classmethod
    def of_positions(cls, by_position: Sequence[float]) -> Profile:
        """Makes a profile from chances given that all before were accepted; the last one holds for
        all later ones.
        """
        if not by_position:
            raise ValueError("the acceptance by position is empty: give at least one chance")
        chances = [
            validate.number(f"the acceptance at position {i}", x, 0, 1)
            for i, x in enumerate(by_position, 1)
        ]
        return cls(by_position=tuple(chances), beyond=chances[-1])

    @classmethod
    def of_histogram(
        cls, rounds_by_accepted: Sequence[int], reached: Sequence[int] | None = None
    ) -> Profile:
        """Makes a profile from rounds by number of accepted tokens, 0 .. K.

        Args:
          reached: rounds in which position i was verified; by default all that accepted the i - 1
            tokens before it.
        """
        counts = np.asarray(rounds_by_accepted)
        is_histogram = counts.ndim == 1 and len(counts) > 1 and counts.dtype.kind in "iu"
        if not is_histogram or counts.min() < 0 or not counts.any():
            raise ValueError(
                "a histogram is rounds by accepted tokens, 0 .. K, K >= 1; got "
                f"{rounds_by_accepted!r}"
            )
        at_least = np.cumsum(counts[::-1])[::-1]  # rounds that accepted n or more
        verified = at_least[:-1].copy() if reached is None else np.asarray(reached).copy()
        if verified.shape != at_least[1:].shape or (verified < at_least[1:]).any():
            raise ValueError(
                f"positions verified {verified.tolist()} times cannot have accepted "
                f"{at_least[1:].tolist()}"
            )
        verified[0] = at_least[0]  # a round that drafted nothing accepted nothing
        seen = verified > 0
        # Few rounds get far, so positions that no round has reached are as all positions but the
        # first together.
        later = slice(1, None) if verified[1:].sum() else slice(None)
        emitted = np.repeat(np.arange(1, len(counts) + 1), counts)
        return cls(
            by_position=tuple((at_least[1:][seen] / verified[seen]).tolist()),
            beyond=float(at_least[1:][later].sum() / verified[later].sum()),
            error=float(emitted.std() / emitted.mean() / math.sqrt(len(emitted))),
        )

    @classmethod
    def of_texts(cls, stats: Sequence[RowStats]) -> Profile:
        """Makes a profile from the counts of each text, all with the same K >= 1; texts without
        rounds are left out.

        The error is that of the choice of texts, or where there is one text, that of the counts.
        """
        texts = [text for text in stats if text.rounds]
        if not texts:
            raise ValueError(
                f"{len(stats)} texts without rounds: no acceptance can be taken from them"
            )
        total = sum(texts)
        whole = cls.of_histogram(total.accepted_counts, total.reached)
        count = len(texts)
        if count == 1:
            return whole
        rounds_N = np.array([text.rounds for text in texts])
        emitted_N = rounds_N + [text.accepted for text in texts]
        differs_N = emitted_N - rounds_N * (emitted_N.sum() / rounds_N.sum())
        error = math.sqrt(count / (count - 1) * (differs_N**2).sum()) / emitted_N.sum()
        return dataclasses.replace(whole, error=error)

    def survival(self, draft_length: int) -> np.ndarray:
        """Returns ``P(n >= i)``, i = 1 .. K, float64."""
        known = self.by_position[:draft_length]
        return np.cumprod([*known, *[self.beyond] * (draft_length - len(known))])

    def tokens_per_round(self, draft_length: int) -> Interval:
        """Returns ``1 + sum_i P(n >= i)``, for rounds that no budget and no stop cuts short."""
        return Interval.around(1 + float(self.survival(draft_length).sum()), self.error)


Acceptance = Profile | Mapping[int, Profile]


def profile_at(acceptance: Acceptance, draft_length: int) -> Profile:
    """Returns the profile of rounds with this K; where several K were counted, that of the longest
    up to this one.
    """
    if isinstance(acceptance, Profile):
        return acceptance
    return acceptance[max((K for K in acceptance if K <= draft_length), default=min(acceptance))]
