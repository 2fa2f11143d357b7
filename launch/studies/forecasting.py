"""Checks whether the planner foresees what a benchmark measures: fitted on one half of the prompts, checked on the other.

    result = agreement(pair, make_drafter, rule, sampling, prompts, max_new_tokens=128)
    result = agreement(..., fit_batches=(1, 8), check_batch=4)

The costs of rounds are timed at a few draft lengths (and plain decoding) on every second prompt, and acceptance is counted
in the same rounds. Both are interpolated linearly in between, costs also between batches, except for the products with
the target's matrices: these are timed alone for every number of rows (`specsamp.analysis.costs`). The worst error without
these products is reported beside. From this the planner forecasts ms per token on the other prompts, for every K.

All sides decode in turn, in one process, in several passes. How far two passes over the *same* texts lie apart is the
noise: no forecast can be expected to come closer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specsamp.analysis.acceptance import ByLength, Interval, Profile
from specsamp.analysis.costs import CostTable, Round, clock_error
from specsamp.analysis.planner import DRAFT_LENGTHS, Forecast, make_plan
from specsamp.analysis.products import product_timer
from specsamp.analysis.report import Table
from specsamp.analysis.tables import interval
from specsamp.analysis.timing import Quartiles, take_turns
from specsamp.analysis.workload import Decoder, Timing, Workload, decoders
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.drafters import NoDrafter
from specsamp.decoding.loop import Loop
from specsamp.decoding.pair import Pair
from specsamp.decoding.results import RowStats
from specsamp.decoding.state import Weights
from specsamp.mesh.distributed import gather_objects
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp

FEWEST_BATCHES = 6  # of texts, since the time of the slowest row varies a lot
SAMPLES = 8  # of the products, in a pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """Rounds and milliseconds of one draft length, for the texts of one half of the prompts."""

    seconds_PR: np.ndarray  # pass, batch of texts
    rounds_R: np.ndarray
    rows: tuple[RowStats, ...]  # of all texts
    tokens: int  # of one row


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForecastCheck:
    """One draft length, on prompts that nothing was fitted to."""

    draft_length: int
    cost_was_fitted: bool  # its round was timed, on the other prompts
    forecast: Interval  # ms per token
    measured: float
    error: float  # forecast / measured - 1
    noise: float  # two passes over the same texts, as a share of their mean
    rounds_error: float  # of the rounds per token: what acceptance contributes
    round_ms_error: float  # of the time of a round: what costs contribute


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """Result of `agreement`."""

    fit_lengths: tuple[int, ...]
    fit_batches: tuple[int, ...]
    check_batch: int
    prompts: tuple[int, int]  # fitted to, checked on
    costs: CostTable  # as fitted
    checks: tuple[ForecastCheck, ...]
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
    """Fits on one half of the prompts; forecasts and measures on the other.

    Args:
      prompts: token ids; every second one, from the first on, is fitted to, the others are checked on.
      fit_lengths: K whose rounds are timed; plain decoding is timed with them.
      fit_batches: batches in which they are timed; ``check_batch`` lies between the smallest and the largest.
      check_lengths: K that are forecast and measured.
      check_batch: the batch of the forecast.
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
    products = product_timers(any_side.loop, any_side.weights, calls, progress)
    measured, products_ms = _measure(sides, products, passes, progress)
    fitted = {key[1:]: texts for key, texts in measured.items() if key[0] == "fit"}
    costs = CostTable(
        rounds=tuple(_round(K, batch, texts) for (batch, K), texts in fitted.items()),
        error=clock_error(_round_error(texts) for texts in fitted.values()),
        products_ms=tuple(products_ms.items()),
    )
    # A text has the same rounds in every batch, so it is counted once; the last batch may repeat the first texts.
    drafted = {K: texts.rows for (batch, K), texts in fitted.items() if K and batch == min(fit_batches)}
    acceptance = ByLength({K: Profile.of_texts(rows[: len(halves[0])]) for K, rows in drafted.items()})

    def checks(costs: CostTable) -> list[ForecastCheck]:
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


def product_timers(
    loop: Loop, weights: Weights, calls: Iterable[tuple[int, int]], progress: Callable[[str], None]
) -> dict[int, Callable[[], float]]:
    """Compiles the products with all of the target's matrices, as its calls have them.

    Args:
      calls: ``(batch, tokens)`` of each call.
      progress: is told what is being compiled.

    Returns:
      By ``batch * tokens``, a function that measures milliseconds once.
    """
    timers = {}
    for batch, tokens in sorted(calls, key=math.prod):
        progress(f"compiling: products of {batch * tokens} rows")
        timers[batch * tokens] = product_timer(loop, weights, batch, tokens)
    return timers


def _measure(
    sides: Mapping[tuple, Decoder],
    products: Mapping[int, Callable[[], float]],
    passes: int,
    progress: Callable[[str], None],
) -> tuple[dict[tuple, Texts], dict[int, float]]:
    """Decodes all texts of all sides ``passes`` times, with samples of the products in between.

    Returns:
      Texts by side, and mean milliseconds of the products by rows. The mean, as of rounds: if the machine is fast for a
      while and then slow, both cover all of that.
    """
    for number, (name, side) in enumerate(sides.items()):
        progress(f"compiling {number + 1} of {len(sides)}: {name[0]}, batch {name[1]}, K = {name[2]}")
        side.decode(0)
    turns = max(side.workload.repeats for side in sides.values())
    answers = take_turns(
        {("products", rows): functools.partial(_now_and_then, timer, turns) for rows, timer in products.items()}
        | {name: functools.partial(_spread, side, turns) for name, side in sides.items()},
        passes * turns,
        lambda text: progress(f"{passes} passes, turn {text}"),
    )
    measured = {}
    for name, side in sides.items():
        timings = [timing for timing in answers[name] if timing is not None]
        first = timings[: side.workload.repeats]
        measured[name] = Texts(
            seconds_PR=np.array([timing.loop_seconds for timing in timings]).reshape(passes, -1),
            rounds_R=np.array([timing.rounds for timing in first]),
            rows=tuple(row for timing in first for row in timing.rows),
            tokens=side.workload.max_new_tokens,
        )
    samples = {rows: [ms for ms in answers["products", rows] if ms is not None] for rows in products}
    return measured, {rows: gather_objects(float(np.mean(ms)))[0] for rows, ms in samples.items()}


def _now_and_then(timer: Callable[[], float], turns: int, turn: int) -> float | None:
    """Measures in about `SAMPLES` turns of each pass."""
    return timer() if turn % turns % -(-turns // SAMPLES) == 0 else None


def _spread(side: Decoder, turns: int, turn: int) -> Timing | None:
    """Spreads a side with fewer batches of texts evenly over the pass, as the machine may change meanwhile."""
    at = turn % turns
    repeat, following = (n * side.workload.repeats // turns for n in (at, at + 1))
    return side.decode(repeat) if repeat < following else None


def _round(draft_length: int, batch: int, texts: Texts) -> Round:
    ms = np.median(texts.seconds_PR, axis=0).sum() / texts.rounds_R.sum() * 1e3
    return Round(draft_length=draft_length, batch=batch, ms=float(ms))


def _round_error(texts: Texts) -> float:
    """Returns the relative standard error of the time of a round."""
    ms_R = np.median(texts.seconds_PR, axis=0) / texts.rounds_R
    return Quartiles.of(ms_R).relative_error(len(ms_R))


def _check(forecast: Forecast, texts: Texts, batch: int, cost_was_fitted: bool) -> ForecastCheck:
    tokens = texts.tokens * len(texts.rounds_R)  # of one row, over all batches of texts
    measured = np.median(texts.seconds_PR, axis=0).sum() / tokens / batch * 1e3
    totals = texts.seconds_PR.sum(1)
    rounds = texts.rounds_R.sum() / tokens
    round_ms = measured * batch / rounds
    return ForecastCheck(
        draft_length=forecast.draft_length,
        cost_was_fitted=cost_was_fitted,
        forecast=forecast.ms_per_token,
        measured=float(measured),
        error=float(forecast.ms_per_token.value / measured - 1),
        noise=float((totals.max() - totals.min()) / totals.mean()),
        rounds_error=float(forecast.rounds_per_token / rounds - 1),
        round_ms_error=float(forecast.round_ms / round_ms - 1),
    )


def _worst(checks: Sequence[ForecastCheck]) -> float:
    """Returns the largest error where the cost was not fitted."""
    unseen = [check for check in checks if not check.cost_was_fitted] or checks
    return max(abs(check.error) for check in unseen)


def _summary(checks: Sequence[ForecastCheck], costs: CostTable, **asked: Any) -> Agreement:
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


def agreement_table(where: str, found: Agreement, allowed: float) -> Table:
    """Returns a table of the draft lengths that were forecast and measured, one row each."""
    rows = [
        (
            f"K = {check.draft_length}{' (fitted)' if check.cost_was_fitted else ''}",
            interval(check.forecast),
            f"{check.measured:.3g}",
            f"{check.error:+.1%}",
            f"{check.rounds_error:+.1%}",
            f"{check.round_ms_error:+.1%}",
            f"{check.noise:.1%}",
        )
        for check in found.checks
    ]
    fitted = ", ".join(map(str, sorted({0, *found.fit_lengths})))
    covered = sum(check.forecast.lower <= check.measured <= check.forecast.upper for check in found.checks)
    return Table(
        title=f"{where}: forecast from K = {fitted} at batch {', '.join(map(str, found.fit_batches))} on other prompts",
        header=("", "forecast, ms per token", "measured", "error", "of rounds", "of a round's time", "noise"),
        rows=rows,
        note=f"worst error where the cost was not fitted {found.worst_error:.1%} (allowed {allowed:.0%}), worst noise "
        f"{found.worst_noise:.1%}; best K: forecast {found.best_forecast}, measured {found.best_measured}, which costs "
        f"{found.lost:.1%}. Interpolating rounds without the products: worst error {found.worst_error_of_lines:.1%}. "
        f"{covered} of {len(found.checks)} measurements lie within the 95% band. Noise: the difference of two passes over the same texts",
    )
