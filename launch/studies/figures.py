"""Draws the figures from committed results: the three panels of the paper's figure 1, and speedup against batch.

    pip install -e .[figures]
    python launch/studies/figures.py --cells=runs/python_pair_grid.json --output=runs

Ours are lines, with quartiles; the points are those of Chen et al. Nothing is measured here.
"""

import os

from absl import flags
from rich.console import Console

from launch.lib import entry
from launch.studies import curves as figures
from specsamp import storage
from specsamp.analysis import grid
from specsamp.analysis.figures import to_png

GRID = "notebooks/results/python_pair_grid.json"
_CELLS = flags.DEFINE_multi_string(
    "cells", [GRID], "Draw the cells of this file of launch/benchmark.py or sweep.py; may be repeated."
)
_OUTPUT = entry.define_output("Write figure_1.png and speedup_by_batch.png into this folder.", default="runs")
_BATCH = flags.DEFINE_integer("batch", 1, "Draw the paper's figure at this batch size.", lower_bound=1)
_RULE = flags.DEFINE_string("rule", "token", "Draw cells of this acceptance rule.")
_DRAFTER = flags.DEFINE_string("drafter", "model", "Draw cells of this drafter.")
_LENGTHS = flags.DEFINE_multi_integer(
    "draft_length", [], "Draw this K in the figure by batch; by default all; may be repeated.", lower_bound=1
)


def main() -> None:
    console = entry.make_console()
    cells = [cell for path in _CELLS.value for cell in grid.read_document(path)["cells"]]
    try:
        with entry.reading(" or ".join(_CELLS.value)):
            drawn = draw(cells, console)
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: pip install -e .[figures]") from error
    for name, figure in drawn.items():
        path = os.path.join(_OUTPUT.value, f"{name}.png")
        storage.write(path, to_png(figure))
        console.print(f"written to {path}", soft_wrap=True)


def draw(cells: list[dict], console: Console) -> dict:
    """Returns the figures by name; one that these cells do not give is left out, and that is said."""
    curves = figures.curves(cells, batch=_BATCH.value, rule=_RULE.value, drafter=_DRAFTER.value)
    drawn = {"figure_1": figures.draw_paper(curves)}
    wanted = {"rule": _RULE.value, "drafter": _DRAFTER.value}
    shown = [cell for cell in cells if wanted.items() <= cell["key"].items()]
    shown = [cell for cell in shown if not _LENGTHS.value or cell["key"]["draft_length"] in _LENGTHS.value]
    try:
        drawn["speedup_by_batch"] = figures.draw_batches(figures.batch_curves(shown))
    except ValueError as error:
        console.print(f"speedup_by_batch is left out: {error}")
    return drawn


if __name__ == "__main__":
    entry.run(main)
