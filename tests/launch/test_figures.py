"""Figures show what made-up cells say, and the study of figures refuses the rest."""

import json

import pytest
from numpy.testing import assert_allclose

from launch.lib.study import Published, made
from launch.studies import figures
from specsamp.analysis.figures import to_png
from support import extras
from support.run_script import call

pytestmark = extras.needs("matplotlib")


def SPREAD(x):
    return {"median": x, "lower": 0.9 * x, "upper": 1.2 * x}


def cell(K, batch=1, rule="token", drafter="model", temperature=0.0, ms=1.0, pace=1.0, **changes):
    """``pace``: how many times as long everything takes on the machine as it then was."""

    def clock(ms):
        return SPREAD(pace * ms)

    key = {"draft_length": K, "drafter": drafter if K else "none", "rule": rule, "batch": batch}
    key |= {
        "temperature": temperature,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "draft_temperature": None,
        **changes,
    }

    def side(ms, rounds):
        return {"ms_per_token": clock(ms), "ms_per_round": clock(ms * rounds)}

    result = {
        "autoregressive": side(3.0, 1),
        "speculative": side(ms, K + 1),
        "speedup": SPREAD(3.0 / ms),
        "acceptance": {"emitted_per_round": 0.75 * (K + 1)},
    }
    return {"key": key, "result": result}


CELLS = [
    # The machine was busy: it bends no curve, since plain decoding took turns with it.
    cell(4, ms=2.0, pace=3.0),
    cell(1, ms=2.5),
    cell(0, ms=3.0),
    cell(4, rule="block"),
    cell(4, batch=8, ms=4.0),
    cell(4, temperature=0.8),
    cell(4, draft_temperature=0.2),
    {"key": cell(2)["key"], "out_of_memory": "all of it"},
]


def lines(axis):
    return {line.get_label(): line.get_xydata() for line in axis.lines}


def test_figure_1_has_a_curve_for_each_distribution_and_the_published_points():
    figure = figures.draw_paper({"cells": CELLS})
    total, share, rounds = figure.axes
    assert_allclose(lines(total)["greedy (384 ms at K = 0)"], [[0, 1], [1, 2.5 / 3], [4, 2 / 3]])
    assert_allclose(lines(share)["greedy"], [[0, 1], [1, 0.75], [4, 0.75]])
    assert_allclose(lines(rounds)["greedy"], [[0, 1], [1, 5 / 3], [4, 10 / 3]])
    assert_allclose(lines(total)["T = 0.8 (384 ms at K = 0)"][:, 0], [0, 4])
    assert tuple(lines(share)["Chen et al., HumanEval"][:, 1]) == figures.PAPER_EMITTED["HumanEval"]
    looks = {(line.get_color(), line.get_linestyle()) for line in total.lines[:2]}
    # And without colours.
    assert len({colour for colour, _ in looks}) == len({style for _, style in looks}) == 2
    assert to_png(figure).startswith(b"\x89PNG")


def test_too_few_cells():
    with pytest.raises(ValueError, match="batch 1"):
        figures.draw_paper({"cells": [cell(4, batch=8)]})


def test_committed_results_are_drawn_and_damaged_ones_refused(tmp_path):
    done = call("study", "figures", f"--figures={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "figure_1.png").read_bytes().startswith(b"\x89PNG")
    damaged = {"identity": {}, "cells": [{"key": CELLS[0]["key"], "result": {}}]}
    (tmp_path / "damaged.json").write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match="damaged, or of another kind"):
        made(Published(["damaged"], figures.draw_paper), tmp_path)
