"""Forecasts whether speculation pays, and with which K: from acceptance and costs, before anything
is decoded.

    costs = PerCall(target_ms=14.1, draft_ms=1.8)
    plan = make_plan(Profile.of_rate(0.8), costs, batch=4, new_tokens=128)
    plan.best.draft_length, plan.best.speedup

A round emits ``1 + sum_i P(n >= i)`` tokens (`specsamp.analysis.acceptance`) and takes ``round_ms``
(`specsamp.analysis.costs`). K = 0 is plain decoding, the baseline.

A batch ends with its slowest sequence. With ``new_tokens`` the planner draws the rounds of 8,000
sequences, and computes how many rounds the slowest of B of them needs. Without ``new_tokens``
sequences never end, as on a server that refills its batch.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from specsamp import validate
from specsamp.analysis.acceptance import Acceptance, Interval, Profile, profile_at
from specsamp.analysis.costs import Costs

DRAFT_LENGTHS = tuple(range(13))
LONGEST = 1024  # draft length: beyond any that could pay
DRAWS = 8000  # sequences that are drawn to estimate the rounds of the slowest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """One draft length. Intervals hold the errors of the counts behind acceptance and of the clocks
    behind costs.
    """

    draft_length: int
    tokens_per_round: Interval  # of a sequence that has not ended
    # Rounds of the batch until its slowest sequence ends, over the tokens of one sequence.
    rounds_per_token: float
    round_ms: float
    ms_per_token: Interval  # over the tokens of all sequences
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
        """Returns the forecast with the fewest milliseconds per token; K = 0 where speculation does
        not pay.
        """
        return min(self.forecasts, key=lambda forecast: forecast.ms_per_token.value)


def make_plan(
    acceptance: Acceptance,
    costs: Costs,
    *,
    draft_lengths: Sequence[int] = DRAFT_LENGTHS,
    batch: int = 1,
    context: int | None = None,
    new_tokens: int | None = None,
) -> Plan:
    """Forecasts every draft length.

    Args:
      acceptance: a profile, or one for each K, counted with the rule that will decode.
      draft_lengths: the K to compare, at most 1024; 0 is always among them.
      context: slots of the caches; None: the costs' own.
      new_tokens: of every sequence; None: sequences never end.

    Raises:
      ValueError: a number out of range, or costs that do not reach that far.
    """
    lengths = sorted(
        {0, *(validate.integer("a draft length", K, 0, LONGEST + 1) for K in draft_lengths)}
    )
    batch = validate.integer("batch", batch, 1)
    if new_tokens is not None:
        new_tokens = validate.integer("new_tokens", new_tokens, 1)
    forecasts = []
    for K in lengths:
        profile = profile_at(acceptance, K)
        rounds = rounds_per_token(profile, K, batch, new_tokens)
        tokens = profile.tokens_per_round(K)
        round_ms = costs.round_ms(K, batch, context)

        def gain(case: Costs) -> float:
            return case.round_ms(0, batch, context) / (case.round_ms(K, batch, context) * rounds)

        ms = [case.round_ms(K, batch, context) * rounds / batch for case in costs.bounds]
        gains = [gain(case) for case in costs.scenarios] + ([] if costs.is_range else [gain(costs)])
        error = tokens.relative_error
        both_clocks = costs.error * math.sqrt(2) if K else 0.0
        forecasts.append(
            Forecast(
                draft_length=K,
                tokens_per_round=tokens,
                rounds_per_token=rounds,
                round_ms=round_ms,
                ms_per_token=Interval.around(
                    round_ms * rounds / batch, math.hypot(error, costs.error), ms
                ),
                speedup=Interval.around(gain(costs), math.hypot(error, both_clocks), gains),
            )
        )
    return Plan(batch=batch, context=context, new_tokens=new_tokens, forecasts=tuple(forecasts))


def rounds_per_token(
    profile: Profile, draft_length: int, batch: int = 1, new_tokens: int | None = None
) -> float:
    """Returns the expected rounds of a batch, until its slowest sequence ends, over the tokens of
    one sequence.
    """
    if draft_length == 0:
        return 1.0
    survival_K = profile.survival(draft_length)
    if new_tokens is None:
        return float(1 / (1 + survival_K.sum()))
    random = np.random.default_rng(0)
    left_R = np.full(DRAWS, new_tokens)
    rounds_R = np.zeros(DRAWS)
    while (running_R := left_R > 0).any():
        # Spread evenly, so that few draws have the precision of many.
        uniforms_R = (random.permutation(DRAWS) + 0.5) / DRAWS
        left_R -= 1 + (uniforms_R[:, None] < survival_K).sum(1)
        rounds_R += running_R
    shares = np.arange(DRAWS + 1) / DRAWS
    # The largest of any ``batch`` of them.
    return float(np.sort(rounds_R) @ np.diff(shares**batch)) / new_tokens
