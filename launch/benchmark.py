"""Speculative against autoregressive decoding; see the config for what can be set.

    python launch/benchmark.py --config=configs/random_pair.py:38m --output=notebooks/results/NAME.json
"""

import os
import shlex
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before JAX: only errors of the runtime

import jax
from absl import app, flags, logging
from ml_collections import config_flags
from rich.console import Console

from experiment import Experiment, build, headline
from specsamp import use_compilation_cache
from specsamp.analysis import benchmark, memory, report

_CONFIG = config_flags.DEFINE_config_file("config", "configs/random_pair.py", lock_config=True)
_OUTPUT = flags.DEFINE_string("output", None, "Where to write the result as JSON; nothing is written by default.")
_PLAIN = flags.DEFINE_bool("plain", False, "Print tables as plain text.")
_MEMORY = flags.DEFINE_bool("memory", False, "Report the memory of the loop over a grid of B, K and V instead of time.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    logging.set_verbosity(logging.ERROR)
    console = Console(no_color=_PLAIN.value)
    config = _CONFIG.value
    try:
        experiment = build(config)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"{config_flags.get_config_filename(flags.FLAGS['config'])}: {error}")
    console.print(headline(experiment), highlight=False)
    console.print(f"compiled programs are kept in {use_compilation_cache()}", style="dim", soft_wrap=True)
    with console.status("starting") as status:
        measure = measure_memory if _MEMORY.value else measure_time
        result, tables = measure(experiment, lambda text: status.update(text))
    report.show(tables, console, _PLAIN.value)
    if jax.config.jax_disable_jit:
        console.print("JAX_DISABLE_JIT is set: these are no times of compiled programs, and phases are left out.")
    if _OUTPUT.value:
        document = {
            "command": shlex.join(["python", *sys.argv]),
            "environment": report.environment(),
            "config": config.to_dict(),
            "models": {"target": experiment.pair.target.config, "draft": experiment.pair.draft.config},
            "pair": experiment.pair_name,
            "random_weights": experiment.pair_name is None,
            "result": result,
        }
        report.write_json(_OUTPUT.value, document)
        console.print(f"\nwritten to {_OUTPUT.value}", soft_wrap=True)


def measure_time(experiment: Experiment, progress):
    result = benchmark.benchmark(
        experiment.pair, experiment.drafter, experiment.rule, experiment.sampling, experiment.workload, progress
    )
    return result, report.result_tables(result)


def measure_memory(experiment: Experiment, progress):
    work, pair = experiment.workload, experiment.pair
    grid = memory.memory_grid(
        pair.target.config, pair.draft.config, experiment.rule, experiment.sampling,
        slots=work.prompt_length + work.max_new_tokens, progress=progress,
    )  # fmt: skip
    return grid, [report.memory_table(grid)]


if __name__ == "__main__":
    app.run(main)
