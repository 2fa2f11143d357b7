"""Forecasts whether speculation pays, and with which K: from acceptance and costs, before anything is decoded.

    plan = make_plan(Profile.of_rate(0.8), PerCall(target_ms=14.1, draft_ms=1.8), batch=4, new_tokens=128)
    plan.best.draft_length, plan.best.speedup

A round emits ``1 + sum_i P(n >= i)`` tokens (`specsamp.analysis.acceptance`) and takes ``round_ms``
(`specsamp.analysis.costs`). K = 0 is plain decoding and is compared with the others.

A batch is finished when its slowest row is. With ``new_tokens`` the planner plays 8,000 rows, texts drawn at random from
those of the profile, and computes how many rounds the slowest of B of them needs. Without ``new_tokens`` rows never end,
as on a server that refills them.

Draft lengths that adapt (`plan_adaptive`) depend on all rounds before, so all rounds of whole batches are played:
`specsamp.decoding.adaptive` itself decides what a row wants next, and rounds are as wide as the row that wants most. A
drafter that may find nothing, such as prompt lookup, is taken for one that always drafts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specsamp import validate
from specsamp.analysis.acceptance import Interval, Profile, Profiles
from specsamp.analysis.costs import Costs
from specsamp.analysis.draft_length import cost_table
from specsamp.decoding.adaptive import LENGTHS, Adaptive

DRAFT_LENGTHS = tuple(range(13))
LONGEST = 1024  # draft length: beyond any that could pay
DRAWS = 8000  # rows that are played to know the slowest
TEXTS = 512  # that are played where lengths adapt


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
    lengths = sorted({0, *(validate.integer("a draft length", K, 0) for K in draft_lengths)})
    if lengths[-1] > LONGEST:
        raise ValueError(f"a draft length must be at most {LONGEST}; got {lengths[-1]}")
    batch = validate.integer("batch", batch, 1)
    if new_tokens is not None:
        new_tokens = validate.integer("new_tokens", new_tokens, 1)
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

    `DRAWS` rows are played, and the largest of any ``batch`` of them is expected.

    Args:
      survival_TK: ``P(n >= i)`` for each text; a row is one of them, drawn at random.
    """
    random = np.random.default_rng(0)
    survival_RK = survival_TK[np.resize(random.permutation(len(survival_TK)), DRAWS)]
    left_R, rounds_R = np.full(DRAWS, new_tokens), np.zeros(DRAWS)
    while (running_R := left_R > 0).any():
        uniforms_R = (random.permutation(DRAWS) + 0.5) / DRAWS  # spread evenly, so that few rows say as much as many
        left_R -= 1 + (uniforms_R[:, None] < survival_RK).sum(1)
        rounds_R += running_R
    shares = np.arange(DRAWS + 1) / DRAWS
    return float(np.sort(rounds_R) @ np.diff(shares**batch))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveForecast:
    """The means over all texts that were drawn, and the standard error of their draws, a share of the milliseconds."""

    adaptive: Adaptive
    batch: int
    ms_per_token: float  # over the tokens of all rows
    speedup: float  # over plain decoding
    rounds_by_drafted: tuple[int, ...]  # of all rows, by length
    error: float


def plan_adaptive(
    acceptance: Profiles,
    costs: Costs,
    *,
    lengths: Sequence[int] = LENGTHS,
    batch: int = 1,
    context: int | None = None,
    new_tokens: int = 128,
    texts: int = TEXTS,
    seed: int = 0,
) -> AdaptiveForecast:
    """Forecasts lengths that begin with what `specsamp.analysis.draft_length.calibrate` would find.

    Arguments and errors are those of `make_plan`; ``texts`` are drawn with ``seed``.
    """
    asked = dict(batch=batch, context=context, new_tokens=new_tokens)
    plan = make_plan(acceptance, costs, draft_lengths=lengths, **asked)
    longest = acceptance.at(max(lengths)).survival(max(lengths))
    adaptive = Adaptive(
        lengths=tuple(lengths),
        costs_ms=cost_table(costs, lengths, batch=batch, context=context),
        usual=min(lengths, key=lambda K: plan[K].ms_per_token.value),
        acceptance=float(longest.sum() / (1 + longest[:-1].sum())),  # accepted over verified tokens
    )
    plain_ms = plan[0].ms_per_token.value
    return play(adaptive, acceptance, plain_ms, batch=batch, new_tokens=new_tokens, texts=texts, seed=seed)


def play(
    adaptive: Adaptive, acceptance: Profiles, plain_ms: float, *, batch: int, new_tokens: int, texts: int, seed: int
) -> AdaptiveForecast:
    """Plays all rounds of texts that are drawn, in batches; see `plan_adaptive`.

    Args:
      plain_ms: milliseconds per token of plain decoding.
    """
    rng, groups = np.random.default_rng(seed), -(-texts // batch)
    rows = groups * batch
    profile = acceptance.at(adaptive.K)
    survival_TK = np.stack([profile.survival(adaptive.K, text) for text in profile.texts])
    survival_RK = survival_TK[rng.integers(len(survival_TK), size=rows)]
    policy = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * groups), adaptive.for_rows(batch))
    learn, state = jax.jit(policy.learn), policy.begin(jnp.full(rows, 2), False)
    cost_of = np.zeros(adaptive.K + 1)
    cost_of[list(adaptive.lengths)] = adaptive.costs_ms
    left_R, ms_G = np.full(rows, new_tokens), np.zeros(groups)
    histogram = np.zeros(adaptive.K + 1, int)
    while (left_R > 0).any():
        running_R = left_R > 0
        wanted_R = np.where(running_R, np.asarray(state.draft_lengths_B), 0)
        is_running_G = running_R.reshape(groups, batch).any(1)
        ms_G += np.where(is_running_G, cost_of[wanted_R.reshape(groups, batch).max(1)], 0)
        np.add.at(histogram, wanted_R[running_R], 1)
        accepted_R = np.minimum((rng.random((rows, 1)) < survival_RK).sum(1), wanted_R)
        left_R = left_R - np.where(running_R, accepted_R + 1, 0)
        state = learn(state, jnp.asarray(running_R), jnp.asarray(wanted_R), jnp.asarray(accepted_R))
    ms_per_token = float(ms_G.mean() / (batch * new_tokens))
    return AdaptiveForecast(
        adaptive=adaptive,
        batch=batch,
        ms_per_token=ms_per_token,
        speedup=plain_ms / ms_per_token,
        rounds_by_drafted=tuple(histogram.tolist()),
        error=float(ms_G.std() / ms_G.mean() / np.sqrt(groups)),
    )
