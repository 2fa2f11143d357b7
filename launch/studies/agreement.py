"""Checks the planner's forecasts against measurements: fitted on half of the prompts, checked on the other half.

    python launch/studies/agreement.py --config=configs/trained_pair.py --output=runs/python_pair_agreement.json

Two distributions are checked, greedy and the configuration's sampling. Costs are fitted at K = 1, 4, 8 and plain decoding:
at batch 1 to forecast K = 0 .. 12 at batch 1, and at batches 1 and 8 to forecast batch 4. The file is written after each
of the four cells, and the same command goes on where it was interrupted. The configuration's own K, batch and repeats are
not used.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags

from launch.lib import entry
from launch.lib.cells import identity_of, read_prompts
from launch.lib.config import ConfigFlag
from launch.lib.drafters import drafter_name, make_drafter, word_of
from launch.lib.experiment import Experiment, build, config_mesh, headline, refuse
from launch.lib.fields import ExperimentConfig
from launch.lib.rules import make_rule
from launch.studies.forecasting import Agreement, agreement, agreement_table
from specsamp import greedy, use_compilation_cache
from specsamp.analysis import report
from specsamp.analysis.grid import Results, outcome_of
from specsamp.analysis.measured import distribution_of
from specsamp.mesh import distributed
from specsamp.sampling.warp import Warp

_CONFIG = ConfigFlag("configs/trained_pair.py", ExperimentConfig)
_PASSES = flags.DEFINE_integer("passes", 2, "How often all texts and draft lengths are measured.", lower_bound=2)
_FIT = flags.DEFINE_multi_integer(
    "fit", [1, 4, 8], "Time rounds of this K to fit the costs; may be repeated.", lower_bound=1
)
_LONGEST = flags.DEFINE_integer("longest", 12, "The largest K to forecast.", lower_bound=1)
_BATCHES = flags.DEFINE_multi_integer(
    "batch", [1, 8], "Fit costs at this batch size, the smallest and the largest; may be repeated.", lower_bound=1
)
_CHECK_BATCH = flags.DEFINE_integer(
    "check_batch", 4, "Forecast this batch size from the fitted ones; 0 leaves that out.", lower_bound=0
)
_PROMPTS = flags.DEFINE_string(
    "prompts", None, "Decode the prompts of this file, JSON or one in each line; by default the pair's."
)
_OUTPUT = entry.define_output()

ALLOWED = 0.10  # what the forecasts are meant to keep


def main() -> None:
    console = entry.make_console()
    config = _CONFIG.value
    entry.check_output(_OUTPUT.value)
    refuse(config, "draft_temperature", "synthetic_acceptance")
    if not word_of(config).drafts:
        raise ValueError("without a drafter there is nothing to forecast")
    if _CHECK_BATCH.value and not min(_BATCHES.value) <= _CHECK_BATCH.value <= max(_BATCHES.value):
        raise ValueError(f"--check_batch={_CHECK_BATCH.value} must lie within --batch={_BATCHES.value}")
    experiment = build(config, read_prompts(_PROMPTS.value) if _PROMPTS.value else (), mesh=config_mesh(config))
    if not experiment.workload.prompts:
        raise ValueError("a pair without prompts has no halves of them: give configs/trained_pair.py")
    results = Results.open(_OUTPUT.value, identity(config, experiment), console.print)
    use_compilation_cache()
    console.print(headline(experiment, task(config, experiment)))
    distributions = {"greedy": greedy(), in_words(config): experiment.sampling}
    with entry.progress(console, "starting") as say:
        for (name, warp), batch in itertools.product(distributions.items(), fit_batches()):
            found = compare(config, experiment, results, warp, {"law": name, "batch": batch}, say)
            if isinstance(found, str):
                console.print(found, soft_wrap=True)
            else:
                table = agreement_table(f"{name}, batch {batch}", found, ALLOWED)
                entry.show([table], console)
    if _OUTPUT.value and entry.is_first():
        console.print(f"\nwritten to {_OUTPUT.value}", soft_wrap=True)


def compare(
    config: ExperimentConfig,
    experiment: Experiment,
    results: Results,
    warp: Warp,
    key: Mapping[str, Any],
    progress: Callable[[str], None],
) -> Agreement | str:
    """Measures one distribution and batch unless the results hold it; returns the result, or a line that says why not."""
    where, work = f"{key['law']}, batch {key['batch']}", experiment.workload
    if known := distributed.from_first(lambda: results.find(key)):
        told = f"worst error {known['result']['worst_error']:.1%}" if "result" in known else "out of memory"
        return f"{where}: in {_OUTPUT.value} already, {told}"
    pair = experiment.pair
    measured = outcome_of(
        lambda: agreement(
            pair,
            lambda K: make_drafter(config, pair.target, pair.draft_or_head, K),
            make_rule(config.rule),
            warp,
            work.prompts,
            max_new_tokens=work.max_new_tokens,
            fit_lengths=_FIT.value,
            fit_batches=fit_batches()[key["batch"]],
            check_lengths=range(_LONGEST.value + 1),
            check_batch=key["batch"],
            passes=_PASSES.value,
            seed=work.seed,
            progress=lambda text: progress(f"{where}: {text}"),
        )
    )
    if "result" in measured:
        measured = {"within": measured["result"].worst_error <= ALLOWED, **measured}
    header = {"command": entry.command(), "environment": report.environment()}
    results.add({"key": key, **header, **measured}, header | {"allowed": ALLOWED})
    return measured.get("result", f"{where}: out of memory")


def fit_batches() -> dict[int, tuple[int, ...]]:
    """Returns the batches that are fitted, by the batch that is forecast."""
    between = {_CHECK_BATCH.value: tuple(sorted(_BATCHES.value))} if _CHECK_BATCH.value else {}
    return {1: (1,)} | between


def task(config: ExperimentConfig, experiment: Experiment) -> str:
    """Describes what is about to be compared, in a line."""
    fitted = ", ".join(map(str, sorted({0, *_FIT.value})))
    batches = [f"batch {batch} from {' and '.join(map(str, fit))}" for batch, fit in fit_batches().items()]
    return (
        f"{drafter_name(config)} drafter, {config.rule} rule, greedy and {in_words(config)}; K = 0 to {_LONGEST.value} "
        f"from {fitted}; {', '.join(batches)}; {experiment.workload.max_new_tokens} tokens, {_PASSES.value} passes"
    )


def in_words(config: ExperimentConfig) -> str:
    return distribution_of(dataclasses.asdict(config.sampling))


def identity(config: ExperimentConfig, experiment: Experiment) -> dict[str, Any]:
    """Returns what all cells of one file share."""
    asked = {"fit": _FIT.value, "longest": _LONGEST.value, "batches": _BATCHES.value, "passes": _PASSES.value}
    turned = {"rule": config.rule, "drafter": drafter_name(config), "sampling": dataclasses.asdict(config.sampling)}
    return identity_of(config, experiment) | turned | {"asked": asked}


if __name__ == "__main__":
    entry.run(main, _CONFIG)
