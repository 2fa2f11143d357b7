"""Measures what a draft length that adapts costs and gains beside plain decoding and beside every fixed length.

    python launch/studies/adaptive.py --config=configs/trained_pair.py --config.max_new_tokens=64 --prompts=runs/python_prompts.json --output=runs/python_adaptive.json

Texts are of two kinds: "easy", greedy, after prompts that say everything twice; and "hard", sampled at temperature 1, where
prompt lookup finds little. All is done in two ways. *Counted*: the rounds that a run takes, each at the milliseconds of its width in a table that is measured
first, on other texts; no clock disturbs that. *By the clock*: plain decoding and adaptive lengths take turns on the same
texts; the loss is the time of all texts over that of plain decoding, less one, and its upper bound holds 95% of the
resampled sets of texts. The best fixed length is chosen afterwards; the oracle chooses one afterwards for each batch of texts.
Costs, the usual length and the acceptance that rows begin with are calibrated on a fifth of the prompts; the others are
measured, each once (launch/studies/cut_prompts.py cuts many). What a draft model reads after a pause is in the clock
alone. Each setting is written when it is done, and the same command goes on after the last that was.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console

from launch.lib import entry
from launch.lib.cells import read_prompts
from launch.lib.config import ConfigFlag
from launch.lib.drafters import DRAFTERS, make_drafter
from launch.lib.experiment import Experiment, build, headline, refuse
from launch.lib.fields import ExperimentConfig
from launch.lib.rules import make_rule
from launch.studies.adaptive_points import HEADER, NOTE, Point, rows_of
from specsamp import Adaptive, chain, machine, storage, temperature, use_compilation_cache
from specsamp.analysis.draft_length import adapted_to
from specsamp.analysis.report import Table
from specsamp.analysis.timing import take_turns
from specsamp.analysis.workload import Decoder, Workload, decoders
from specsamp.decoding.drafters import NoDrafter
from specsamp.decoding.job import to_host

_CONFIG = ConfigFlag("configs/trained_pair.py", ExperimentConfig)
_LENGTHS = flags.DEFINE_list(
    "lengths", ["0", "1", "2", "4", "8"], "The draft lengths, from 0 on, with commas between them."
)
_DRAFTERS = flags.DEFINE_list("drafters", ["model", "ngram"], "The words of the drafters, with commas between them.")
_BATCHES = flags.DEFINE_list("batches", ["1", "2", "4", "8"], "The numbers of rows, with commas between them.")
_KINDS = flags.DEFINE_list("kinds", ["easy", "hard"], "The kinds of texts, with commas between them.")
_PROMPTS = flags.DEFINE_string(
    "prompts", None, "Decode the prompts of this file, JSON or one in each line; by default the pair's."
)
_TEXTS = flags.DEFINE_integer("texts", 160, "How many texts are decoded by the clock in each setting.", lower_bound=1)
_COUNTED = flags.DEFINE_integer("counted", 48, "How many of them are counted, with every length.", lower_bound=1)
_OUTPUT = entry.define_output()

RESAMPLED = 2000  # sets of texts, for the bound of the loss
TEMPERATURES = {"easy": 0.0, "hard": 1.0}


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    config = _CONFIG.value
    refuse(config, "draft_temperature", "synthetic_acceptance")
    lengths, batches = (tuple(_whole(flag)) for flag in (_LENGTHS, _BATCHES))
    Adaptive(lengths=lengths, costs_ms=[1.0] * len(lengths))  # refuses lengths that do not rise
    if lengths[0] != 0 or any(word not in DRAFTERS or not DRAFTERS[word].drafts for word in _DRAFTERS.value):
        raise ValueError(f"--lengths={_LENGTHS.value} must begin with 0, and --drafters={_DRAFTERS.value} must draft")
    if unknown := set(_KINDS.value) - set(TEMPERATURES):
        raise ValueError(f"--kinds={','.join(_KINDS.value)}: no {min(unknown)}; choose of {', '.join(TEMPERATURES)}")
    experiment = build(config, read_prompts(_PROMPTS.value) if _PROMPTS.value else ())
    calibrated, measured = split(experiment.workload.prompts)
    if not calibrated or len(measured) < _TEXTS.value:
        raise ValueError(
            f"--texts={_TEXTS.value} needs a quarter more prompts, and there are {len(calibrated) + len(measured)}: give "
            "more by --prompts (launch/studies/cut_prompts.py), or fewer texts"
        )
    use_compilation_cache()
    console.print(headline(experiment, f"adaptive draft lengths, {_TEXTS.value} texts in each setting"))
    made_with = {
        "config": config.to_dict(),
        "pair": experiment.pair_name,
        "weights": experiment.weights,
        "texts": {"clock": _TEXTS.value, "counted": _COUNTED.value},
        "lengths": lengths,
        "machine": machine.environment()["machine"],
    }
    points = points_before(json.loads(json.dumps(made_with)))
    with entry.progress(console, "starting") as say:
        for word, kind, batch in itertools.product(_DRAFTERS.value, _KINDS.value, batches):
            if any((one.drafter, one.kind, one.batch) == (word, kind, batch) for one in points):
                continue
            say(f"{word}, {kind} texts, batch {batch}")
            points.append(measure(config, experiment, word, kind, batch, lengths))
            entry.write_result(_OUTPUT.value, made_with | {"points": points}, Console(quiet=True))
    table = Table(title="Adaptive draft lengths", header=HEADER, rows=rows_of(points), note=NOTE)
    entry.show([table], console)
    entry.write_result(_OUTPUT.value, made_with | {"points": points}, console)


def points_before(made_with: dict) -> list[Point]:
    """Returns the points of the output, if it is there.

    Raises:
      ValueError: it was made with another configuration, or holds something else.
    """
    place = storage.place(_OUTPUT.value or "")
    if not _OUTPUT.value or not storage.is_regular_file(place):
        return []
    with entry.reading(_OUTPUT.value):
        document = storage.read_json(place)
        different = [name for name, value in made_with.items() if document[name] != value]
        points = [Point(**point) for point in document["points"]]
    if different:
        raise ValueError(f"--output={_OUTPUT.value} has another {', '.join(different)}: give another file")
    return points


def split(prompts: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the prompts that calibrate, every fifth, and those that are measured."""
    return tuple(prompts[::5]), tuple(prompt for at, prompt in enumerate(prompts) if at % 5)


def doubled(work: Workload) -> Workload:
    """Returns the workload with prompts that say everything twice."""
    prompts = tuple(prompt + prompt for prompt in work.prompts)
    return dataclasses.replace(work, prompts=prompts, prompt_length=max(map(len, prompts)))


def measure(
    config: ExperimentConfig, experiment: Experiment, word: str, kind: str, batch: int, lengths: Sequence[int]
) -> Point:
    """Measures one setting: the table of costs first, then the texts with every length and with adaptive ones."""
    pair, rule = experiment.pair, make_rule(config.rule)
    own = config.turned({"drafter": word})
    drafters = {K: make_drafter(own, pair.target, pair.draft_or_head, K) if K else NoDrafter() for K in lengths}
    work = dataclasses.replace(experiment.workload, batch=batch)
    work = doubled(work) if kind == "easy" else work
    sampling = chain(temperature(TEMPERATURES[kind]))
    sides = decoders(pair, {K: (drafter, rule) for K, drafter in drafters.items()}, sampling, work)
    others, prompts = split(work.prompts)
    turns, counted = (-(-texts // batch) for texts in (_TEXTS.value, min(_COUNTED.value, _TEXTS.value)))
    of_others = {K: with_prompts(side, others) for K, side in sides.items()}
    sides = {K: with_prompts(side, prompts) for K, side in sides.items()}
    for side in of_others.values():
        side.decode(0)  # compiles
    timed = take_turns({K: side.decode for K, side in of_others.items()}, -(-len(others) // batch))
    found = adapted_to(timed)
    costs_ms = found.costs_ms
    adaptive = dataclasses.replace(sides[lengths[-1]], adaptive=found)
    adaptive.decode(0)
    rounds_KN = np.array([[side.decode(n).rounds for n in range(counted)] for side in sides.values()])
    fixed_KN = rounds_KN * np.array(costs_ms)[:, None]
    counted_N = np.array([counted_ms(adaptive, n) for n in range(counted)])
    clocks = take_turns({"plain": sides[0].decode, "adaptive": adaptive.decode}, turns)
    seconds = {name: np.array([one.loop_seconds for one in timings]) for name, timings in clocks.items()}
    chosen = np.random.default_rng(0).integers(turns, size=(RESAMPLED, turns))
    ratios = seconds["adaptive"][chosen].sum(1) / seconds["plain"][chosen].sum(1)
    tokens, tokens_counted = (n * batch * work.max_new_tokens for n in (turns, counted))
    histogram = np.sum([one.stats.lengths for one in clocks["adaptive"]], axis=0)
    return Point(
        drafter=word,
        kind=kind,
        batch=batch,
        lengths=tuple(lengths),
        costs_ms=costs_ms,
        usual=found.usual,
        acceptance=found.acceptance,
        counted_fixed=tuple((fixed_KN.sum(1) / tokens_counted).tolist()),
        counted_adaptive=float(counted_N.sum() / tokens_counted),
        counted_oracle=float(fixed_KN.min(0).sum() / tokens_counted),
        clock_plain=float(seconds["plain"].sum() / tokens * 1e3),
        clock_adaptive=float(seconds["adaptive"].sum() / tokens * 1e3),
        loss=float(seconds["adaptive"].sum() / seconds["plain"].sum() - 1),
        loss_upper=float(np.quantile(ratios, 0.95) - 1),
        rounds_by_drafted=tuple(histogram.tolist()),
    )


def with_prompts(decoder: Decoder, prompts: tuple[Any, ...]) -> Decoder:
    """Returns a decoder of other prompts, with the same programs."""
    return dataclasses.replace(decoder, workload=dataclasses.replace(decoder.workload, prompts=prompts))


def counted_ms(decoder: Decoder, repeat: int) -> float:
    """Decodes round by round, and returns the sum of the milliseconds that the table gives each round's width."""
    policy, total = decoder.adaptive, 0.0
    state = decoder.loop.run(decoder.weights, decoder.prefill(repeat), 0)  # it knows what the drafter will find
    while True:
        running_B, wanted_B = to_host((state.running_B, state.pace.wanted_B))
        if not running_B.any():
            return total
        total += policy.costs_ms[policy.lengths.index(int(wanted_B[running_B].max()))]
        state = decoder.loop.run(decoder.weights, state, 1)


def _whole(flag: Any) -> list[int]:
    try:
        return [int(text) for text in flag.value]
    except ValueError as error:
        raise ValueError(
            f"--{flag.name}={','.join(flag.value)} must be whole numbers with commas between them"
        ) from error


if __name__ == "__main__":
    entry.run(main, _CONFIG)
