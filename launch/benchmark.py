"""Speculative against autoregressive decoding; see the config for what can be set.

    python launch/benchmark.py --config=configs/random_pair.py:38m --output=notebooks/results/NAME.json
"""

import sys

import jax
from absl import flags
from ml_collections import config_flags

import entry
from experiment import Experiment, build, config_mesh, headline
from specsamp import use_compilation_cache
from specsamp.analysis import benchmark, memory, report

_CONFIG = config_flags.DEFINE_config_file("config", "configs/random_pair.py", lock_config=True)
_OUTPUT = flags.DEFINE_string("output", None, "Where to write the result as JSON; nothing is written by default.")
_PLAIN = flags.DEFINE_bool("plain", False, "Print tables as plain text.")
_MEMORY = flags.DEFINE_bool("memory", False, "Report the memory of the loop over a grid of B, K and V instead of time.")


def main() -> None:
    console = entry.make_console(no_color=_PLAIN.value)
    config = _CONFIG.value
    try:
        entry.check_output(_OUTPUT.value)
        experiment = build(config, mesh=config_mesh(config))
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
    document = {
        "config": config.to_dict(),
        "models": {"target": experiment.pair.target.config, "draft": experiment.pair.draft.config},
        "pair": experiment.pair_name,
        "random_weights": experiment.pair_name is None,
        "result": result,
    }
    entry.write_result(_OUTPUT.value, document, console)


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
    entry.run(main)
