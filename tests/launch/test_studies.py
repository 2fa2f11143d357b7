"""The arithmetic of studies, on made-up and committed results."""

import pytest

from launch.lib import study
from launch.studies import backtest, figures
from specsamp.analysis.report import as_json
from specsamp.tpu.int8_time import OVER_BFLOAT16
from support.run_script import ROOT, module


@pytest.fixture(scope="module")
def measured():
    return as_json(backtest.measure(None, print))


def test_backtest_compares_all_kinds_of_rows(measured):
    checks = backtest.checks_of(measured)
    assert {check["kind"] for check in checks if check["left_out"] == "kind"} >= {
        "served",
        "launched",
        "round",
        "experts",
    }
    parts = backtest.parts_of(checks)
    assert float(backtest.summary(parts["not fitted: served"])["wider by, to hold 90%"]) > 1.2
    assert [len(part) for name, part in parts.items() if "source left out, where" in name] == [
        13,
        24,
    ]


def test_commands_have_the_committed_ratios_of_int8():
    committed = {chip: study.read_result(f"compile_int8_{chip}") for chip in OVER_BFLOAT16}
    assert committed
    assert OVER_BFLOAT16 == {
        chip: {row["batch"]: round(figures.int8_ratio(row), 2) for row in document["rows"]}
        for chip, document in committed.items()
    }


def test_the_demo_has_the_speedups_of_the_readme(monkeypatch, tmp_path):
    demo = module("demo")
    name, *shown = demo.committed_speedups()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert name.startswith("speedup in the README, 2 CPU cores (Intel(R) Xeon(R)")
    for told, K in zip(shown, (7, 3), strict=True):
        gain, _, length = told.partition(", ")
        assert length == f"K = {K}" and f"**{gain}**" in text
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    assert "only in a clone" in demo.committed_speedups()
