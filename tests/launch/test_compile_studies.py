"""The study compile: its cells are those of the committed answers, and its tables and figures read both forms of them."""

import dataclasses
import re
import types

import pytest

from launch.lib import study
from launch.lib.study import RESULTS
from launch.studies import compile as compiled
from launch.studies import compile_tables as tables
from launch.studies.compile import GRIDS, STUDY, K
from specsamp import storage
from specsamp.models.config import TransformerConfig, chinchilla_70b
from specsamp.models.kernels.cache import Kernels
from support import extras
from support.run_script import call

COMMITTED = [grid for grid in GRIDS if grid != "training"]


def cells(grid, *changes):
    return compiled.cells(types.SimpleNamespace(grid=grid, change=changes))


def committed(grid):
    return storage.read_json(RESULTS / f"compile_{grid}.json")


@pytest.mark.parametrize("grid", COMMITTED)
def test_cells_have_the_names_of_the_committed_answers(grid):
    names = [list(cell["name"].items()) for cell in committed(grid)["cells"]]
    assert sorted(list(cell.items()) for cell in cells(grid)) == sorted(names)


@pytest.mark.parametrize("grid", COMMITTED)
def test_what_the_runner_writes_has_the_same_table(grid):
    document = committed(grid)
    written = [{"key": cell["name"], "seconds": 1.0, "result": cell} for cell in document["cells"]]
    written.append({"key": written[0]["key"], "out_of_memory": "of this machine, while it compiled"})
    assert STUDY.tables[grid].make({"cells": written}) == STUDY.tables[grid].make(document)
    assert {*STUDY.shown(types.SimpleNamespace(grid=grid))} <= {*STUDY.tables, *STUDY.figures}


def test_what_the_runner_writes_of_training_has_the_same_table():
    document = storage.read_json(RESULTS / "compile_head_training.json")
    written = {"cells": [{"key": cells("training")[0], "seconds": 1.0, "result": document}]}
    shown = STUDY.tables["head_training"].make
    assert shown(written) == shown(document)
    unfit = {"key": cells("training")[0], "out_of_memory": "of the device, as its compiler says"}
    assert "does not fit" in shown({"cells": [unfit]}).rows[0]


def test_changed_cells_are_compiled_once():
    assert cells("heads", "topology=v5e:2x4", "target=Llama 3.1 8B", "drafter=EAGLE-3") == [
        {"target": "Llama 3.1 8B", "topology": "v5e:2x4", "drafter": "EAGLE-3"}
    ]
    assert cells("training", "layers=7")[0]["layers"] == 7


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--grid: name one of slices, scoring"),
        (["--grid=scoring", "--change=token=2"], "--change=token=2.*no 'token'.*tokens"),
        (["--grid=scoring", "--change=tokens=0"], "--change=tokens=0: tokens must be a positive integer; got '0'"),
        (["--grid=scoring", "--change=tokens=2,topology=v9:2x2"], "v9:2x2"),
        (["--grid=training", "--change=target=gpt"], "target=gpt"),
        (["--grid=training", "--change=layers=6"], "6 layers"),
    ],
)
def test_what_is_refused(arguments, message):
    done = call("study", "compile", "--plain", *arguments)
    assert done.returncode == 2, done.stderr
    assert re.search(message, done.stderr), done.stderr


def test_shapes_of_drafts_have_as_many_parameters():
    counts = [
        TransformerConfig(vocab_size=32_000, head_size=128, **shape).num_parameters
        for name, shape in compiled.DATA["shapes"].items()
        if "7B" not in name
    ]
    assert max(counts) < 4.4e9 and min(counts) > 3.6e9


@extras.needs("matplotlib")
def test_figures_show_what_fits():
    """Draws shapes as a line with all collectives added and one with all hidden, and a point of the paper."""
    assert len(tables.draw_shapes(committed("shapes")).axes[0].lines) == 2 * 4 + 1
    document = committed("scoring")
    unfit = {"name": {"topology": "v5e:2x2", "tokens": 2}, "fits": False, "why": "too much"}
    *lines, one = tables.draw_scoring(document | {"cells": [*document["cells"], unfit]}).axes[0].lines
    assert [line.get_ydata()[0] for line in lines] == [1.0] * 4 and list(one.get_ydata()) == [1, 1]
    assert [round(line.get_ydata()[-1], 1) for line in lines] == [3.1, 2.8, 1.9, 11.3]  # at the ridge, as in the table


@extras.needs("libtpu")
def test_floors_are_of_int8_as_far_as_the_form_says():
    """The target's, a head's step and a round's with the head."""
    floors = []
    for form in compiled.FORMS.values():
        target = dataclasses.replace(chinchilla_70b(), **form)
        stack = compiled.stack_of(target, "v4:2x2x4", 16, drafter=compiled.eagle3_of(target), kernels=Kernels())
        programs = stack.programs(2)
        floors.append((programs.floor(programs.target), programs.floor(programs.draft), programs.floor_of_round(K)))
    for plain, weights, caches in zip(*floors, strict=True):
        assert plain > 1.2 * weights > 1.2 * 1.2 * caches, (plain, weights, caches)


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
