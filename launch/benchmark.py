"""Speculative against autoregressive decoding, one cell or a grid of them; see the config for what can be set.

    python launch/benchmark.py --config=configs/random_pair.py:38m --output=notebooks/results/NAME.json
    python launch/benchmark.py --config=configs/trained_pair.py --grid=draft_length=0,1,2,4,8 --grid=rule=token,block \\
        --grid=sampling.temperature=0.0,0.8 --grid=batch=1,8 --grid=drafter=model,ngram --output=grid.json

Every cell is measured beside plain decoding of the same prompts, in turn; K = 0 is plain decoding beside itself,
which shows how far a speedup may be off. The file is written after each cell: the same command goes on where it was
interrupted, another grid of the same configuration adds its cells.
"""

import sys

import jax
from absl import flags
from ml_collections import config_flags

import entry
from cells import parse_grid, read_prompts, run_cells
from experiment import Experiment, build, config_mesh, headline
from specsamp import use_compilation_cache
from specsamp.analysis import memory, report

_CONFIG = config_flags.DEFINE_config_file("config", "configs/random_pair.py", lock_config=True)
_GRID = flags.DEFINE_multi_string("grid", [], "FIELD=VALUE,VALUE,...: one cell for every combination; may be repeated.")
_PROMPTS = flags.DEFINE_string("prompts", None, "File of prompts, JSON or one in each line; default the pair's.")
_OUTPUT = flags.DEFINE_string("output", None, "Where to write the result as JSON; nothing is written by default.")
_AGAIN = flags.DEFINE_bool("again", False, "Measure cells once more that the file holds, and replace them.")
_PLAIN = flags.DEFINE_bool("plain", False, "Print tables as plain text.")
_MEMORY = flags.DEFINE_bool("memory", False, "Report the memory of the loop over a grid of B, K and V instead of time.")


def main() -> None:
    console = entry.make_console(no_color=_PLAIN.value)
    config = _CONFIG.value
    try:
        entry.check_output(_OUTPUT.value)
        points = parse_grid(_GRID.value)
        prompts = read_prompts(_PROMPTS.value) if _PROMPTS.value else ()
        experiment = build(config, prompts, mesh=config_mesh(config))
    except (ValueError, OSError) as error:
        sys.exit(f"{config_flags.get_config_filename(flags.FLAGS['config'])}: {error}")
    console.print(headline(experiment), highlight=False)
    console.print(f"compiled programs are kept in {use_compilation_cache()}", style="dim", soft_wrap=True)
    if _MEMORY.value:
        show_memory(experiment, console)
        return
    run_cells(config, points, experiment, _OUTPUT.value, console, _PLAIN.value, _AGAIN.value)
    if jax.config.jax_disable_jit:
        console.print("JAX_DISABLE_JIT is set: these are no times of compiled programs, and phases are left out.")


def show_memory(experiment: Experiment, console) -> None:
    work, pair = experiment.workload, experiment.pair
    with console.status("starting") as status:
        grid = memory.memory_grid(
            pair.target.config,
            pair.draft.config,
            experiment.rule,
            experiment.sampling,
            slots=work.prompt_length + work.max_new_tokens,
            progress=lambda text: status.update(text),
        )
    report.show([report.memory_table(grid)], console, _PLAIN.value)
    models = {"target": pair.target.config, "draft": pair.draft.config}
    entry.write_result(_OUTPUT.value, {"config": _CONFIG.value.to_dict(), "models": models, "result": grid}, console)


if __name__ == "__main__":
    entry.run(main)
