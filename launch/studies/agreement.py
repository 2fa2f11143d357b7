"""Checks the planner's forecasts against measurements: fitted on half of the prompts, checked on the other half.

    python launch/study.py agreement --config=configs/trained_pair.py --output=runs/python_pair_agreement.json

Two distributions are checked, greedy and the configuration's sampling. The rounds of a few K and of plain decoding are
timed on every second prompt, and acceptance is counted in them: at batch 1 to forecast K = 0 .. 12 at batch 1, and at
batches 1 and 8 to forecast --check_batch. Both are interpolated linearly in between, except for the products with the target's
matrices: these are timed alone for every number of rows. From this the planner forecasts ms per token of all K on the
other prompts. All sides decode in turn, in several passes. How far two passes over the *same* texts lie apart is the
noise: no forecast can be expected to come closer. The configuration's own K, batch and repeats are not used.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from launch.lib.cells import identity_of, read_prompts
from launch.lib.experiment import build, refuse
from launch.lib.rules import make_rule
from launch.lib.study import Document, Key, Option, Published, Say, Study, answers
from specsamp import greedy, use_compilation_cache
from specsamp.analysis.acceptance import Profile
from specsamp.analysis.costs import CostTable, Round, clock_error
from specsamp.analysis.grid import distribution_of
from specsamp.analysis.planner import Forecast, make_plan
from specsamp.analysis.report import Table
from specsamp.analysis.tables import words
from specsamp.analysis.workload import Decoder, Quartiles, Timing, Workload, decoders, product_timer, take_turns
from specsamp.decoding.drafters import NoDrafter
from specsamp.decoding.results import RowStats
from specsamp.mesh.distributed import gather_objects

BATCHES = (1, 8)  # that are fitted, to forecast one in between
PASSES = 2  # over all texts
FEWEST_BATCHES = 6  # of texts, since the time of the slowest row varies a lot
SAMPLES = 8  # of the products, in a pass


def prepare(options: Any) -> Any:
    """Returns the options with the pair, the distributions, and the batches that are fitted by the one that is forecast.

    Raises:
      ValueError: there is nothing to forecast, or nothing that could foresee it.
    """
    config, check = options.config.value, options.check_batch
    refuse(config)
    if not config.word.drafts:
        raise ValueError("without a drafter there is nothing to forecast")
    if check > BATCHES[-1]:
        raise ValueError(f"--check_batch={check} must be at most {BATCHES[-1]}, the largest batch that is fitted")
    experiment = build(config, read_prompts(options.prompts) if options.prompts else ())
    if (count := len(experiment.workload.prompts)) < 4:
        raise ValueError(f"two halves of prompts need four, this pair has {count}: give --prompts")
    use_compilation_cache()
    laws = {"greedy": greedy(), distribution_of(dataclasses.asdict(config.sampling)): experiment.sampling}
    batches = {1: BATCHES[:1]} | ({check: BATCHES} if check else {})
    return types.SimpleNamespace(
        **vars(options) | {"config": config}, experiment=experiment, laws=laws, batches=batches
    )


def identity(options: Any) -> dict[str, Any]:
    """Returns what all cells of a file share."""
    config, asked = (
        options.config,
        {"fit": options.fit, "longest": options.longest, "batches": BATCHES, "passes": PASSES},
    )
    turned = {"rule": config.rule, "drafter": config.drafter_name, "sampling": dataclasses.asdict(config.sampling)}
    return identity_of(config, options.experiment) | turned | {"asked": asked}


def measure(options: Any, key: Key, say: Say) -> dict[str, Any]:
    """Fits on one half of the prompts; forecasts and measures on the other."""
    config, pair, work = options.config, options.experiment.pair, options.experiment.workload

    def sides_of(half: int, batch: int, lengths: Sequence[int]) -> dict[int, Decoder]:
        texts = work.prompts[half::2]
        repeats = len(texts) if batch == 1 else max(-(-len(texts) // batch), FEWEST_BATCHES)
        here = dataclasses.replace(work, batch=batch, repeats=repeats, prompts=texts)
        drafters = {K: config.make_drafter(pair.target, pair.draft_or_head, K) for K in lengths if K}
        contenders = {K: (drafter, make_rule(config.rule)) for K, drafter in ({0: NoDrafter()} | drafters).items()}
        return decoders(pair, contenders, options.laws[key["law"]], here)

    check = sides_of(1, key["batch"], range(options.longest + 1))
    sizes = options.batches[key["batch"]]
    return agreement(
        check, {(size, K): each for size in sizes for K, each in sides_of(0, size, options.fit).items()}, say
    )


def agreement(check: Mapping[int, Decoder], fit: Mapping[tuple[int, int], Decoder], say: Say) -> dict[str, Any]:
    """Forecasts from the texts of one half of the prompts what is measured on the other.

    Args:
      check: decoders of the texts to foresee by K, all of one batch.
      fit: decoders of the texts to fit to by batch and K, plain decoding among them.
    """
    side, texts = check[0], len(next(iter(fit.values())).workload.prompts)
    batch, tokens = side.workload.batch, side.workload.max_new_tokens
    calls = {(batch, K + 1) for K in check} | {(size, K + 1) for size, K in fit}
    timers = {size * count: product_timer(side.loop, side.weights, size, count) for size, count in sorted(calls)}
    for number, each in enumerate((*check.values(), *fit.values()), 1):
        say(f"compiling {number} of {len(check) + len(fit)}")
        each.decode(0)
    turns = max(each.workload.repeats for each in (*check.values(), *fit.values()))
    runs = {
        ("rows", rows): spread(lambda repeat, timer=timer: timer(), SAMPLES, turns) for rows, timer in timers.items()
    }
    runs |= {name: spread(each.decode, each.workload.repeats, turns) for name, each in {**check, **fit}.items()}
    samples = take_turns(runs, PASSES * turns, say)
    timings = {name: [one for one in found if one is not None] for name, found in samples.items()}
    # The mean, as of rounds: if the machine is fast for a while and then slow, both cover all of that.
    products = {rows: gather_objects(float(np.mean(timings["rows", rows])))[0] for rows in sorted(timers)}
    timed = {name: Timed.of(timings[name]) for name in (*check, *fit)}
    costs = CostTable(
        rounds=tuple(Round(draft_length=K, batch=size, ms=timed[size, K].round_ms) for size, K in fit),
        error=clock_error(timed[name].error for name in fit),
        products_ms=tuple(products.items()),
    )
    # A text has the same rounds in every batch, so it is counted once; the last batch may repeat the first texts.
    smallest = min(size for size, _ in fit)
    counted = {K: timed[size, K].rows[:texts] for size, K in fit if K and size == smallest}
    acceptance = {K: Profile.of_texts(rows) for K, rows in counted.items()}

    def checks(costs: CostTable) -> list[dict[str, Any]]:
        plan = make_plan(acceptance, costs, draft_lengths=tuple(check), batch=batch, new_tokens=tokens)
        return [compared(plan[K], timed[K], side.workload) | {"cost_was_fitted": (batch, K) in fit} for K in check]

    found = checks(costs)
    forecast, clock = (min(found, key=ms) for ms in (lambda one: one["forecast"].value, lambda one: one["measured"]))
    return {
        "fit_lengths": sorted({K for _, K in fit if K}),
        "fit_batches": sorted({size for size, _ in fit}),
        "check_batch": batch,
        "prompts": (texts, len(side.workload.prompts)),
        "costs": costs,
        "checks": found,
        "worst_error": worst(found),
        "worst_error_of_lines": worst(checks(dataclasses.replace(costs, products_ms=()))),
        "worst_noise": max(one["noise"] for one in found),
        "best_forecast": forecast["draft_length"],
        "best_measured": clock["draft_length"],
        "lost": forecast["measured"] / clock["measured"] - 1,
    }


def spread(run: Callable[[int], Any], count: int, turns: int) -> Callable[[int], Any]:
    """Returns what runs ``count`` times in a pass of so many turns, evenly: the machine may change meanwhile."""

    def now_and_then(turn: int) -> Any:
        number, following = (at * count // turns for at in (turn % turns, turn % turns + 1))
        return run(number) if number < following else None

    return now_and_then


@dataclasses.dataclass(frozen=True)
class Timed:
    """The rounds and times of all texts of a decoder: seconds by pass and batch of texts."""

    seconds_PR: np.ndarray
    rounds_R: np.ndarray
    rows: tuple[RowStats, ...]

    @classmethod
    def of(cls, timings: Sequence[Timing]) -> Timed:
        """Reads the timings of all passes; every pass has the same texts."""
        first = timings[: len(timings) // PASSES]
        seconds_PR = np.array([timing.loop_seconds for timing in timings]).reshape(PASSES, -1)
        rows = tuple(row for timing in first for row in timing.rows)
        return cls(seconds_PR, np.array([timing.rounds for timing in first]), rows)

    @property
    def round_ms(self) -> float:
        """The milliseconds of a round."""
        return float(np.median(self.seconds_PR, axis=0).sum() / self.rounds_R.sum() * 1e3)

    @property
    def error(self) -> float:
        """The relative standard error of a round's time."""
        ms_R = np.median(self.seconds_PR, axis=0) / self.rounds_R
        return Quartiles.of(ms_R).relative_error(len(ms_R))


def compared(forecast: Forecast, timed: Timed, work: Workload) -> dict[str, Any]:
    """Returns a forecast beside what was measured, and what acceptance and costs contribute to its error."""
    rounds = timed.rounds_R.sum() / (work.max_new_tokens * len(timed.rounds_R))  # of one row, per token
    measured, totals = timed.round_ms * rounds / work.batch, timed.seconds_PR.sum(1)
    return {
        "draft_length": forecast.draft_length,
        "forecast": forecast.ms_per_token,
        "measured": float(measured),
        "error": float(forecast.ms_per_token.value / measured - 1),
        "noise": float((totals.max() - totals.min()) / totals.mean()),  # of two passes over the same texts
        "rounds_error": float(forecast.rounds_per_token / rounds - 1),
        "round_ms_error": float(forecast.round_ms / timed.round_ms - 1),
    }


def unseen(checks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the checks whose cost was not fitted; all of them where none is."""
    return [check for check in checks if not check["cost_was_fitted"]] or [*checks]


def worst(checks: Sequence[Mapping[str, Any]]) -> float:
    """Returns the largest error where the cost was not fitted."""
    return max(abs(check["error"]) for check in unseen(checks))


def agreement_table(document: Document) -> Table:
    """Returns how far forecasts and measurements lie apart, a row for each distribution and batch."""
    rows = []
    for key, result in answers(document):
        checks, hidden = result["checks"], unseen(result["checks"])
        covered = [one["forecast"]["lower"] <= one["measured"] <= one["forecast"]["upper"] for one in checks]
        errors, noise = {abs(one["error"]): one["draft_length"] for one in hidden}, [one["noise"] for one in hidden]
        row = {
            "": words(key["law"]),
            "checked at batch": result["check_batch"],
            "within the 95% band": f"{sum(covered)} of {len(covered)}",
            "median error": f"{np.median([*errors]):.1%}",
            "worst error": f"{max(errors):.1%} (K = {errors[max(errors)]})",
            "noise: median, worst": f"{np.median(noise):.1%}, {result['worst_noise']:.1%}",
            "best K: forecast, measured": f"{result['best_forecast']}, {result['best_measured']}",
            "lost by the choice": f"{result['lost']:.1%}",
        }
        rows.append(row)
    return Table.of("Forecasts on other prompts", rows)


STUDY = Study(
    question="Do the planner's forecasts hold on prompts that nothing was fitted to?",
    config="configs/trained_pair.py",
    options={
        "fit": Option((1, 4, 8), "Time rounds of these K to fit the costs.", least=1),
        "longest": Option(12, "The largest K to forecast.", least=1),
        "check_batch": Option(4, "Forecast this batch size from 1 and 8; 0 leaves that out.", least=0),
        "prompts": Option("", "Decode the prompts of this file, JSON or one in each line; by default the pair's."),
    },
    prepare=prepare,
    identity=identity,
    cells=lambda options: [{"law": law, "batch": batch} for law in options.laws for batch in options.batches],
    measure=measure,
    tables={
        "agreement": Published(["python_pair_agreement"], agreement_table),
    },
)
