"""Compares the speed of speculative and autoregressive decoding, in one setting or a grid.

    python launch/benchmark.py --config=configs/random_pair.py:38m --output=runs/NAME.json
    python launch/benchmark.py --config=configs/trained_pair.py --grid=draft_length=0,1,2,4,8 \\
        --grid=rule=token,block --grid=sampling.temperature=0.0,0.8 --grid=batch=1,8 \\
        --grid=drafter=model,ngram --output=runs/grid.json
    python launch/benchmark.py --sweep --config=configs/trained_pair.py \\
        --output=runs/python_pair_grid.json
    launch/tpu/run.sh --name=pod -- python launch/benchmark.py --sweep \\
        --config=configs/chinchilla.py --distributed --output=gs://BUCKET/sweep.json
    python launch/benchmark.py --gather=one.json --gather=other.json   # only the tables

Each setting (a cell) is measured in turn with plain decoding. K = 0 compares plain decoding with
itself, which shows the error of a speedup. The file is written after each cell: the same command
resumes, and another grid of the same configuration adds its cells. A file belongs to one machine.
--trace=runs/trace also profiles some rounds.

--sweep measures the ``GRIDS`` of the configuration's file, each a list of values of --grid.

--replica=i/N measures every N-th cell into a file of its own; the command without it takes over the
cells of all replicas and measures the missing ones.
"""

import time
from collections.abc import Callable, Sequence

import jax
from absl import flags
from rich.console import Console

from launch.lib import costs, entry
from launch.lib.cells import (
    costs_of,
    known_identity,
    make_cells,
    measure_missing,
    pair_identity,
    parse_grid,
    read_prompts,
    turned,
)
from launch.lib.experiment import build, headline, use_few_rows
from launch.lib.fields import ExperimentFlag
from launch.lib.machine_choice import for_machine
from specsamp import Pair, use_compilation_cache
from specsamp.analysis import grid, tables
from specsamp.analysis.benchmark import Result, benchmark, write_profile
from specsamp.analysis.grid import Cell
from specsamp.analysis.workload import check_fits, decoders
from specsamp.replica import files_of
from specsamp.sampling.synthetic import LABEL

_CONFIG = ExperimentFlag("configs/random_pair.py")
_GRID = flags.DEFINE_multi_string(
    "grid",
    [],
    "Measure a cell for each of these values, as FIELD=VALUE,VALUE; given again, for every "
    "combination.",
)
_SWEEP = flags.DEFINE_bool("sweep", False, "Measure the GRIDS of the configuration's file.")
_GATHER = flags.DEFINE_multi_string(
    "gather", [], "Show a table of the cells in this file, and measure nothing; may be repeated."
)
_PROMPTS = entry.define("prompts")
_OUTPUT = entry.define("output")
_REPLICA = entry.define("replica")
_CHIP_HOUR = costs.define_chip_hour()
_TRACE = flags.DEFINE_string(
    "trace",
    None,
    "Then profile one prefill and some rounds into this folder, for xprof or Perfetto.",
)
_AGAIN = entry.define("again")


def main() -> None:
    console = entry.make_console()
    if _GATHER.value:
        gather(console)
        return
    replica, output = entry.parse_replica(_REPLICA.value, _OUTPUT.value)
    config = _CONFIG.value
    grids = getattr(_CONFIG.module, "GRIDS", []) if _SWEEP.value else [()]
    if not grids:
        raise ValueError(f"--sweep: {_CONFIG.text} has no GRIDS, lists of what --grid takes")
    points = [point for texts in grids for point in parse_grid([*texts, *_GRID.value])]
    drafters = [point.get("drafter", config.drafter) for point in points]
    _CONFIG.refuse_unread(drafters, set().union(*points))
    of_grid = [name for name in points[0] if all(name in point for point in points)]
    _CONFIG.refuse_fields(of_grid, "--grid sets it")
    if _TRACE.value and len(points) > 1:
        raise ValueError(f"--trace is of one cell, and {len(points)} are asked for: choose one")
    use_few_rows(config, console)
    config = for_machine(config, console, draft_temperatures=points == [{}])
    configs = turned(config, points)  # all are checked before weights are read
    identity = known_identity(config)
    grid.Results.open(output, identity)  # another run's file is refused before weights are read
    if _TRACE.value:
        if jax.config.jax_disable_jit:
            raise ValueError(
                "--trace is of compiled programs, and JAX_DISABLE_JIT is set: leave out one of the "
                "two"
            )
        entry.check_output(f"{_TRACE.value.rstrip('/')}/profile", "trace")
    console.print(f"compiled programs are kept in {use_compilation_cache()}", style="dim")
    experiment = build(config, read_prompts(_PROMPTS.value), all_fields=True)
    console.print(headline(experiment))
    cells = replica.part(dict(enumerate(make_cells(configs, experiment))), "cells")
    results = grid.Results.open(output, identity | pair_identity(experiment))
    for path in files_of(output) if output and replica.is_whole else ():
        results.take_over(path)
    measure_all(list(cells.values()), results, experiment.pair, console)
    if jax.config.jax_disable_jit:
        console.print(
            "JAX_DISABLE_JIT is set: these are no times of compiled programs, and calls are not "
            "timed."
        )


def measure_all(cells: Sequence[Cell], results: grid.Results, pair: Pair, console: Console) -> None:
    """Measures the cells that a file lacks, and shows a table of all; of a single cell, all
    details.
    """
    for cell in cells:
        check_fits(pair, [cell.method.drafter], cell.workload)
    made_up = any("synthetic_acceptance" in cell.key for cell in cells)
    if made_up:
        told = "SYNTHETIC ACCEPTANCE: speedups and ms per token below are made up; rounds are not."
        console.print(told, style="bold red")

    def measure(number: int, say: Callable[[str], None]) -> Result:
        cell = cells[number]
        return benchmark(
            pair, cell.method, cell.workload, lambda text: say(f"{grid.describe(cell.key)}: {text}")
        )

    start = time.perf_counter()
    measured = measure_missing(
        [cell.facts for cell in cells], measure, results, _AGAIN.value, console
    )
    if _TRACE.value:
        cell, folder = cells[0], entry.visible(_TRACE.value)
        decoder = decoders(pair, {"": cell.method}, cell.workload)[""]
        with entry.progress(console, "compiling and tracing"):
            write_profile(decoder, _TRACE.value)
        console.print(
            f"\ntrace: pip install xprof; xprof --logdir={folder} --port=6006; open "
            "http://localhost:6006"
        )
        console.print(f"or open the latest .trace.json.gz in {folder} at https://ui.perfetto.dev")
    if not entry.is_first():
        return
    if measured:
        console.print(
            f"measured {len(measured)} cells in {time.perf_counter() - start:.0f} s", style="dim"
        )
    rows = [results.find(cell.key) for cell in cells]
    title = "Cells, each in turn with plain decoding"
    table = tables.grid_table("SYNTHETIC ACCEPTANCE, see the rows" if made_up else title, rows)
    dollars = costs.cost_tables(costs_of(rows), costs.chips_of(pair), _CHIP_HOUR.value)
    entry.show([table, *dollars], console)
    if len(cells) == len(measured) == 1:
        label = LABEL.format(rate=cells[0].key["synthetic_acceptance"]) if made_up else ""
        entry.show(tables.result_tables(measured[0], label), console)
    entry.say_written(results.path, console)


def gather(console: Console) -> None:
    """Shows a table for each file of --gather, since files may be of different pairs or
    machines.
    """
    others = ("output", "again", "chip_hour", "sweep", "grid", "trace", "prompts", "replica")
    entry.refuse_flags(others, "--gather measures and writes nothing")
    _CONFIG.refuse("--gather shows the cells of files")
    for path in _GATHER.value:
        document = grid.read_document(path)
        if not document["cells"]:
            raise ValueError(f"--gather={path}: it holds no cells yet")
        with entry.reading(path):
            table = tables.grid_table(path, document["cells"])
        console.print(grid.origin(path, document))
        entry.show([table], console)


if __name__ == "__main__":
    entry.run(main, _CONFIG)
