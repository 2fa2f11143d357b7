"""Studies: their arithmetic, from results that are made up or committed."""

import json
import types

import pytest

from launch.lib import study
from launch.studies import backtest
from launch.studies import compile as compiled
from launch.studies import compile_tables as tables
from launch.studies.compile import GRIDS, STUDY
from specsamp.analysis.report import as_json
from specsamp.models.config import TransformerConfig
from support import extras
from support.run_script import ROOT, module

WRITTEN = json.loads(json.dumps(study.read_result("tpu_backtest")).replace("v7x", "tpu7x"))  # its name since


@pytest.fixture(scope="module")
def measured():
    return as_json(backtest.measure(None, {}, print))


def test_milliseconds_are_those_that_were_written(measured):
    """Whoever changes the formula or a number of it sees every forecast that moves."""
    assert len(measured["checks"]) == len(WRITTEN["checks"])
    for mine, written in zip(measured["checks"], WRITTEN["checks"], strict=True):
        mine, written = dict(mine), dict(written["check"])
        bands = [
            {name: band[name] for name in ("least", "likely", "most")}
            for band in (mine, written)
            for band in [band.pop("forecast")]
        ]
        assert mine == written and bands[0] == pytest.approx(bands[1], rel=1e-9), written["name"]


def test_all_kinds_of_rows_are_compared_and_the_bands_do_not_claim_to_hold_servers(measured):
    checks = backtest.checks_of(measured)
    assert {check["kind"] for check in checks if check["left_out"] == "kind"} >= {
        "served",
        "launched",
        "round",
        "experts",
    }
    parts = backtest.parts_of(checks)
    assert float(backtest.summary(parts["not fitted: served"])[-1]) > 1.2
    assert [len(part) for name, part in parts.items() if "source left out, where" in name] == [13, 24]


def test_the_demo_has_the_speedups_of_the_readme(monkeypatch, tmp_path):
    demo = module("demo")
    name, *shown = demo.committed_speedups()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert name.startswith("speedup in the README, 2 CPU cores (AMD EPYC, avx2")
    for told, K in zip(shown, (7, 4), strict=True):
        gain, _, length = told.partition(", ")
        assert length == f"K = {K}" and f"**{gain}**" in text
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    assert "only in a clone" in demo.committed_speedups()


# Programs compiled for TPU slices


def cells(grid, *changes):
    return compiled.cells(types.SimpleNamespace(grid=grid, change=changes))


@pytest.mark.parametrize("grid", GRIDS)
def test_what_the_runner_writes_has_the_names_and_the_table_of_the_committed_answers(grid):
    document = study.read_result(f"compile_{grid}")
    names = [cell.get("name") or cell["key"] for cell in document["cells"]]  # older files name their cells
    assert all(cell in names for cell in cells(grid))
    answers = [cell.get("result", cell) for cell in document["cells"]]
    written = [{"key": name, "seconds": 1.0, "result": answer} for name, answer in zip(names, answers, strict=True)]
    written.append({"key": written[0]["key"], "out_of_memory": "of this machine, while it compiled"})
    assert STUDY.tables[grid].make({"cells": written}) == STUDY.tables[grid].make(document)
    assert {*STUDY.shown(types.SimpleNamespace(grid=grid))} <= {*STUDY.tables, *STUDY.figures}


def test_changed_cells_are_compiled_once():
    assert cells("heads", "topology=v5e:2x4", "target=Llama 3.1 8B", "drafter=EAGLE-3") == [
        {"target": "Llama 3.1 8B", "topology": "v5e:2x4", "drafter": "EAGLE-3"}
    ]


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
    table = tables.programs(document)
    assert len(table.rows) == 5 and table.rows[0][:3] == tuple(key.values())
    ((*named, step, draft, _, longer, _),) = tables.heads(document).rows
    assert named == list(key.values()) and float(draft) < float(step) < float(longer.split()[0])
