"""The study of speedups: its arithmetic, from results that are made up."""

import math
import types

import pytest

from launch.studies import speedup
from specsamp.analysis.acceptance import expected_tokens
from specsamp.analysis.benchmark import Result
from specsamp.analysis.report import as_json
from specsamp.analysis.workload import Quartiles
from specsamp.decoding.results import RowStats
from support.run_script import call

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
    draft_sampling=quartiles(0.125),
    least_round=quartiles(1.7),
)


def side(K, ms):
    return types.SimpleNamespace(draft_length=K, ms_per_token=quartiles(ms))


def result(ratio, split=SPLIT, K=2):
    return Result(
        autoregressive=side(0, 3.0),
        speculative=side(K, 3.0 / ratio),
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


def test_the_best_point_of_a_rule_is_bold():
    measured = [("token", result(1.2)), ("token", result(1.5, K=4)), ("block", result(1.1))]
    points = [speedup.point_of(rule, each) for rule, each in measured]
    shown = speedup.table(as_json({"curves": {"greedy": {"points": points, "ms_per_token": quartiles(3.0)}}}))
    names = ["greedy, token rule, K = 2", "**greedy, token rule, K = 4**", "**greedy, block rule, K = 2**"]
    assert [row[0] for row in shown.rows] == names and "0.562" in shown.rows[0]


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--config.draft_temperature=0.5"], "--config.draft_temperature=0.5 has no effect here"),
        (["--config.drafter=none"], "--config.drafter"),
    ],
)
def test_what_has_no_curve_is_refused(arguments, told):
    done = call("study", "speedup", "--config=configs/random_pair.py:tiny", *arguments)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr
