"""Speedup of a trained pair over draft lengths and rules, greedy and sampled, with what theory allows beside it.

python launch/studies/speedup.py --config=configs/trained_pair.py --output=notebooks/results/python_pair_speedup.json
"""

import dataclasses
import functools

from absl import flags

import _launch  # noqa: F401, the folder of entry
import entry
from config_file import ConfigFlag
from experiment import DRAFTERS, RULES, build, config_mesh, headline, refuse
from specsamp import chain, greedy, temperature, top_p, use_compilation_cache
from specsamp.analysis import report
from specsamp.analysis.speedup import speedup_curve

_CONFIG = ConfigFlag("configs/trained_pair.py")
_LENGTHS = flags.DEFINE_multi_integer("draft_length", [1, 2, 3, 4, 5, 6, 7, 8], "K; may be repeated.", lower_bound=1)
_RULES = flags.DEFINE_multi_enum("rule", ["token", "block"], sorted(RULES), "Acceptance rule; may be repeated.")
_PASSES = flags.DEFINE_integer("passes", 3, "Over all prompts and contenders.", lower_bound=1)
_OUTPUT = entry.define_output()

LAWS = {"greedy": greedy(), "temperature 0.8, top-p 0.95": chain(temperature(0.8), top_p(0.95))}


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    refuse(_CONFIG.value, "draft_temperature", "synthetic_acceptance")
    experiment = build(_CONFIG.value, mesh=config_mesh(_CONFIG.value))
    if _CONFIG.value.drafter == "none":
        raise ValueError("--config.drafter: without a drafter there is no curve")
    use_compilation_cache()
    console.print(headline(experiment))
    make = functools.partial(DRAFTERS[_CONFIG.value.drafter], experiment.pair)
    rules = {name: RULES[name]() for name in _RULES.value}
    curves = {}
    with entry.progress(console, "starting") as say:
        for law, warp in LAWS.items():
            curves[law] = speedup_curve(
                experiment.pair,
                make,
                rules,
                _LENGTHS.value,
                warp,
                experiment.workload,
                passes=_PASSES.value,
                deterministic=law == "greedy",
                progress=lambda text: say(f"{law}: {text}"),
            )
    entry.show([report.curve_table(law, curve) for law, curve in curves.items()], console)
    document = {
        "config": {k: v for k, v in _CONFIG.value.to_dict().items() if k not in ("sampling", "rule", "draft_length")},
        "pair": experiment.pair_name,
        "weights": experiment.weights,
        "timed": "the loop of every side: prefill and compilation are left out, end-of-text tokens do not stop it",
        "models": {"target": experiment.pair.target.config, "draft": experiment.pair.draft.config},
        "curves": {law: dataclasses.asdict(curve) for law, curve in curves.items()},
        "best_draft_length": {
            law: {rule: curve.best(rule).draft_length for rule in _RULES.value} for law, curve in curves.items()
        },
    }
    entry.write_result(_OUTPUT.value, document, console)


if __name__ == "__main__":
    entry.run(main, _CONFIG)
