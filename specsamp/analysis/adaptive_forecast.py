"""Forecasts draft lengths that adapt, by playing their rounds: from acceptance and costs, before anything is decoded.

    plan_adaptive(Profile.of_rate(0.8), PerCall(target_ms=14.1, draft_ms=1.8), lengths=(0, 1, 2, 4, 8), new_tokens=128)

What `specsamp.analysis.planner` computes for a fixed K has no such formula here, since a length depends on all rounds
before. So rounds are drawn: a row is a text of the profile, a round accepts as many tokens as the profile's chances let it,
and `specsamp.decoding.adaptive` itself decides what the row wants next. Rounds are as wide as the row that wants most, and a
batch ends with its slowest row. A drafter that may find nothing, such as prompt lookup, is taken for one that always drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.analysis.acceptance import Profiles
from specsamp.analysis.costs import Costs
from specsamp.analysis.draft_length import cost_table
from specsamp.analysis.planner import make_plan
from specsamp.decoding.adaptive import LENGTHS, Adaptive

TEXTS = 512  # that are drawn


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
    profile = acceptance.at(adaptive.most)
    survival_TK = np.stack([profile.survival(adaptive.most, text) for text in profile.texts])
    survival_RK = survival_TK[rng.integers(len(survival_TK), size=rows)]
    policy = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * groups), adaptive.for_rows(batch))
    learn, pace = jax.jit(policy.learn), policy.begin(jnp.full(rows, 2), False)
    cost_of = np.zeros(adaptive.most + 1)
    cost_of[list(adaptive.lengths)] = adaptive.costs_ms
    left_R, ms_G = np.full(rows, new_tokens), np.zeros(groups)
    histogram = np.zeros(adaptive.most + 1, int)
    while (left_R > 0).any():
        running_R = left_R > 0
        wanted_R = np.where(running_R, np.asarray(pace.wanted_B), 0)
        is_running_G = running_R.reshape(groups, batch).any(1)
        ms_G += np.where(is_running_G, cost_of[wanted_R.reshape(groups, batch).max(1)], 0)
        np.add.at(histogram, wanted_R[running_R], 1)
        accepted_R = np.minimum((rng.random((rows, 1)) < survival_RK).sum(1), wanted_R)
        left_R = left_R - np.where(running_R, accepted_R + 1, 0)
        pace = learn(pace, jnp.asarray(running_R), jnp.asarray(wanted_R), jnp.asarray(accepted_R))
    ms_per_token = float(ms_G.mean() / (batch * new_tokens))
    return AdaptiveForecast(
        adaptive=adaptive,
        batch=batch,
        ms_per_token=ms_per_token,
        speedup=plain_ms / ms_per_token,
        rounds_by_drafted=tuple(histogram.tolist()),
        error=float(ms_G.std() / ms_G.mean() / np.sqrt(groups)),
    )
