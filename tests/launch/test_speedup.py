"""The study of speedups: its arithmetic, from results that are made up."""

import math
import types

import pytest

from launch.lib import study
from launch.studies import speedup, speedup_tables
from specsamp.analysis.acceptance import expected_tokens
from specsamp.analysis.benchmark import Result
from specsamp.analysis.workload import Quartiles
from specsamp.decoding.results import RowStats
from support.run_script import ROOT, module

COUNTS = RowStats(rounds=10, emitted=22, drafted=20, reached=(10, 6), accepted_counts=(4, 3, 3))


SPREADS = {"token": {"median": 2.0, "lower": 1.5, "upper": 2.5}, "block": {"median": 9.0, "lower": 9.0, "upper": 9.0}}


def quartiles(value):
    return Quartiles.of([value])


def phase(ms):
    return types.SimpleNamespace(ms=quartiles(ms))


SPLIT = types.SimpleNamespace(
    step=phase(4.0),
    draft_model=phase(1.5),
    score=phase(5.0),
    verify=phase(0.25),
    commit=phase(0.5),
    draft_sampling=quartiles(0.125),
    least_round=quartiles(1.7),
)


def side(K, ms):
    return types.SimpleNamespace(draft_length=K, ms_per_token=quartiles(ms))


def result(ratio, split=SPLIT):
    return Result(
        autoregressive=side(0, 3.0),
        speculative=side(2, 3.0 / ratio),
        speedup=quartiles(ratio),
        overall_speedup=ratio,
        acceptance=COUNTS,
        same_tokens=4,
        split=split,
        slots=64,
        memory=None,
    )


def test_efficiency_is_the_share_of_what_theory_allows():
    point = speedup.point_of("token", result(1.2))
    assert math.isclose(point["efficiency"], 1.2 / (expected_tokens(9 / 16, 2) / 1.7))
    assert point["costs"] == {"target_step": 4.0, "draft_call": 0.75, "score": 5.0}
    with pytest.raises(ValueError, match="phases of a round"):
        speedup.point_of("token", result(1.2, split=None))


def test_several_measurements_of_a_setting_are_a_range():
    greedy = speedup_tables.DISTRIBUTIONS["greedy"]
    points = [{"rule": rule, "draft_length": K, "speedup": SPREADS[rule]} for K in (2, 3) for rule in SPREADS]
    curves = {"greedy": {"points": points}}
    study = {"config": {"drafter": "model", "batch": 1}, "curves": curves}
    key = speedup_tables.setting(greedy, "model", 3, 1)
    cells = [{"key": key, "result": {"speedup": {"median": 1.5, "lower": 1.25, "upper": 1.75}}}]
    cells += [
        {"key": key | {"batch": 4}, "result": {"speedup": SPREADS["block"]}},
        {"key": key, "out_of_memory": "all"},
    ]
    assert speedup_tables.spread(key, study) == "2.00x (1.50 to 2.50)"
    assert speedup_tables.spread(key, study, {"cells": cells}) == "1.50x to 2.00x (1.25 to 2.50)"
    assert speedup_tables.spread(key | {"batch": 4}, study, {"cells": cells}) == "9.00x (9.00 to 9.00)"
    assert speedup_tables.spread(key | {"temperature": 0.8}, study, {"cells": cells}) == ""


def test_the_demo_has_the_speedups_of_the_readme(monkeypatch, tmp_path):
    demo = module("demo")
    name, *shown = demo.committed_speedups()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert name.startswith("speedup in the README, 2 CPU cores (AMD EPYC, avx2")
    for told, K in zip(shown, (5, 3), strict=True):
        gain, _, length = told.partition(", ")
        assert length == f"K = {K}" and f"**{gain}**" in text
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    assert "only in a clone" in demo.committed_speedups()
