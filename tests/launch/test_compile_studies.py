"""The study compile: its cells are those of the committed answers, and its tables and figures read both forms of them."""

import types

import pytest

from launch.lib import study
from launch.studies import compile as compiled
from launch.studies import compile_tables as tables
from launch.studies.compile import GRIDS, STUDY
from specsamp.models.config import TransformerConfig
from support import extras


def cells(grid, *changes):
    return compiled.cells(types.SimpleNamespace(grid=grid, change=changes))


@pytest.mark.parametrize("grid", [grid for grid in GRIDS if grid != "training"])
def test_what_the_runner_writes_has_the_names_and_the_table_of_the_committed_answers(grid):
    document = study.read_result(f"compile_{grid}")
    assert all(cell in [committed["name"] for committed in document["cells"]] for cell in cells(grid))
    written = [{"key": cell["name"], "seconds": 1.0, "result": cell} for cell in document["cells"]]
    written.append({"key": written[0]["key"], "out_of_memory": "of this machine, while it compiled"})
    assert STUDY.tables[grid].make({"cells": written}) == STUDY.tables[grid].make(document)
    assert {*STUDY.shown(types.SimpleNamespace(grid=grid))} <= {*STUDY.tables, *STUDY.figures}


def test_a_training_step_that_does_not_fit_is_shown():
    document = study.read_result("compile_head_training")
    (key,) = cells("training")
    fits, unfit = tables.training(
        {"cells": [{"key": key, "result": document}, {"key": key, "out_of_memory": "of the device"}]}
    ).rows
    assert fits[-3:] == tables.training(document).rows[0][-3:] and "does not fit" in unfit


def test_changed_cells_are_compiled_once():
    assert cells("heads", "topology=v5e:2x4", "target=Llama 3.1 8B", "drafter=EAGLE-3") == [
        {"target": "Llama 3.1 8B", "topology": "v5e:2x4", "drafter": "EAGLE-3"}
    ]
    assert cells("training", "layers=7")[0]["layers"] == 7


@extras.needs("matplotlib")
def test_the_figure_shows_what_fits():
    document = study.read_result("compile_scoring")
    unfit = {"name": {"topology": "v5e:2x2", "tokens": 2}, "fits": False, "why": "too much"}
    *lines, one = tables.draw_scoring(document | {"cells": [*document["cells"], unfit]}).axes[0].lines
    assert [line.get_ydata()[0] for line in lines] == [1.0] * 4 and list(one.get_ydata()) == [1, 1]


@pytest.mark.slow
@extras.needs("libtpu")
def test_a_cell_is_answered(monkeypatch):
    """A target of two layers on one chip, which it leaves after the first."""
    tiny = TransformerConfig(vocab_size=512, width=256, num_layers=2, num_heads=2, positions="rotary", dtype="bfloat16")
    monkeypatch.setitem(compiled.MODELS, "the paper's 70B", lambda: tiny)
    monkeypatch.setattr(compiled, "EXIT_LAYER", 1)
    (key,) = cells("heads", "target=the paper's 70B", "topology=v5e:1x1", f"drafter={compiled.EXIT}")
    answer = STUDY.measure(types.SimpleNamespace(grid="heads"), key, print)
    document = study.report.as_json({"cells": [{"key": key, "seconds": 1.0, "result": answer}]})
    (row,) = tables.heads(document).rows
    assert row[:3] == tuple(key.values()) and row[6] == row[7] == "0"  # one chip has no collectives
    assert len(tables.programs(document).rows) == 4
