"""Measures the speedup of a trained pair over draft lengths and rules, and how much of what theory allows it is.

    python launch/studies/speedup.py --config=configs/trained_pair.py --output=runs/python_pair_speedup.json

Greedy and with temperature 0.8, top-p 0.95. Every rule and K is a cell of `specsamp.analysis.benchmark`, which takes turns
with plain decoding of the same prompts. What theory allows follows from the measured acceptance rate and the measured
times of the calls (`Result.allowed_speedup` there); beside it stands the same with the measured tokens per round.
"""

import dataclasses

from absl import flags

from launch.lib import entry
from launch.lib.config import ConfigFlag
from launch.lib.drafters import drafter_name, make_drafter, word_of
from launch.lib.experiment import Experiment, build, headline, refuse
from launch.lib.fields import ExperimentConfig
from launch.lib.rules import RULES
from launch.studies.theory import curve_of, curve_table
from specsamp import chain, greedy, temperature, top_p, use_compilation_cache
from specsamp.analysis.grid import Cell, Results, measure_cells
from specsamp.sampling.warp import Warp

_CONFIG = ConfigFlag("configs/trained_pair.py", ExperimentConfig)
_LENGTHS = flags.DEFINE_multi_integer(
    "draft_length", [1, 2, 3, 4, 5, 6, 7, 8], "Draft length K to measure; may be repeated.", lower_bound=1
)
_RULES = flags.DEFINE_multi_enum(
    "rule", ["token", "block"], sorted(RULES), "Acceptance rule to measure; may be repeated."
)
_PASSES = flags.DEFINE_integer("passes", 3, "How often each side decodes every prompt.", lower_bound=1)
_OUTPUT = entry.define_output()

DISTRIBUTIONS = {"greedy": greedy(), "temperature 0.8, top-p 0.95": chain(temperature(0.8), top_p(0.95))}


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    refuse(_CONFIG.value, "draft_temperature", "synthetic_acceptance")
    experiment = build(_CONFIG.value)
    if not word_of(_CONFIG.value).drafts:
        raise ValueError("--config.drafter: without a drafter there is no curve")
    use_compilation_cache()
    console.print(headline(experiment))
    curves = {}
    with entry.progress(console, "starting") as say:
        for name, warp in DISTRIBUTIONS.items():
            cells = cells_of(experiment, name, warp)
            measured = measure_cells(experiment.pair, cells, Results.open(None, {}), progress=say)
            curves[name] = curve_of(measured, deterministic=name == "greedy")
    entry.show([curve_table(name, curve) for name, curve in curves.items()], console)
    document = {
        "config": {k: v for k, v in _CONFIG.value.to_dict().items() if k not in ("sampling", "rule", "draft_length")},
        "pair": experiment.pair_name,
        "weights": experiment.weights,
        "timed": "the loop of every side: prefill and compilation are left out, end-of-text tokens do not stop it",
        "models": experiment.configs,
        "curves": curves,
        "best_draft_length": {
            name: {rule: curve.best(rule).draft_length for rule in _RULES.value} for name, curve in curves.items()
        },
    }
    entry.write_result(_OUTPUT.value, document, console)


def cells_of(experiment: Experiment, name: str, warp: Warp) -> list[Cell]:
    """Makes the cells of one distribution."""
    work, pair, config = experiment.workload, experiment.pair, _CONFIG.value
    return [
        Cell(
            key={
                "draft_length": K,
                "drafter": drafter_name(config),
                "rule": rule,
                "batch": work.batch,
                "temperature": 0.0 if name == "greedy" else 0.8,
                "top_k": 0,
                "top_p": 1.0 if name == "greedy" else 0.95,
                "min_p": 0.0,
            },
            drafter=make_drafter(config, pair.target, pair.draft_or_head, K),
            rule=RULES[rule](),
            sampling=warp,
            draft_sampling=None,
            workload=dataclasses.replace(work, repeats=work.repeats * _PASSES.value),
        )
        for rule in _RULES.value
        for K in _LENGTHS.value
    ]


if __name__ == "__main__":
    entry.run(main, _CONFIG)
