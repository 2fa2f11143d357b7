"""Does the planner foresee what the benchmark measures? Fitted on one half of the prompts, checked on the other.

    result = agreement(pair, make_drafter, rule, sampling, prompts, max_new_tokens=128)
    result = agreement(..., fit_batches=(1, 8), check_batch=4)

Costs of a round come from a few draft lengths (and plain decoding beside them) on every second prompt, acceptance
from the same rounds. In between both run on lines, costs also between batches, but for the products with the target's
matrices, which are timed alone at every number of rows (`specsamp.analysis.costs`); the worst error of lines without
them stands beside. From these the planner forecasts ms per token on the other prompts, for every draft length.
All sides decode in turn, in one process, several passes: how far two passes over the *same* texts lie apart is the
noise floor, below which no forecast can be expected to come.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specsamp.analysis.acceptance import Band, ByLength, Profile
from specsamp.analysis.costs import CostTable, Round
from specsamp.analysis.decoder import Decoder, Workload, decoders
from specsamp.analysis.planner import DRAFT_LENGTHS, Forecast, make_plan
from specsamp.analysis.split import ProductClock
from specsamp.analysis.spread import Spread
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.drafters import NoDrafter
from specsamp.decoding.pair import Pair
from specsamp.decoding.results import RowStats
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp

FEWEST_BATCHES = 6  # of texts: how slow the slowest row is varies a lot
SAMPLES = 8  # of products in a pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """What one draft length took for the texts of one half."""

    seconds_PR: np.ndarray  # pass, batch of texts
    rounds_R: np.ndarray
    rows: tuple[RowStats, ...]  # of all texts
    tokens: int  # of one row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One draft length on prompts that nothing was fitted to."""

    draft_length: int
    cost_was_fitted: bool  # its round was timed, on the other prompts
    forecast: Band  # ms per token
    measured: float
    error: float  # forecast / measured - 1
    noise: float  # two passes over the same texts, as a share of their mean
    rounds_error: float  # of rounds per token alone: what acceptance contributes
    round_ms_error: float  # of the time of a round alone: what costs contribute


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """What `agreement` returns."""

    fit_lengths: tuple[int, ...]
    fit_batches: tuple[int, ...]
    check_batch: int
    prompts: tuple[int, int]  # fitted to, checked on
    costs: CostTable  # as fitted
    checks: tuple[Check, ...]
    worst_error: float  # over the checks whose cost was not fitted
    worst_error_of_lines: float  # the same without the products: straight lines between fitted rounds
    worst_noise: float
    best_forecast: int  # K with the fewest ms per token
    best_measured: int
    lost: float  # how much slower the forecast's choice is than the best that was measured, as a share


def agreement(
    pair: Pair,
    make_drafter: Callable[[int], Drafter],
    rule: Rule,
    sampling: Warp,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    fit_lengths: Sequence[int] = (1, 4, 8),
    fit_batches: Sequence[int] = (1,),
    check_lengths: Sequence[int] = DRAFT_LENGTHS,
    check_batch: int = 1,
    passes: int = 2,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Agreement:
    """Fits, forecasts, measures.

    Args:
      prompts: token ids; even ones are fitted to, odd ones checked on.
      fit_lengths: K whose rounds are timed; plain decoding is timed with them.
      fit_batches: and in which batches. ``check_batch`` lies within them.
      check_lengths: K that are forecast and measured.
      passes: at least two, over all texts and draft lengths.

    Raises:
      ValueError: too few prompts or passes, or a check that nothing fitted could foresee.
    """
    if len(prompts) < 4 or passes < 2:
        raise ValueError(f"two passes or more and four prompts or more are needed; got {passes} and {len(prompts)}")
    if not min(fit_batches) <= check_batch <= max(fit_batches):
        fitted = ", ".join(map(str, fit_batches))
        raise ValueError(f"the batch to check, {check_batch}, must lie within those that are fitted, {fitted}")
    if min(fit_lengths) < 1 or min(check_lengths) < 0:
        raise ValueError(f"fitted K must be >= 1 and checked ones >= 0; got {[*fit_lengths]} and {[*check_lengths]}")
    halves = [tuple(tuple(prompt) for prompt in prompts[start::2]) for start in (0, 1)]

    def sides_of(name: str, half: int, batch: int, lengths: Sequence[int]) -> dict[tuple, Decoder]:
        repeats = len(halves[half]) if batch == 1 else max(-(-len(halves[half]) // batch), FEWEST_BATCHES)
        work = Workload(
            batch=batch,
            prompt_length=max(map(len, prompts)),
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            seed=seed,
            prompts=halves[half],
        )
        contenders = {K: (make_drafter(K) if K else NoDrafter(), rule) for K in sorted({0, *lengths})}
        return {(name, batch, K): side for K, side in decoders(pair, contenders, sampling, work).items()}

    sides = sides_of("check", 1, check_batch, check_lengths)
    for batch in fit_batches:
        sides |= sides_of("fit", 0, batch, fit_lengths)
    calls, any_side = {(batch, K + 1) for _, batch, K in sides}, next(iter(sides.values()))
    products = ProductClock(any_side.loop, any_side.weights, calls, progress=progress)
    measured = _decode(sides, products, passes, progress)
    fitted = {key[1:]: texts for key, texts in measured.items() if key[0] == "fit"}
    costs = CostTable(
        rounds=tuple(_round(K, batch, texts) for (batch, K), texts in fitted.items()),
        error=float(np.median([_round_error(texts) for texts in fitted.values()])),
        # The mean, as of rounds: the machine may be fast for a while and then slow, and both cover all of that.
        products_ms=tuple((rows, float(ms.mean())) for rows, ms in products.samples_ms().items()),
    )
    # A text has the same rounds in every batch and counts once; the last batch begins again with the first text.
    drafted = {K: texts.rows for (batch, K), texts in fitted.items() if K and batch == min(fit_batches)}
    acceptance = ByLength({K: Profile.of_texts(rows[: len(halves[0])]) for K, rows in drafted.items()})

    def checks(costs: CostTable) -> list[Check]:
        plan = make_plan(acceptance, costs, draft_lengths=check_lengths, batch=check_batch, new_tokens=max_new_tokens)
        return [
            _check(plan[K], texts, check_batch, K in (0, *fit_lengths) and check_batch in fit_batches)
            for (name, _, K), texts in measured.items()
            if name == "check"
        ]

    lines = checks(dataclasses.replace(costs, products_ms=()))
    return _summary(
        checks(costs),
        costs,
        worst_error_of_lines=_worst(lines),
        fit_lengths=tuple(fit_lengths),
        fit_batches=tuple(fit_batches),
        check_batch=check_batch,
        prompts=(len(halves[0]), len(halves[1])),
    )


def _decode(
    sides: Mapping[tuple, Decoder], products: ProductClock, passes: int, progress: Callable[[str], None]
) -> dict[tuple, Texts]:
    """All texts of all sides, ``passes`` times; some samples of products lie between."""
    for number, (name, side) in enumerate(sides.items()):
        progress(f"compiling {number + 1} of {len(sides)}: {name[0]}, batch {name[1]}, K = {name[2]}")
        side.decode(0)
    seconds = {name: np.zeros((passes, side.workload.repeats)) for name, side in sides.items()}
    rounds = {name: np.zeros(side.workload.repeats) for name, side in sides.items()}
    rows: dict[tuple, list[RowStats]] = {name: [] for name in sides}
    turns = max(side.workload.repeats for side in sides.values())
    for number, turn in itertools.product(range(passes), range(turns)):
        progress(f"pass {number + 1} of {passes}: turn {turn + 1} of {turns}")
        if turn % -(-turns // SAMPLES) == 0:
            products.measure()
        for name, side in sides.items():
            # A side with fewer batches of texts takes them spread over the pass: the machine changes meanwhile.
            repeat, following = (at * side.workload.repeats // turns for at in (turn, turn + 1))
            if repeat < following:
                timing = side.decode(repeat)
                seconds[name][number, repeat], rounds[name][repeat] = timing.loop_seconds, timing.rounds
                if number == 0:
                    rows[name] += timing.rows
    return {
        name: Texts(
            seconds_PR=seconds[name],
            rounds_R=rounds[name],
            rows=tuple(rows[name]),
            tokens=side.workload.max_new_tokens,
        )
        for name, side in sides.items()
    }


def _round(draft_length: int, batch: int, texts: Texts) -> Round:
    ms = np.median(texts.seconds_PR, axis=0).sum() / texts.rounds_R.sum() * 1e3
    return Round(draft_length=draft_length, batch=batch, ms=float(ms))


def _round_error(texts: Texts) -> float:
    """One relative standard error of the time of a round: what the clock leaves open."""
    ms_R = np.median(texts.seconds_PR, axis=0) / texts.rounds_R
    return Spread.of(ms_R).relative_error(len(ms_R))


def _check(forecast: Forecast, texts: Texts, batch: int, cost_was_fitted: bool) -> Check:
    tokens = texts.tokens * len(texts.rounds_R)  # of one row, over all batches of texts
    measured = np.median(texts.seconds_PR, axis=0).sum() / tokens / batch * 1e3
    totals = texts.seconds_PR.sum(1)
    rounds = texts.rounds_R.sum() / tokens
    round_ms = measured * batch / rounds
    return Check(
        draft_length=forecast.draft_length,
        cost_was_fitted=cost_was_fitted,
        forecast=forecast.ms_per_token,
        measured=float(measured),
        error=float(forecast.ms_per_token.value / measured - 1),
        noise=float((totals.max() - totals.min()) / totals.mean()),
        rounds_error=float(forecast.rounds_per_token / rounds - 1),
        round_ms_error=float(forecast.round_ms / round_ms - 1),
    )


def _worst(checks: Sequence[Check]) -> float:
    """The largest error where the cost was not fitted."""
    unseen = [check for check in checks if not check.cost_was_fitted] or checks
    return max(abs(check.error) for check in unseen)


def _summary(checks: Sequence[Check], costs: CostTable, **asked: Any) -> Agreement:
    by_forecast = min(checks, key=lambda check: check.forecast.value)
    by_clock = min(checks, key=lambda check: check.measured)
    return Agreement(
        costs=costs,
        checks=tuple(checks),
        worst_error=_worst(checks),
        worst_noise=max(check.noise for check in checks),
        best_forecast=by_forecast.draft_length,
        best_measured=by_clock.draft_length,
        lost=by_forecast.measured / by_clock.measured - 1,
        **asked,
    )
