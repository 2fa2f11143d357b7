"""Measures speculative against autoregressive decoding, in one cell or a grid; --help lists what can be set.

    python launch/benchmark.py --config=configs/random_pair.py:38m --output=runs/NAME.json
    python launch/benchmark.py --config=configs/trained_pair.py --grid=draft_length=0,1,2,4,8 --grid=rule=token,block \\
        --grid=sampling.temperature=0.0,0.8 --grid=batch=1,8 --grid=drafter=model,ngram --output=runs/grid.json

Every cell is measured beside plain decoding of the same prompts, in turn; K = 0 is plain decoding beside itself,
which shows how far a speedup may be off. The file is written after each cell: the same command goes on where it was
interrupted, another grid of the same configuration adds its cells. A file belongs to one machine: times of two are
not mixed. --trace=runs/trace also says what within a round takes the time.
"""

import jax
from absl import flags

from launch.lib import entry, price, tracing
from launch.lib.cells import check_points, known_identity, parse_grid, read_prompts, run_cells
from launch.lib.config import ConfigFlag
from launch.lib.experiment import build, config_mesh, headline
from specsamp import use_compilation_cache
from specsamp.analysis import grid

_CONFIG = ConfigFlag("configs/random_pair.py")
_GRID = flags.DEFINE_multi_string(
    "grid", [], "Measure a cell for each of these values, as FIELD=VALUE,VALUE; given again, for every combination."
)
_PROMPTS = flags.DEFINE_string(
    "prompts", None, "Decode the prompts of this file, JSON or one in each line; by default the pair's."
)
_OUTPUT = entry.define_output()
_CHIP_HOUR = price.define_chip_hour()
_TRACE = tracing.define_trace()
_AGAIN = flags.DEFINE_bool("again", False, "Measure cells again that --output holds already, and replace them.")


def main() -> None:
    console = entry.make_console()
    config = _CONFIG.value
    entry.check_output(_OUTPUT.value)
    grid.check_output(_OUTPUT.value, known_identity(config))
    points = parse_grid(_GRID.value)
    if _TRACE.value and len(points) > 1:
        raise ValueError(f"--trace is of one cell, and --grid asks for {len(points)}: choose one")
    tracing.check_trace(_TRACE.value)
    check_points(config, points)  # before weights are read
    prompts = read_prompts(_PROMPTS.value) if _PROMPTS.value else ()
    experiment = build(config, prompts, mesh=config_mesh(config))
    console.print(headline(experiment))
    console.print(f"compiled programs are kept in {use_compilation_cache()}", style="dim", soft_wrap=True)
    run_cells(config, points, experiment, _OUTPUT.value, console, _AGAIN.value, _CHIP_HOUR.value, _TRACE.value)
    if jax.config.jax_disable_jit:
        console.print("JAX_DISABLE_JIT is set: these are no times of compiled programs, and phases are left out.")


if __name__ == "__main__":
    entry.run(main, _CONFIG)
