"""The study of speedups: its arithmetic, from results that are made up."""

import math
import types

import pytest

from launch.studies import theory
from specsamp.analysis.acceptance import expected_tokens
from specsamp.analysis.benchmark import Result
from specsamp.analysis.report import to_json
from specsamp.analysis.timing import Quartiles
from specsamp.decoding.results import RowStats

COUNTS = RowStats(rounds=10, emitted=22, drafted=20, reached=(10, 6), accepted_counts=(4, 3, 3))


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
    stream_step=phase(3.0),
    draft_sampling=quartiles(0.125),
    least_round=quartiles(1.7),
)


def side(K, ms):
    return types.SimpleNamespace(draft_length=K, ms_per_token=quartiles(ms))


def result(ratio, same_tokens=4, split=SPLIT):
    return Result(
        autoregressive=side(0, 3.0),
        speculative=side(2, 3.0 / ratio),
        speedup=quartiles(ratio),
        overall_speedup=ratio,
        acceptance=COUNTS,
        same_tokens=same_tokens,
        split=split,
        slots=64,
        memory=None,
        device_gb_per_s=None,
        streaming_share=None,
    )


def cell(rule):
    return types.SimpleNamespace(key={"rule": rule}, workload=types.SimpleNamespace(repeats=4))


def test_efficiency_is_the_share_of_what_theory_allows():
    point = theory.point_of("token", result(1.2))
    allowed = expected_tokens(9 / 16, 2) / 1.7
    assert math.isclose(point.allowed, allowed) and math.isclose(point.efficiency, 1.2 / allowed)
    assert math.isclose(point.efficiency_of_rounds, 1.2 / (2.2 / 1.7))
    assert point.costs == theory.PhaseCosts(
        target_step=4.0, draft_call=0.75, score=5.0, least_round=1.7, draws_and_verdict=0.875, streaming_share=0.75
    )
    with pytest.raises(ValueError, match="the phases of a round were not timed"):
        theory.point_of("token", result(1.2, split=None))


def test_the_best_point_of_a_rule_and_the_table():
    measured = [(cell("token"), result(1.2)), (cell("token"), result(1.5, 3)), (cell("block"), result(1.1))]
    curve = theory.curve_of(measured, deterministic=True)
    assert curve.best("token").overall == 1.5 and curve.best("block").overall == 1.1
    assert (curve.prompts, curve.same_tokens) == (4, 3)
    assert theory.curve_of(measured, deterministic=False).same_tokens is None
    table = theory.curve_table("greedy", curve)
    assert [row[0] for row in table.rows] == ["token, K = 2", "token, K = 2 *", "block, K = 2 *"]
    assert all(len(row) == len(table.header) for row in table.rows)
    assert '"rate": 0.5625' in to_json(curve) and "same tokens on 3 of 4" in table.title
