"""Checks the planner's forecasts against measurements: fitted on half of the prompts, checked on the other half.

    python launch/study.py agreement --config=configs/trained_pair.py --output=runs/python_pair_agreement.json

Greedy and with the configuration's sampling, at batch 1 and 4, rounds of every K are timed and acceptance is counted on
every second prompt. From this the planner forecasts ms per token on the others. All sides decode in turn, in two passes; the
difference of two passes over the *same* texts is the noise, and no forecast comes closer.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from launch.lib.rules import make_rule
from launch.lib.study import Document, Key, Option, Published, Say, Study, answers
from specsamp import greedy
from specsamp.analysis.acceptance import Profile
from specsamp.analysis.costs import CostTable, clock_error
from specsamp.analysis.grid import distribution_of, words
from specsamp.analysis.planner import make_plan
from specsamp.analysis.report import Table
from specsamp.analysis.workload import Quartiles, TimedDecoder, decode_in_turns, decoders
from specsamp.decoding.drafters import NoDrafter
from specsamp.decoding.method import Method

BATCHES, PASSES, GREEDY = (1, 4), 2, "greedy"


def prepare(options: Any) -> None:
    """Refuses a configuration without a drafter."""
    if not options.config.word.drafts:
        raise ValueError("without a drafter there is nothing to forecast")


def cells(options: Any) -> list[Key]:
    """Returns a key for each distribution and batch; raises ValueError for too few prompts."""
    if (count := len(options.experiment.workload.prompts)) < 4:
        raise ValueError(f"two halves of prompts need four, this pair has {count}: give --prompts")
    laws = GREEDY, distribution_of(dataclasses.asdict(options.config.sampling))
    return [{"law": law, "batch": batch} for law in dict.fromkeys(laws) for batch in BATCHES]


def measure(options: Any, key: Key, say: Say) -> dict[str, Any]:
    """Fits on one half of the prompts; forecasts and measures on the other."""
    config, pair, work = options.config, options.experiment.pair, options.experiment.workload
    sampling = greedy() if key["law"] == GREEDY else options.experiment.method.sampling
    drafters = {K: config.make_drafter(pair.target, pair.draft_or_head, K) for K in range(1, options.longest + 1)}
    method = Method(drafter=NoDrafter(), rule=make_rule(config.rule), sampling=sampling)
    methods = {0: method} | {K: method.with_drafter(drafter) for K, drafter in drafters.items()}
    halves, each_half = [], len(work.prompts) // 2
    for half in (0, 1):
        prompts, repeats = work.prompts[half::2][:each_half], -(-each_half // key["batch"])
        here = dataclasses.replace(work, batch=key["batch"], repeats=repeats, prompts=prompts)
        halves.append(decoders(pair, methods, here))
    return agreement(*halves, say)


def agreement(fit: Mapping[int, TimedDecoder], check: Mapping[int, TimedDecoder], say: Say) -> dict[str, Any]:
    """Forecasts from the texts of one half of the prompts what is measured on the other; decoders are by K."""
    work = check[0].workload
    sides = {("fit", K): side for K, side in fit.items()} | {("check", K): side for K, side in check.items()}
    passes = [decode_in_turns(sides, work.repeats, say) for _ in range(PASSES)]  # of the same texts
    seconds_PR = {name: np.array([[one.loop_seconds for one in each[name]] for each in passes]) for name in sides}
    rounds_R = {name: np.array([one.rounds for one in passes[0][name]]) for name in sides}
    rows = {name: [row for one in passes[0][name] for row in one.rows] for name in sides}
    ms_R = {name: np.median(seconds, axis=0) * 1e3 for name, seconds in seconds_PR.items()}
    round_ms = {name: float(ms_R[name].sum() / rounds_R[name].sum()) for name in sides}
    costs = CostTable(
        {work.batch: {K: round_ms["fit", K] for K in fit}},
        error=clock_error(Quartiles.of(ms_R["fit", K] / rounds_R["fit", K]).relative_error(work.repeats) for K in fit),
    )
    texts = len(work.prompts)  # the last batch may repeat the first of them
    acceptance = {K: Profile.of_texts(rows["fit", K][:texts]) for K in fit if K}
    plan = make_plan(acceptance, costs, draft_lengths=tuple(check), batch=work.batch, new_tokens=work.max_new_tokens)
    measured = {K: ms_R["check", K].sum() / (work.repeats * work.batch * work.max_new_tokens) for K in check}
    totals = {K: seconds_PR["check", K].sum(1) for K in check}
    checks = [
        {
            "draft_length": K,
            "forecast": plan[K].ms_per_token,
            "measured": ms,
            "error": plan[K].ms_per_token.value / ms - 1,
            "noise": (totals[K].max() - totals[K].min()) / totals[K].mean(),
        }
        for K, ms in measured.items()
    ]
    chosen, best = plan.best.draft_length, min(measured, key=lambda K: measured[K])
    return {
        "check_batch": work.batch,
        "prompts": texts,
        "costs": costs,
        "checks": checks,
        "worst_error": max(abs(check["error"]) for check in checks),
        "worst_noise": max(check["noise"] for check in checks),
        "best_forecast": chosen,
        "best_measured": best,
        "lost": measured[chosen] / measured[best] - 1,
    }


def table(document: Document) -> Table:
    """Returns how far forecasts and measurements lie apart, a row for each distribution and batch."""
    rows = []
    for key, result in answers(document):
        checks = result["checks"]
        hidden = [check for check in checks if not check.get("cost_was_fitted")]  # as in older files
        covered = [check["forecast"]["lower"] <= check["measured"] <= check["forecast"]["upper"] for check in checks]
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
        "longest": Option(12, "The largest K to forecast.", least=1),
    },
    prepare=prepare,
    cells=cells,
    measure=measure,
    tables={"agreement": Published(["python_pair_agreement"], table)},
)
