"""Does the planner foresee what the benchmark measures? Fitted on half of the prompts, checked on the other half.

    python launch/agreement.py --config=configs/trained_pair.py --output=notebooks/results/python_pair_agreement.json

Greedy and at the configuration's temperature: costs fitted at K = 1, 4, 8, with plain decoding beside them, and batch 1
forecast K = 0 .. 12 at batch 1; fitted at batch 1 and 8 they forecast batch 4. The file is written after each of the
four; the same command goes on where it was interrupted.
"""

import itertools
import sys
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

import entry
from cells import identity_of, read_prompts
from experiment import DRAFTERS, RULES, Experiment, build, choose, config_mesh, headline, refuse
from specsamp import greedy, use_compilation_cache
from specsamp.analysis import report, tables
from specsamp.analysis.agreement import agreement
from specsamp.analysis.grid import Results
from specsamp.mesh import processes

_CONFIG = config_flags.DEFINE_config_file("config", "configs/trained_pair.py", lock_config=True)
_PASSES = flags.DEFINE_integer("passes", 2, "Over all texts and draft lengths.", lower_bound=2)
_FIT = flags.DEFINE_multi_integer("fit", [1, 4, 8], "K whose rounds are timed; may be repeated.", lower_bound=1)
_LONGEST = flags.DEFINE_integer("longest", 12, "The largest K to forecast.", lower_bound=1)
_BATCHES = flags.DEFINE_multi_integer("batch", [1, 8], "The smallest and largest to fit.", lower_bound=1)
_CHECK_BATCH = flags.DEFINE_integer("check_batch", 4, "To forecast from them; 0 leaves that out.", lower_bound=0)
_PROMPTS = flags.DEFINE_string("prompts", None, "File of prompts, JSON or one in each line; default the pair's.")
_OUTPUT = flags.DEFINE_string("output", None, "Where to write the result as JSON; nothing is written by default.")
_PLAIN = flags.DEFINE_bool("plain", False, "Print tables as plain text.")

ALLOWED = 0.10  # what the forecasts are meant to keep


def main() -> None:
    console = entry.make_console(no_color=_PLAIN.value, highlight=False)
    config = _CONFIG.value
    try:
        entry.check_output(_OUTPUT.value)
        refuse(config, "draft_temperature", "synthetic_acceptance")
        if config.drafter == "none":
            raise ValueError("without a drafter there is nothing to forecast")
        if _CHECK_BATCH.value and not min(_BATCHES.value) <= _CHECK_BATCH.value <= max(_BATCHES.value):
            raise ValueError(f"--check_batch={_CHECK_BATCH.value} must lie within --batch={_BATCHES.value}")
        experiment = build(config, read_prompts(_PROMPTS.value) if _PROMPTS.value else (), mesh=config_mesh(config))
        make = choose("drafter", config.drafter, DRAFTERS)
        if not experiment.workload.prompts:
            raise ValueError("a pair without prompts has no halves of them: give configs/trained_pair.py")
        results = Results.open(_OUTPUT.value, identity(config, experiment), console.print)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    use_compilation_cache()
    console.print(headline(experiment))
    work = experiment.workload
    laws = {"greedy": greedy(), f"temperature {config.sampling.temperature:g}": experiment.sampling}
    batches = {1: (1,)} | ({_CHECK_BATCH.value: tuple(sorted(_BATCHES.value))} if _CHECK_BATCH.value else {})
    header = {"command": entry.command(), "environment": report.environment(), "allowed": ALLOWED}
    with console.status("starting") as status:
        for (law, warp), (batch, fit_batches) in itertools.product(laws.items(), batches.items()):
            where, key = f"{law}, batch {batch}", {"law": law, "batch": batch}
            if known := processes.gather_objects(results.find(key))[0]:  # the first process reads the file
                error = known["result"]["worst_error"]
                console.print(f"{where}: in {_OUTPUT.value} already, worst error {error:.1%}", soft_wrap=True)
                continue
            try:
                found = agreement(
                    experiment.pair, lambda K: make(experiment.pair, K), RULES[config.rule](), warp, work.prompts,
                    max_new_tokens=work.max_new_tokens, fit_lengths=_FIT.value, fit_batches=fit_batches,
                    check_lengths=range(_LONGEST.value + 1), check_batch=batch, passes=_PASSES.value, seed=work.seed,
                    progress=lambda text: status.update(f"{where}: {text}"),
                )  # fmt: skip
            except ValueError as error:
                sys.exit(str(error))
            results.add({"key": key, "within": found.worst_error <= ALLOWED, "result": found}, header)
            report.show([tables.agreement_table(where, found, ALLOWED)], console, _PLAIN.value)
    if _OUTPUT.value and entry.is_first():
        console.print(f"\nwritten to {_OUTPUT.value}", soft_wrap=True)


def identity(config: ConfigDict, experiment: Experiment) -> dict[str, Any]:
    """What all that is in one file shares."""
    asked = {"fit": _FIT.value, "longest": _LONGEST.value, "batches": _BATCHES.value, "passes": _PASSES.value}
    turned = {name: config[name] for name in ("rule", "drafter")} | {"sampling": config.sampling.to_dict()}
    return identity_of(config, experiment) | turned | {"asked": asked}


if __name__ == "__main__":
    entry.run(main)
