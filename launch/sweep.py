"""Measures every point that ``get_hyper`` of a configuration asks for, into one file and one table.

    python launch/sweep.py --config=configs/trained_pair.py --output=runs/python_pair_grid.json
    python launch/sweep.py --config=configs/chinchilla.py --pod=pod --output=gs://BUCKET/s.json   # prints commands
    python launch/sweep.py --gather=one.json --gather=other.json                             # only the tables

The same command goes on where it was interrupted. On a pod, points are commands for launch/tpu/run.sh, to be run one
after the other: all add their cell to the same file, and a bucket has no lock that would keep two apart.
"""

import shlex
import sys
import types

from absl import flags

from launch.lib import entry, hyper, price
from launch.lib.cells import check_points, known_identity, run_cells
from launch.lib.config import ConfigFlag
from launch.lib.experiment import build, config_mesh, headline
from launch.lib.hyper import Point
from specsamp import use_compilation_cache
from specsamp.analysis import grid, tables

_CONFIG = ConfigFlag("configs/trained_pair.py")
_POD = flags.DEFINE_string(
    "pod", None, "Print a command for each point on the slice of this name, and measure nothing."
)
_GATHER = flags.DEFINE_multi_string(
    "gather", [], "Show a table of the cells in this file, and measure nothing; may be repeated."
)
_OUTPUT = entry.define_output()
_CHIP_HOUR = price.define_chip_hour()
_AGAIN = flags.DEFINE_bool("again", False, "Measure cells again that --output holds already, and replace them.")


def main() -> None:
    console = entry.make_console()
    if _GATHER.value:
        if _OUTPUT.value or _POD.value or _AGAIN.value or _CHIP_HOUR.value is not None:
            raise ValueError("--gather measures and writes nothing: leave out --output, --pod, --again and --chip_hour")
        for path in _GATHER.value:  # a table each: files are of other pairs or machines
            document = grid.read_document(path)
            with entry.reading(path):
                table = tables.grid_table(path, document["cells"], full=console.width >= tables.FULL_WIDTH)
            console.print(grid.origin(path, document), soft_wrap=True, markup=False)
            entry.show([table], console)
        return
    points = hyper_points(_CONFIG.module, _CONFIG.text)
    check_points(_CONFIG.value, points)
    if _POD.value:
        for point in points:
            print(pod_command(_POD.value, point, _CONFIG.text, _OUTPUT.value, sys.argv[1:], _AGAIN.value))
        return
    entry.check_output(_OUTPUT.value)
    grid.check_output(_OUTPUT.value, known_identity(_CONFIG.value))
    experiment = build(_CONFIG.value, mesh=config_mesh(_CONFIG.value))
    console.print(headline(experiment))
    use_compilation_cache()
    run_cells(_CONFIG.value, points, experiment, _OUTPUT.value, console, _AGAIN.value, _CHIP_HOUR.value)


def hyper_points(module: types.ModuleType, name: str) -> list[Point]:
    """Returns the points that ``get_hyper`` of a configuration's file asks for.

    Raises:
      ValueError: it has none, or asks for no points.
    """
    get_hyper = getattr(module, "get_hyper", None)
    if get_hyper is None:
        raise ValueError(f"{name} has no get_hyper(h): see launch/lib/hyper.py for how to write one")
    points = get_hyper(hyper)
    if not points:
        raise ValueError(f"get_hyper of {name} asks for no points")
    return points


def pod_command(
    name: str, point: Point, config: str, output: str | None, arguments: list[str], again: bool = False
) -> str:
    """Returns the command that measures one point on a slice, with what was set for all points.

    The configuration is always named: the default of launch/benchmark.py is another one.

    Raises:
      ValueError: a value that is a word of its own, which could be lost on the way.
    """
    shared = [argument for argument in arguments if argument.startswith("--config")]
    apart = next((argument for argument in shared if "=" not in argument), None)
    if apart is not None:
        raise ValueError(f"write {apart}=VALUE as one word: it goes into the commands as it is")
    if not any(argument.startswith("--config=") for argument in shared):
        shared = [f"--config={config}", *shared]
    turned = [f"--config.{field}={value}" for field, value in point.items()]
    writes = [*([f"--output={output}"] if output else ()), *(["--again"] if again else ())]
    program = ["python", "launch/benchmark.py", *shared, *turned, "--distributed", *writes]
    return shlex.join(["launch/tpu/run.sh", f"--name={name}", "--", *program])


if __name__ == "__main__":
    entry.run(main, _CONFIG)
