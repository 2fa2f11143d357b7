"""Measures what lossy rules gain, beside the bias that they meter: a curve for each rule, and exact rules at zero.

    python launch/studies/lossy.py --output=runs/python_lossy.json --figure=runs/python_lossy.png
    python launch/studies/lossy.py --rules=token,ears:0.3,bounded:0.01:ears:1 --prompts=2 --config.max_new_tokens=32

All rules and plain decoding take turns on the same prompts, in one process, for one distribution after the other; each
is written when it is done, and the same command goes on. A speedup is the median over prompts of the
ratio within a turn. Temperature and top-p are numbers of one program: all rules are compiled once. Tokens per round and
bias depend on no clock. Constants of rules follow their names after colons, see launch/lib/rules.py.
"""

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from launch.lib import entry
from launch.lib.config import ConfigFlag
from launch.lib.experiment import Experiment, build, headline, refuse
from launch.lib.fields import ExperimentConfig
from launch.lib.rules import make_rule
from launch.studies import lossy_curve
from specsamp import TokenRule, chain, storage, temperature, top_p, use_compilation_cache
from specsamp.analysis import report
from specsamp.analysis.grid import Results
from specsamp.analysis.timing import Quartiles, take_turns
from specsamp.analysis.workload import Decoder, Timing, decoders
from specsamp.decoding.drafters import NoDrafter
from specsamp.decoding.results import RowStats

RULES = (
    "token",
    "block",
    *(f"ears:{beta}" for beta in (0.1, 0.3, 1)),
    *(f"lenience:{lenience}" for lenience in (0.8, 0.5, 0.2)),
    *(f"typical:{epsilon}:{delta}" for epsilon, delta in ((0.3, 0.55), (0.09, 0.3), (0.01, 0.1))),
    *(f"joint:{tau}" for tau in (0.9, 0.5, 0.2)),
    *(f"bounded:{budget}:ears:1" for budget in (0.003, 0.01, 0.03)),
    *(f"bounded:{budget}:typical" for budget in (0.01, 0.03)),
)

_CONFIG = ConfigFlag("configs/trained_pair.py", ExperimentConfig)
_RULES = flags.DEFINE_list("rules", list(RULES), "The rules, with commas between them; the first is the exact one.")
_SAMPLINGS = flags.DEFINE_list("samplings", ["1.0/1.0", "0.8/0.95"], "Distributions, as temperature and top-p.")
_PROMPTS = flags.DEFINE_integer("prompts", 16, "Decode the first so many held-out prompts.", lower_bound=1)
_FIGURE = flags.DEFINE_string("figure", None, "Draw the curves of the first distribution into this PNG file.")
_OUTPUT = entry.define_output()

PLAIN = "plain"


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    entry.check_output(_FIGURE.value, "figure")
    config = _CONFIG.value
    refuse(config, "draft_temperature", "synthetic_acceptance")
    rules = {word: make_rule(word) for word in _RULES.value}
    if next(iter(rules)) != "token" or PLAIN in rules:
        raise ValueError(f"--rules={','.join(_RULES.value)} must begin with token, where all curves begin")
    samplings = [_sampling(text) for text in _SAMPLINGS.value]
    experiment = build(config)
    use_compilation_cache()
    console.print(headline(experiment, f"{len(rules)} rules, K = {experiment.drafter.K}, {_PROMPTS.value} prompts"))
    made_with = {
        "config": config.to_dict(),
        "pair": experiment.pair_name,
        "weights": experiment.weights,
        "prompts": _PROMPTS.value,
        "machine": report.machine(),
        "jax": jax.__version__,
    }
    results = Results.open(_OUTPUT.value, made_with, lambda text: console.print(text, style="yellow"))
    kept = f"the distributions measured so far are in {_OUTPUT.value}; the same command goes on"
    with entry.keeps(kept), entry.progress(console, "starting") as say:
        for heat, share in samplings:
            keys = [{"temperature": heat, "top_p": share, "rule": word} for word in rules]
            if all(results.find(key) for key in keys):
                continue
            for key, made in zip(keys, measure(experiment, rules, heat, share, say), strict=True):
                header = {"command": entry.command(), "environment": report.environment()}
                results.add({"key": key, "result": made}, header)
    curves = [
        [results.find({"temperature": heat, "top_p": share, "rule": word})["result"] for word in rules]
        for heat, share in samplings
    ]
    for (heat, share), points in zip(samplings, curves, strict=True):
        title = f"T = {heat:g}, top-p {share:g}, K = {experiment.drafter.K}"
        rows = lossy_curve.rows(points)
        entry.show([report.Table(title=title, header=lossy_curve.HEADER, rows=rows, note=lossy_curve.NOTE)], console)
    if _FIGURE.value:
        storage.write(_FIGURE.value, lossy_curve.draw(curves[0]))


def measure(
    experiment: Experiment, rules: Mapping[str, Any], heat: float, share: float, say: Any
) -> list[dict[str, Any]]:
    """Decodes all prompts with every rule and plainly, in turn, and returns a point for each rule."""
    work = dataclasses.replace(experiment.workload, batch=1, repeats=_PROMPTS.value)
    contenders = {PLAIN: (NoDrafter(), TokenRule())}
    contenders |= {word: (experiment.drafter, rule) for word, rule in rules.items()}
    sides = decoders(experiment.pair, contenders, chain(temperature(heat), top_p(share)), work)
    for word, side in sides.items():
        say(f"T = {heat:g}, compiling: {word}")
        side.decode(0)
    runs = {word: side.decode for word, side in sides.items()}
    timings = take_turns(runs, work.repeats, lambda turn: say(f"T = {heat:g}, prompt {turn}"))
    plain = seconds(timings[PLAIN])
    return [point(word, sides[word], timings[word], plain, heat, share) for word in rules]


def point(
    word: str, side: Decoder, timings: Sequence[Timing], plain: np.ndarray, heat: float, share: float
) -> dict[str, Any]:
    """Returns what a rule gained and cost; an exact one costs nothing."""
    stats: RowStats = functools.reduce(operator.add, (timing.stats for timing in timings))
    variation, extra = (stats.variation, stats.extra_accepted) if side.loop.rule.metered else (0.0, 0.0)
    return {
        "rule": word,
        "exact": side.loop.rule.exact,
        "temperature": heat,
        "top_p": share,
        "draft_length": side.loop.drafter.K,
        "tokens_per_round": stats.emitted_per_round,
        "acceptance": stats.acceptance_rate,
        "bought": extra / sum(stats.reached),
        "variation_per_token": variation / stats.emitted,
        "variation_per_text": variation / len(timings),
        "ms_per_token": Quartiles.of(seconds(timings) / side.workload.max_new_tokens * 1e3),
        "speedup": vars(Quartiles.of(plain / seconds(timings))),
    }


def seconds(timings: Sequence[Timing]) -> np.ndarray:
    """Returns the seconds of the loop in each turn."""
    return np.array([timing.loop_seconds for timing in timings])


def _sampling(text: str) -> tuple[float, float]:
    heat, _, share = text.partition("/")
    try:
        return float(heat), float(share)
    except ValueError as error:
        raise ValueError(f"--samplings has {text!r}: write a temperature and a top-p, such as 0.8/0.95") from error


if __name__ == "__main__":
    entry.run(main, _CONFIG)
