"""Forecasts whether speculation pays, and with which K: from acceptance and costs, before anything is decoded.

    plan = make_plan(Profile.of_rate(0.8), PerCall(target_ms=14.1, draft_ms=1.8), batch=4, new_tokens=128)
    plan.best.draft_length, plan.best.speedup

A round emits ``1 + sum_i P(n >= i)`` tokens (`specsamp.analysis.acceptance`) and takes ``round_ms``
(`specsamp.analysis.costs`). K = 0 is plain decoding and is compared with the others.

A batch is finished when its slowest row is. With ``new_tokens`` the planner computes how many rounds the slowest of B rows
needs: the distribution of the tokens that a row has after r rounds is advanced round by round, exactly, and the budget
cuts the last round; then ``E[max] = sum_r 1 - P(R <= r)^B``. Rows are texts drawn at random from those of the profile.
Without ``new_tokens`` rows never end, as on a server that refills them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from specsamp.analysis.acceptance import Interval, Profile, Profiles
from specsamp.analysis.costs import Costs

DRAFT_LENGTHS = tuple(range(13))
LONGEST = 1024  # draft length: beyond any that could pay
ENDED = 1 - 1e-9  # chance that a row has ended, from which on no more rounds are computed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """One draft length. Intervals hold the errors of the counts behind acceptance and of the clocks behind costs."""

    draft_length: int
    tokens_per_round: Interval  # of a row that has not ended
    rounds_per_token: float  # rounds of the batch until its slowest row ends, over the tokens of one row
    round_ms: float
    ms_per_token: Interval  # over the tokens of all rows
    speedup: Interval  # over K = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Forecasts for several draft lengths at one batch and context."""

    batch: int
    context: int | None
    new_tokens: int | None
    forecasts: tuple[Forecast, ...]

    def __getitem__(self, draft_length: int) -> Forecast:
        return next(one for one in self.forecasts if one.draft_length == draft_length)

    @property
    def best(self) -> Forecast:
        """Returns the forecast with the fewest milliseconds per token; K = 0 where speculation does not pay."""
        return min(self.forecasts, key=lambda one: one.ms_per_token.value)

    @property
    def best_speculative(self) -> Forecast | None:
        """Returns the same among K >= 1; None if there is none."""
        drafted = [one for one in self.forecasts if one.draft_length]
        return min(drafted, key=lambda one: one.ms_per_token.value, default=None)


def make_plan(
    acceptance: Profiles,
    costs: Costs,
    *,
    draft_lengths: Sequence[int] = DRAFT_LENGTHS,
    batch: int = 1,
    context: int | None = None,
    new_tokens: int | None = None,
) -> Plan:
    """Forecasts every draft length.

    Args:
      acceptance: the acceptance by position, counted with the rule that is meant.
      costs: the time of a round.
      draft_lengths: those to compare, at most 1024; 0 is always among them.
      batch: rows that are decoded together.
      context: slots of the caches; None leaves it to the costs.
      new_tokens: of every row; None: rows never end.

    Raises:
      ValueError: a number out of range, or costs that do not reach that far.
    """
    lengths = sorted({0, *(_count("a draft length", K, 0) for K in draft_lengths)})
    if lengths[-1] > LONGEST:
        raise ValueError(f"a draft length must be at most {LONGEST}; got {lengths[-1]}")
    batch = _count("batch", batch, 1)
    if new_tokens is not None:
        new_tokens = _count("new_tokens", new_tokens, 1)
    plain_ms = costs.round_ms(0, batch, context) / batch
    cases = costs.edges or (costs,)
    forecasts = []
    for K in lengths:
        profile = acceptance.at(K)
        tokens = profile.tokens_per_round(K)
        rounds = rounds_per_token(profile, K, batch, new_tokens)
        round_ms = costs.round_ms(K, batch, context)
        ms = round_ms * rounds / batch
        both_clocks = costs.error * math.sqrt(2) if K else 0.0
        cases_ms = [case.round_ms(K, batch, context) * rounds / batch for case in cases]
        rounds_ms = [(one.round_ms(0, batch, context), one.round_ms(K, batch, context)) for one in costs.worlds]
        gains = [plain / (drafted * rounds) for plain, drafted in rounds_ms]
        gains += [] if costs.open else [plain_ms / ms]
        forecasts.append(
            Forecast(
                draft_length=K,
                tokens_per_round=tokens,
                rounds_per_token=rounds,
                round_ms=round_ms,
                ms_per_token=Interval.over(ms, cases_ms, math.hypot(tokens.relative_error, costs.error)),
                speedup=Interval.over(plain_ms / ms, gains, math.hypot(tokens.relative_error, both_clocks)),
            )
        )
    return Plan(batch=batch, context=context, new_tokens=new_tokens, forecasts=tuple(forecasts))


def rounds_per_token(profile: Profile, draft_length: int, batch: int = 1, new_tokens: int | None = None) -> float:
    """Returns the expected rounds of a batch over the tokens of one row; 1 for plain decoding."""
    if draft_length == 0:
        return 1.0
    survival_TK = np.stack([profile.survival(draft_length, text) for text in profile.texts])
    if new_tokens is None:
        return float(np.mean(1 / (1 + survival_TK.sum(1))))
    return slowest_row(survival_TK, batch, new_tokens) / new_tokens


def slowest_row(survival_TK: np.ndarray, batch: int, new_tokens: int) -> float:
    """Returns the expected number of rounds until the slowest of ``batch`` rows has ``new_tokens`` tokens.

    Args:
      survival_TK: ``P(n >= i)`` for each text; a row is one of them, drawn at random.
    """
    ends = np.ones((len(survival_TK), 1)), np.zeros((len(survival_TK), 1))
    emits_TE = -np.diff(np.concatenate([ends[0], survival_TK, ends[1]], axis=1))  # P(1 .. K+1 tokens)
    at_TN = np.zeros((len(survival_TK), new_tokens + 1))  # P(so many tokens so far); the last: ended
    at_TN[:, 0] = 1
    expected, ended = 0.0, 0.0
    while ended < ENDED:
        expected += 1 - ended**batch
        after_TN = np.zeros_like(at_TN)
        after_TN[:, -1] = at_TN[:, -1]
        for extra in range(1, emits_TE.shape[1] + 1):
            going_TN = at_TN[:, :-1] * emits_TE[:, extra - 1 : extra]
            inside = max(new_tokens - extra, 0)  # of these the row goes on
            after_TN[:, extra : extra + inside] += going_TN[:, :inside]
            after_TN[:, -1] += going_TN[:, inside:].sum(1)
        at_TN = after_TN
        ended = float(at_TN[:, -1].mean())
    return expected


def _count(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}; got {value!r}")
    return int(value)
