"""Compares draft lengths that adapt with plain decoding and with every fixed length.

    python launch/study.py adaptive --prompts=notebooks/results/python_prompts.json --output=runs/python_adaptive.json

Texts are "easy", greedy after prompts that say everything twice; "hard", sampled at temperature 1, where prompt lookup
finds little; or "mixed", sampled at 0.8, every other one after a prompt that says everything twice. Plain decoding, every
fixed length and adaptive ones take turns; adaptive ones are calibrated on other prompts. Bounds hold 95% of resampled sets
of texts. The best fixed length is chosen afterwards.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launch.lib.drafters import DRAFTERS
from launch.lib.rules import make_rule
from launch.lib.study import Document, Option, Published, Study, answers
from specsamp import chain, temperature
from specsamp.analysis.draft_length import adapted_to
from specsamp.analysis.report import Table
from specsamp.analysis.workload import TimedDecoder, Workload, decode_in_turns, decoders
from specsamp.decoding.method import Method

LENGTHS = (0, 1, 2, 4, 8)
RESAMPLED = 2000  # sets of texts, for the bound of the loss
TEMPERATURES = {"easy": 0.0, "hard": 1.0, "mixed": 0.8}
DOUBLED = {"easy": 1, "mixed": 2}  # every how many prompts say everything twice
DRAFTING = [word for word, drafter in DRAFTERS.items() if drafter.drafts]


def cells(options: Any) -> list[Mapping[str, Any]]:
    """Returns a key for each drafter, kind of texts and batch; raises ValueError for too few prompts."""
    calibrated, measured = split(options, options.experiment.workload.prompts)
    if not calibrated or len(measured) < options.texts:
        raise ValueError(
            f"--texts={options.texts} needs a quarter more prompts, and there are {len(calibrated) + len(measured)}: give "
            "more by --prompts (notebooks/results/python_prompts.json has 160), or fewer texts"
        )
    settings = itertools.product(options.drafters, options.kinds, options.batches)
    return [{"drafter": word, "kind": kind, "batch": batch} for word, kind, batch in settings]


def split(options: Any, prompts: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the prompts for calibration, of every fifth a quarter of the texts, and the prompts for measurement."""
    return tuple(prompts[::5][: -(-options.texts // 4)]), tuple(p for at, p in enumerate(prompts) if at % 5)


def doubled(work: Workload, every: int) -> Workload:
    """Returns the workload with some prompts that say everything twice."""
    prompts = tuple(prompt if at % every else prompt + prompt for at, prompt in enumerate(work.prompts))
    return dataclasses.replace(work, prompts=prompts, prompt_length=max(map(len, prompts)))


def measure(options: Any, key: Mapping[str, Any], say: Any) -> dict[str, Any]:
    """Measures the table of costs, then the texts with every length and with adaptive ones: ms per token."""
    pair, config, batch = options.experiment.pair, options.config, key["batch"]
    own, rule = config.turned({"drafter": key["drafter"]}), make_rule(config.rule)
    drafters = {K: own.make_drafter(pair.target, pair.draft_or_head, K) for K in LENGTHS}
    work = dataclasses.replace(options.experiment.workload, batch=batch)
    work = doubled(work, DOUBLED[key["kind"]]) if key["kind"] in DOUBLED else work
    sampling = chain(temperature(TEMPERATURES[key["kind"]]))
    methods = {K: Method(drafter=drafter, rule=rule, sampling=sampling) for K, drafter in drafters.items()}
    sides = decoders(pair, methods, work)
    others, prompts = split(options, work.prompts)
    turns = -(-options.texts // batch)
    of_others = {K: with_prompts(side, others) for K, side in sides.items()}
    sides = {K: with_prompts(side, prompts) for K, side in sides.items()}
    found = adapted_to(decode_in_turns(of_others, -(-len(others) // batch), say))
    longest = dataclasses.replace(methods[LENGTHS[-1]], adaptive=found)
    (adaptive,) = decoders(pair, {"adaptive": longest}, dataclasses.replace(work, prompts=prompts)).values()
    clocks = decode_in_turns({**sides, "adaptive": adaptive}, turns, say)
    seconds = {name: np.array([one.loop_seconds for one in timings]) for name, timings in clocks.items()}
    fastest = min(LENGTHS, key=lambda K: seconds[K].sum())
    chosen = np.random.default_rng(0).integers(turns, size=(RESAMPLED, turns))

    def loss_over(K: int) -> tuple[float, float]:  # a gain is negative
        ratios = seconds["adaptive"][chosen].sum(1) / seconds[K][chosen].sum(1)
        return seconds["adaptive"].sum() / seconds[K].sum() - 1, np.quantile(ratios, 0.95) - 1

    tokens = turns * batch * work.max_new_tokens
    (loss, loss_upper), (over_best, over_best_upper) = loss_over(0), loss_over(fastest)
    return {
        **key,
        "lengths": LENGTHS,
        "costs_ms": found.costs_ms,
        "usual": found.usual,
        "acceptance": found.acceptance,
        "ms_per_token": {str(name): of_name.sum() / tokens * 1e3 for name, of_name in seconds.items()},
        "loss": loss,
        "loss_upper": loss_upper,
        "fastest": fastest,
        "over_best": over_best,
        "over_best_upper": over_best_upper,
    }


def with_prompts(decoder: TimedDecoder, prompts: tuple[Any, ...]) -> TimedDecoder:
    """Returns a decoder of other prompts, with the same programs."""
    return dataclasses.replace(decoder, workload=dataclasses.replace(decoder.workload, prompts=prompts))


def table(document: Document) -> Table:
    """Returns a row for each setting."""
    rows = []
    for key, one in answers(document):
        ms, best = one["ms_per_token"], str(one["fastest"])
        row = {"": f"{key['drafter']}, {key['kind']} texts, batch {key['batch']}"}
        row |= {name: f"{ms[of]:.2f}" for name, of in (("plain", "0"), ("best fixed", best), ("adaptive", "adaptive"))}
        row |= {"best K": best, "over plain": f"{one['loss']:+.1%} (at most {one['loss_upper']:+.1%})"}
        rows.append(row | {"over the best": f"{one['over_best']:+.1%} (at most {one['over_best_upper']:+.1%})"})
    return Table.of("Adaptive draft lengths, ms per token", rows)


STUDY = Study(
    question="What does a draft length that adapts cost and gain?",
    config="configs/trained_pair.py",
    options={
        "drafters": Option(
            ("model", "ngram"), "The words of the drafters, with commas between them.", choices=DRAFTING
        ),
        "kinds": Option(
            tuple(TEMPERATURES), "The kinds of texts, with commas between them.", choices=tuple(TEMPERATURES)
        ),
        "batches": Option((1, 2, 4, 8), "How many texts are decoded together, with commas between.", least=1),
        "texts": Option(128, "How many texts are decoded in each setting.", least=1),
    },
    cells=cells,
    identity=lambda options: {"texts": options.texts},
    measure=measure,
    tables={"adaptive": Published(["python_adaptive"], table)},
)
