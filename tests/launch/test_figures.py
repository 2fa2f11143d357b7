"""Figures are drawn from committed results; damaged results and too few cells are refused."""

import json

from numpy.testing import assert_allclose

from launch.lib.study import Published, made, read_result
from launch.studies import figures
from support import extras
from support.refusals import refusal
from support.run_script import succeed

pytestmark = extras.needs("matplotlib")


def lines(axis):
    return {line.get_label(): line.get_xydata() for line in axis.lines}


def test_figure_1_has_curves_and_published_points():
    figure = figures.draw_paper(read_result("python_pair_grid"))
    total, share, _ = figure.axes
    (greedy,) = (line for name, line in lines(total).items() if name.startswith("greedy ("))
    assert_allclose(greedy[0], [0, 1])  # at K = 0 the time is that of plain decoding
    assert greedy[-1, 1] < 1 and any(name.startswith("T = 0.8") for name in lines(total))
    assert tuple(lines(share)["Chen et al., HumanEval"][:, 1]) == figures.PAPER_EMITTED["HumanEval"]


def test_figure_of_too_few_cells_is_refused():
    with refusal("batch 1"):
        figures.draw_paper({"cells": []})


def test_committed_results_are_drawn_and_damaged_ones_refused(tmp_path):
    succeed("study", "figures", f"--figures={tmp_path}")
    assert (tmp_path / "figure_1.png").read_bytes().startswith(b"\x89PNG")
    damaged = {"identity": {}, "cells": [{"key": {}, "result": {}}]}
    (tmp_path / "damaged.json").write_text(json.dumps(damaged))
    with refusal("damaged, or of another kind"):
        made(Published(["damaged"], figures.draw_paper), tmp_path)
