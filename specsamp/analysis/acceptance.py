"""How far a round gets: the chance that the first i drafted tokens are all accepted, for any draft length.

    profile = Profile.of_rate(0.8)                       # each drafted token, whatever the ones before it did
    profile = Profile.of_positions((0.85, 0.8, 0.7))     # given that the ones before it were accepted
    profile = Profile.of_texts([completion.stats for completion in completions])

A profile serves every K. Under the token rule token i is verified by distributions that do not know how many follow.
Under the block rule P(n >= i) = E[c_i], with c_i = min(1, c_{i-1} q_i/p_i), which knows no K either (Sun et al.,
arXiv 2403.10444). What a profile cannot know is that rounds of another length begin elsewhere in the text: those of
long drafts where a token was refused, in what is hard, those of short ones more often in the middle of what is easy.
`ByLength` knows, from counts at several K.

Texts differ: some are easy to draft, and then for many rounds. A batch ends with its slowest row, so the
differences count. `Profile.of_texts` keeps one profile for each text, drawn to the whole, as chance lets counts spread
more than texts do; but not as far as would be best for each text by itself, for such estimates together spread less
(Louis 1984, Journal of the American Statistical Association 79, 393-398).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from specsamp.decoding.results import RowStats

NORMAL_95 = 1.96  # standard errors on either side
HARDEST = 64.0  # the largest exponent of a text: next to nothing is accepted


def expected_tokens(alpha: float, draft_length: int) -> float:
    """``1 + alpha + ... + alpha^K``: tokens per round if each draft is accepted with chance alpha.

    Leviathan et al. (arXiv 2211.17192), equation 1.
    """
    return sum(alpha**n for n in range(draft_length + 1))


def mirrored_block_survival(alpha: float, draft_length: int) -> np.ndarray:
    """``P(n >= i)`` of the block rule, i = 1 .. K, where the ratio q/p takes two values that mirror each other.

    A rate alone does not settle how much the block rule gains. Nothing, where a ratio is either 0 or at least 1;
    much, for two tokens whose chances target and draft exchange, the example of Sun et al. (arXiv 2403.10444,
    section 2; alpha = 2/3 is its figure). This is the latter: the ratio is alpha / (2 - alpha) with chance
    (2 - alpha) / 2, and its inverse otherwise. It is no bound: distributions that differ from one position to the next can gain
    more.
    """
    alpha = _chance("the acceptance rate", alpha)
    if alpha in (0.0, 1.0):
        return np.full(draft_length, alpha)
    down, factor = (2 - alpha) / 2, alpha / (2 - alpha)
    steps = np.zeros(draft_length + 1)  # P(c = factor^steps)
    steps[0] = 1
    survival = np.zeros(draft_length)
    for i in range(draft_length):
        fewer = np.append(steps[1:], 0)
        fewer[0] += steps[0]  # c is never above one
        steps = down * np.append(0, steps[:-1]) + (1 - down) * fewer
        survival[i] = steps @ factor ** np.arange(draft_length + 1)
    return survival


@dataclasses.dataclass(frozen=True, kw_only=True)
class Band:
    """A value and where it lies with 95% confidence."""

    value: float
    lower: float
    upper: float

    @classmethod
    def around(cls, value: float, relative_error: float) -> Band:
        """``relative_error`` is one standard error over the value."""
        width = NORMAL_95 * relative_error
        return cls(value=value, lower=value * math.exp(-width), upper=value * math.exp(width))

    @property
    def relative_error(self) -> float:
        """One standard error over the value."""
        return math.log(self.upper / self.value) / NORMAL_95


class Profiles(Protocol):
    """What `specsamp.analysis.planner.make_plan` asks of acceptance: a `Profile` is one, `ByLength` another."""

    def at(self, draft_length: int) -> Profile:
        """The profile of rounds of this K."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """Acceptance by drafted position."""

    by_position: tuple[float, ...]  # P(n >= i | n >= i-1), i = 1, 2, ...
    beyond: float  # the same at all later positions
    texts: tuple[float, ...] = (1.0,)  # text t accepts with by_position ** texts[t]; 1 is like the whole
    without: tuple[Profile, ...] = ()  # the profile without each prompt in turn: what is uncertain about it
    judged: tuple[int, ...] = ()  # tokens behind each of by_position, where they are the only uncertainty

    @classmethod
    def of_rate(cls, rate: float, judged: int = 0) -> Profile:
        """The same chance everywhere; ``judged`` tokens were counted for it (0: it is known)."""
        rate = _chance("the acceptance rate", rate)
        return cls(by_position=(rate,), beyond=rate, judged=(judged,) if judged else ())

    @classmethod
    def of_positions(cls, by_position: Sequence[float]) -> Profile:
        """Chances given that all before were accepted; the last one holds on."""
        if not by_position:
            raise ValueError("the acceptance by position is empty: give at least one chance")
        chances = tuple(_chance(f"the acceptance at position {i + 1}", x) for i, x in enumerate(by_position))
        return cls(by_position=chances, beyond=chances[-1])

    @classmethod
    def of_histogram(cls, rounds_by_accepted: Sequence[int], reached: Sequence[int] | None = None) -> Profile:
        """From rounds by number of accepted tokens, 0 .. K.

        Args:
          reached: rounds in which position i was verified, where budgets and stops cut rounds short; default all
            rounds that accepted the i - 1 tokens before it.

        Raises:
          ValueError: counts that are no counts, or of no round.
        """
        counts = np.asarray(rounds_by_accepted)
        are_counts = counts.ndim == 1 and len(counts) > 1 and counts.dtype.kind in "iu" and (counts >= 0).all()
        if not are_counts or not counts.sum():
            raise ValueError(f"a histogram is rounds by accepted tokens, 0 .. K, K >= 1; got {rounds_by_accepted!r}")
        at_least = np.cumsum(counts[::-1])[::-1]  # rounds that accepted n or more
        judged = at_least[:-1].copy() if reached is None else np.asarray(reached).copy()
        if judged.shape != at_least[1:].shape or (judged < at_least[1:]).any():
            raise ValueError(f"positions judged {judged.tolist()} times cannot have accepted {at_least[1:].tolist()}")
        judged[0] = at_least[0]  # a round that drafted nothing accepted nothing
        known = judged > 0
        chances = np.where(known, at_least[1:] / np.maximum(judged, 1), 0.0)
        # Few rounds come far, so all positions but the first speak for the ones that none has seen.
        later = slice(1, None) if judged[1:].sum() else slice(None)
        beyond = at_least[1:][later].sum() / judged[later].sum()
        seen = int(known.sum())
        return cls(
            by_position=tuple(chances[:seen].tolist()), beyond=float(beyond), judged=tuple(judged[:seen].tolist())
        )

    @classmethod
    def of_texts(cls, stats: Sequence[RowStats], prompts: Sequence[int] | None = None) -> Profile:
        """From what was counted on each text; one without rounds tells nothing.

        Args:
          stats: all for the same K >= 1.
          prompts: number of the prompt that each text continues, by default one of its own. Sampled texts of one
            prompt differ: each is a text. The band has what other prompts would change, so there they count as one;
            if there is but one, the band has what its tokens leave open.

        Raises:
          ValueError: no text has a round, or there are more or fewer prompts than texts.
        """
        numbers = range(len(stats)) if prompts is None else prompts
        if len(numbers) != len(stats):
            raise ValueError(f"{len(stats)} texts need as many numbers of prompts; got {len(numbers)}")
        told = [(one, number) for one, number in zip(stats, numbers, strict=True) if one.rounds]
        if not told:
            raise ValueError(f"{len(stats)} texts without rounds: there is no acceptance to take from them")
        texts = [one for one, _ in told]
        whole = cls._of_counts(texts)
        rest = [[one for one, number in told if number != left] for left in sorted({number for _, number in told})]
        without = tuple(cls._of_counts(others) for others in rest) if len(rest) > 1 else ()
        return dataclasses.replace(whole, texts=_exponents(texts, whole), without=without)

    @classmethod
    def _of_counts(cls, stats: Sequence[RowStats]) -> Profile:
        def total(name):
            return np.sum([getattr(one, name) for one in stats], axis=0)

        return cls.of_histogram(total("accepted_counts"), total("reached"))

    def at(self, draft_length: int) -> Profile:
        """Itself, whatever the K."""
        return self

    def survival(self, draft_length: int, text: float = 1.0) -> np.ndarray:
        """``P(n >= i)``, i = 1 .. K, float64."""
        later = max(draft_length - len(self.by_position), 0)
        chances = np.array([*self.by_position[:draft_length], *[self.beyond] * later], np.float64)
        return np.cumprod(chances**text)

    def tokens_per_round(self, draft_length: int) -> Band:
        """``1 + sum_i P(n >= i)``, before budgets and stops cut anything."""
        value = 1 + float(self.survival(draft_length).sum())
        return Band.around(value, self._error(draft_length) / value)

    def _error(self, draft_length: int) -> float:
        """One standard error of tokens per round."""
        if self.without:  # jackknife over prompts
            values = np.array([part.survival(draft_length).sum() for part in self.without])
            return math.sqrt((len(values) - 1) / len(values) * ((values - values.mean()) ** 2).sum())
        seen, pooled = len(self.judged), self.judged[1:] or self.judged  # `beyond` is the rate of the pooled
        deeper = range(1, draft_length - seen + 1)
        of_beyond = math.prod(self.by_position) * sum(n * self.beyond ** (n - 1) for n in deeper)
        variance = 0.0
        for i, judged in enumerate(self.judged[:draft_length]):
            chance, up = self.by_position[i], list(self.by_position)
            up[i] = 1.0
            slope = dataclasses.replace(self, by_position=tuple(up)).survival(draft_length)[i:].sum()
            if i or seen == 1:
                slope += of_beyond * judged / sum(pooled)
            variance += slope**2 * chance * (1 - chance) / judged
        return math.sqrt(variance)


@dataclasses.dataclass(frozen=True)
class ByLength:
    """Acceptance counted at some draft lengths: a profile for each.

    Between two of them the chance at a position runs on a line; where the shorter ends it is the longer's. Below the
    shortest and beyond the longest, their profiles go on. The band is of prompts where both lengths were counted on as
    many, which are taken to be the same; else that of the longer.

    Raises:
      ValueError: no profile, or one for K < 1.
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
        return _between(self.profiles[below], self.profiles[above], (draft_length - below) / (above - below))


def _between(short: Profile, long: Profile, share: float) -> Profile:
    """A ``share`` of the way from ``short`` to ``long``."""
    more = len(short.by_position) - len(long.by_position)  # the longer may have been followed less far
    of_long = long.by_position + (long.beyond,) * more
    by_position = tuple((1 - share) * a + share * b for a, b in zip(short.by_position, of_long))
    judged = tuple(round(1 / ((1 - share) ** 2 / a + share**2 / b)) for a, b in zip(short.judged, long.judged))
    matched = len(short.without) == len(long.without)
    without = [_between(*pair, share) for pair in zip(short.without, long.without)] if matched else long.without
    return Profile(
        by_position=by_position + long.by_position[len(by_position) :],
        beyond=long.beyond,
        texts=short.texts + long.texts,
        without=tuple(without),
        judged=judged + (short.judged if more > 0 else long.judged)[len(judged) :],
    )


def _exponents(texts: Sequence[RowStats], whole: Profile) -> tuple[float, ...]:
    """How each text differs from the whole at the positions that were verified in it, less what chance explains."""
    judged_TK = np.array([(sum(one.accepted_counts), *one.reached[1:]) for one in texts], np.float64)
    chances_K = np.array([*whole.by_position, *[0.0] * (judged_TK.shape[1] - len(whole.by_position))])
    judged = judged_TK.sum(1)
    share_TK = judged_TK / judged[:, None]
    logs_K = np.log(chances_K, where=chances_K > 0, out=np.zeros_like(chances_K))
    slope = share_TK @ (chances_K * logs_K)  # of the chance by the exponent, on which texts are compared
    tells = slope < 0
    if tells.sum() < 2:
        return (1.0,) * len(texts)
    expected = share_TK @ chances_K
    differ = np.array([one.accepted for one in texts]) / judged - expected
    weight = tells * judged / (tells @ judged)
    slope = np.where(tells, slope, -1.0)
    by_chance = share_TK @ (chances_K * (1 - chances_K)) / judged / slope**2
    explained = (weight * (1 - weight)) @ by_chance
    between = max((weight @ (differ / slope) ** 2 - explained) / (1 - weight @ weight), 0.0)
    kept = np.sqrt(between / np.maximum(between + by_chance, 1e-12))
    found = _exponents_of(expected + kept * differ, share_TK, chances_K)
    return tuple(np.where(tells, found, 1.0).tolist())


def _exponents_of(chance_T: np.ndarray, share_TK: np.ndarray, chances_K: np.ndarray) -> np.ndarray:
    """e with ``sum_k share_k chances_k^e = chance``, by halves: the sum falls with e."""
    low, high = np.full_like(chance_T, 1e-6), np.full_like(chance_T, HARDEST)
    for _ in range(50):
        middle = (low + high) / 2
        above = (share_TK * chances_K ** middle[:, None]).sum(1) > chance_T
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return (low + high) / 2


def _chance(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a chance, in [0, 1]; got {value!r}")
    return float(value)
