"""Measures every point that ``get_hyper`` of a configuration asks for, into one file and one table.

    python launch/sweep.py --config=configs/trained_pair.py --output=notebooks/results/python_pair_grid.json
    python launch/sweep.py --config=configs/chinchilla.py --pod=pod --output=gs://BUCKET/s.json   # prints commands
    python launch/sweep.py --gather=one.json --gather=other.json                             # only the table

The same command goes on where it was interrupted. On a pod, points are commands for launch/tpu/run.sh, to be run one
after the other: all add their cell to the same file.
"""

import importlib.util
import shlex
import sys

from absl import flags
from ml_collections import config_flags

import entry
from cells import run_cells
from experiment import build, config_mesh, headline
from specsamp import use_compilation_cache
from specsamp.analysis import grid, hyper, report, tables
from specsamp.analysis.hyper import Point

_CONFIG = config_flags.DEFINE_config_file("config", "configs/trained_pair.py", lock_config=True)
_POD = flags.DEFINE_string("pod", None, "Print a command for each point on this slice, and measure nothing.")
_GATHER = flags.DEFINE_multi_string("gather", [], "Show the cells of this file, and measure nothing; may be repeated.")
_OUTPUT = flags.DEFINE_string("output", None, "Where to write the result as JSON; nothing is written by default.")
_AGAIN = flags.DEFINE_bool("again", False, "Measure cells once more that the file holds, and replace them.")
_PLAIN = flags.DEFINE_bool("plain", False, "Print tables as plain text.")


def main() -> None:
    console = entry.make_console(no_color=_PLAIN.value)
    try:
        if _GATHER.value:
            gathered = [cell for path in _GATHER.value for cell in grid.read_document(path)["cells"]]
            report.show([tables.grid_table(", ".join(_GATHER.value), gathered)], console, _PLAIN.value)
            return
        points = hyper_points(config_flags.get_config_filename(flags.FLAGS["config"]))
        if _POD.value:
            for point in points:
                print(pod_command(_POD.value, point, _OUTPUT.value, sys.argv[1:], _AGAIN.value))
            return
        entry.check_output(_OUTPUT.value)
        experiment = build(_CONFIG.value, mesh=config_mesh(_CONFIG.value))
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    console.print(headline(experiment), highlight=False)
    use_compilation_cache()
    run_cells(_CONFIG.value, points, experiment, _OUTPUT.value, console, _PLAIN.value, _AGAIN.value)


def hyper_points(filename: str) -> list[Point]:
    """What ``get_hyper`` of a configuration's file returns.

    Raises:
      ValueError: it has none, or asks for no points.
    """
    path = filename.partition(":")[0]
    spec = importlib.util.spec_from_file_location("swept_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_hyper"):
        raise ValueError(f"{path} has no get_hyper(h): see specsamp/analysis/hyper.py for how to write one")
    points = module.get_hyper(hyper)
    if not points:
        raise ValueError(f"get_hyper of {path} asks for no points")
    return points


def pod_command(name: str, point: Point, output: str | None, arguments: list[str], again: bool = False) -> str:
    """The command that measures one point on a slice, with what was set for all points.

    Raises:
      ValueError: a value that is a word of its own, which could be lost on the way.
    """
    shared = [argument for argument in arguments if argument.startswith("--config")]
    apart = next((argument for argument in shared if "=" not in argument), None)
    if apart is not None:
        raise ValueError(f"write {apart}=VALUE as one word: it goes into the commands as it is")
    turned = [f"--config.{field}={value}" for field, value in point.items()]
    writes = [*([f"--output={output}"] if output else ()), *(["--again"] if again else ())]
    program = ["python", "launch/benchmark.py", *shared, *turned, "--distributed", *writes]
    return shlex.join(["launch/tpu/run.sh", f"--name={name}", "--", *program])


if __name__ == "__main__":
    entry.run(main)
