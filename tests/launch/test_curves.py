"""What the figures show, from cells that are made up."""

import io

import numpy as np
import pytest

from launch.studies import curves as figures
from launch.studies import published
from support import extras


def SPREAD(x):
    return {"median": x, "lower": 0.9 * x, "upper": 1.2 * x}


def cell(K, batch=1, rule="token", drafter="model", temperature=0.0, ms=1.0, pace=1.0, **changes):
    """``pace``: how many times as long everything takes on the machine as it then was."""

    def clock(ms):
        return SPREAD(pace * ms)

    key = {
        "draft_length": K,
        "drafter": drafter if K else "none",
        "rule": rule,
        "batch": batch,
        "temperature": temperature,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "draft_temperature": None,
        **changes,
    }

    def side(ms, rounds):
        return {"ms_per_token": clock(ms), "ms_per_round": clock(ms * rounds)}

    parts = {"draft": 0.5 * K, "score": 2.0, "verify": 0.1, "step": 1.5}
    split = {name: {"ms": clock(value)} for name, value in parts.items()}
    result = {
        "autoregressive": side(3.0, 1),
        "speculative": side(ms, K + 1),
        "speedup": SPREAD(3.0 / ms),
        "acceptance": {"emitted_per_round": 0.75 * (K + 1)},
        "split": split,
    }
    return {"key": key, "result": result}


CELLS = [
    cell(4, ms=2.0),
    cell(1, ms=2.5),
    cell(0, ms=3.0),
    cell(4, rule="block"),
    cell(4, batch=8, ms=4.0),
    cell(4, temperature=0.8),
    cell(4, draft_temperature=0.2),
    {"key": cell(2)["key"], "out_of_memory": "all of it"},
]


def test_a_curve_for_each_distribution():
    greedy, sampled = figures.curves(CELLS)
    assert (greedy.name, greedy.draft_lengths, greedy.plain_ms) == ("greedy", (0, 1, 4), 128 * 3.0)
    np.testing.assert_allclose(greedy.total, [1, 2.5 / 3, 2 / 3])
    np.testing.assert_allclose(greedy.quartiles[2], [2 / 3 / 1.2, 2 / 3 / 0.9])
    assert greedy.emitted_share == (1.0, 0.75, 0.75)
    np.testing.assert_allclose(greedy.round, [1, 5 / 3, 10 / 3])
    np.testing.assert_allclose(greedy.parts["draft"], [0, 0.5 / 1.5, 2 / 1.5])
    np.testing.assert_allclose(greedy.parts["score"], [1, 2 / 1.5, 2 / 1.5])
    # Where K = 0 was not measured by itself, the cell's own baseline stands for it.
    assert (sampled.name, sampled.draft_lengths, sampled.total[0]) == ("T = 0.8", (0, 4), 1.0)


def test_a_machine_that_became_busy_bends_no_curve():
    """Cells are compared with the plain decoding that took turns with them."""

    def measured(pace):
        return [cell(0, ms=3.0), cell(1, ms=2.5), cell(4, ms=2.0, pace=pace)]

    (even,), (busy,) = (figures.curves(measured(pace)) for pace in (1, 3))
    for name in ("total", "round"):
        np.testing.assert_allclose(getattr(busy, name), getattr(even, name))
    np.testing.assert_allclose(busy.parts["score"], even.parts["score"])


def test_a_curve_over_batches():
    (curve,) = figures.batch_curves(CELLS)
    assert (curve.panel, curve.name) == ("model drafter, token rule, K = 4", "greedy")
    assert curve.batches == (1, 8) and curve.speedup == (1.5, 0.75)
    made_up = [cell(4, batch=batch, synthetic_acceptance=0.8) for batch in (1, 2)]
    assert "SYNTHETIC ACCEPTANCE 0.8" in figures.batch_curves(made_up)[0].name


def test_too_few_cells():
    with pytest.raises(ValueError, match="no distribution has a draft at batch 2, model drafter, token rule"):
        figures.curves(CELLS, batch=2)
    with pytest.raises(ValueError, match="nothing was measured at two of them"):
        figures.batch_curves(CELLS[:2])


@extras.needs("matplotlib")
def test_the_pictures():
    """Our lines and the published points are in them."""
    paper = figures.draw_paper(figures.curves(CELLS))
    labels = [line.get_label() for axis in paper.axes for line in axis.lines]
    assert len(paper.axes) == 3 and "greedy (384 ms at K = 0)" in labels and "greedy: score" in labels
    points = next(line for line in paper.axes[1].lines if line.get_label() == "Chen et al., HumanEval")
    assert tuple(points.get_ydata()) == published.HUMANEVAL.emitted_share
    batches = figures.draw_batches(figures.batch_curves(CELLS))
    assert all(axis.get_ylabel() for axis in (*paper.axes, batches.axes[0]))
    looks = {(line.get_color(), line.get_linestyle()) for line in paper.axes[0].lines[:2]}
    assert len({colour for colour, _ in looks}) == len({style for _, style in looks}) == 2  # and without colours
    two = figures.draw_batches(figures.batch_curves([*CELLS, cell(2, batch=1), cell(2, batch=8)]))
    assert [axis.get_title() for axis in two.axes] == [f"model drafter, token rule, K = {K}" for K in (4, 2)]
    for figure in (paper, batches):
        figure.savefig(picture := io.BytesIO(), format="png", dpi=40)
        assert picture.getvalue().startswith(b"\x89PNG")
