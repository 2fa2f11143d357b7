"""Studies: their arithmetic, from results that are made up or committed."""

import json

import pytest

from launch.lib import study
from launch.studies import backtest
from specsamp.analysis.report import as_json
from support.run_script import ROOT, module

# Its name since.
WRITTEN = json.loads(json.dumps(study.read_result("tpu_backtest")).replace("v7x", "tpu7x"))


@pytest.fixture(scope="module")
def measured():
    return as_json(backtest.measure(None, print))


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
    assert [len(part) for name, part in parts.items() if "source left out, where" in name] == [
        13,
        24,
    ]


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
