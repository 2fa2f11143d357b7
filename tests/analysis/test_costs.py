"""What a round costs: known rounds, milliseconds of calls, a roofline, a compile report."""

import dataclasses
import math

import numpy as np
import pytest

from specsamp.analysis.acceptance import Profile
from specsamp.analysis.costs import CostTable, Parts, PerCall, Round, compiled_costs
from specsamp.analysis.planner import make_plan
from specsamp.analysis.roofline import Model, Roofline


def test_milliseconds_of_a_call_serve_any_batch_and_context():
    """As in the docstrings of the planner and of launch/plan.py."""
    plan = make_plan(Profile.of_rate(0.8), PerCall(14.1, 1.8), batch=8, context=2048, new_tokens=128)
    assert math.isclose(plan[4].round_ms, 14.1 + 4 * 1.8)
    for calls in ((0, 1), (1, -1), (math.inf, 1), (1, math.nan)):
        with pytest.raises(ValueError, match="calls take time: target"):
            PerCall(*calls)


def test_lines_between_known_rounds():
    at = lambda K, ms, batch, context: Round(draft_length=K, ms=ms, batch=batch, context=context)
    table = CostTable(
        rounds=(
            at(0, 1, 1, 100), at(1, 2, 1, 100), at(4, 5, 1, 100), at(8, 13, 1, 100),
            at(0, 3, 3, 100), at(0, 5, 1, 300),
        )
    )
    assert [table.round_ms(K, 1, 100) for K in (0, 1, 2, 4, 6, 12)] == [1, 2, 3, 5, 9, 21]
    assert table.round_ms(0, 2, 100) == 2 and table.round_ms(0, 1, 200) == 3
    with pytest.raises(ValueError, match="batch 4 lies beyond the measured 1, 3"):
        table.round_ms(0, 4, 100)
    with pytest.raises(ValueError, match="context 50 lies beyond the measured 100, 300"):
        table.round_ms(0, 1, 50)


def test_beyond_the_longest_known_round():
    further = lambda prefill: Parts.of(1, {0: 5.0, 6: 9.0, 8: 13.0}, 0.5, (9, 10.0), prefill).further_ms
    assert further((59, 35.0)) == (2.0 + 1.0) / 2  # 0.5 ms of the draft, 25 ms of reading 50 tokens
    assert further((59, 5.0)) == (2.0 + 0.5) / 2  # a prefill that is no longer than scoring
    assert further((59, 1e6)) == 2.0 == further((9, 1.0))  # never dearer than before, nor from a prefill as short
    rounds = Round(draft_length=0, ms=1), Round(draft_length=8, ms=5)
    table = CostTable(rounds=rounds, parts=(Parts(batch=1, draft_ms=0.1, further_ms=0.25),))
    assert [table.round_ms(K) for K in (4, 8, 12)] == [3, 5, 6]


def rounds_of(round_ms, lengths=(0, 1, 4, 8), batches=(1, 8)):
    return tuple(Round(draft_length=K, batch=b, ms=round_ms(K, b)) for b in batches for K in lengths)


PARTS = tuple(Parts(batch=b, draft_ms=0.5, further_ms=0.5) for b in (1, 8))


def test_between_batches_the_target_is_compared_at_equal_rows():
    """A target that takes no longer for four rows than for one, and then a millisecond for each."""
    round_ms = lambda K, batch: 5 + max(batch * (K + 1) - 4, 0) + 0.1 * batch + 0.5 * K
    lengths = (0, 1, 3, 4, 8)
    table = CostTable(rounds=rounds_of(round_ms, lengths), parts=PARTS)
    for K in (0, 1, 2, 6):
        assert math.isclose(table.round_ms(K, 4), round_ms(K, 4))
    at_equal_draft_length = CostTable(rounds=rounds_of(round_ms, lengths))  # the control
    assert at_equal_draft_length.round_ms(0, 4) > 1.2 * round_ms(0, 4)


def test_between_batches_whose_rows_do_not_meet():
    round_ms = lambda K, batch: 5 + 0.25 * batch * (K + 1) + 0.5 * K
    table = CostTable(rounds=rounds_of(round_ms, (0, 2)), parts=PARTS)  # 1 to 3 rows, and 8 to 24
    for batch in (1, 2, 5, 8):
        for K in (0, 1, 2):
            assert math.isclose(table.round_ms(K, batch), round_ms(K, batch))


def test_a_batch_on_either_side_of_a_known_one_costs_about_as_much():
    """Whatever the rounds: between batches nothing jumps."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        times = {(K, b): rng.uniform(1, 9) for K in (0, 1, 4, 8) for b in (1, 8)}
        few, many = (rounds_of(lambda K, b: times[K, b], batches=(b,)) for b in (1, 8))
        shifted = tuple(dataclasses.replace(one, batch=one.batch * 1000) for one in (*few, *many))
        parts = tuple(Parts(batch=b * 1000, draft_ms=0.1, further_ms=0.2) for b in (1, 8))
        table = CostTable(rounds=shifted, parts=parts)
        for K in (0, 3, 8):
            for known, beside in ((1000, 1001), (8000, 7999)):
                assert abs(table.round_ms(K, known) - table.round_ms(K, beside)) < 0.05


def test_the_roofline_of_chinchilla_on_16_chips():
    """Floors and the ridge of facts that anyone can compute: 140 GB over 16 x 1.2 TB/s, 275 TFLOP/s each."""
    target = Model(weight_bytes=140.1e9, parameters=70.06e9, kv_bytes_per_token=2_621_440)
    draft = Model(weight_bytes=8.24e9, parameters=4.12e9, kv_bytes_per_token=196_608)
    roof = Roofline(
        target=target, draft=draft, bytes_per_second=1.2e12, flops_per_second=2.75e14, devices=16, default_context=0
    )
    assert math.isclose(roof.round_ms(0), 7.30, abs_tol=0.01)
    assert math.isclose(roof.round_ms(4) - roof.round_ms(0), 4 * 0.43, abs_tol=0.01)
    ridge = 229  # rows from which products are bound by arithmetic
    assert math.isclose(roof.call(target, 1, 220, 0), roof.call(target, 1, 1, 0))
    assert math.isclose(roof.call(target, 1, 2 * ridge, 0), 2 * roof.call(target, 1, 1, 0), rel_tol=0.01)
    # Beyond the ridge speculation costs more than it brings; long caches make it pay again.
    plan = lambda **where: make_plan(Profile.of_rate(0.8), roof, **where)
    assert plan(batch=1).best.draft_length >= 4 and plan(batch=512).best.draft_length == 0
    assert plan(batch=512, context=32768).best.draft_length > 0


def test_costs_of_a_compile_report():
    program = lambda name, mb, collectives: {
        "name": name, "tokens": 5, "floor_bytes": 1.0, "live_floor_bytes": 1.0, "memory": None, "out_of_memory": None,
        "hbm_bytes": mb * 1e6, "cycles": 1e3, "collectives": {"all-reduce": collectives},
        "collective_bytes": {"all-reduce": 1e3},
    }  # fmt: skip
    report = {"topology": "v4:2x2x4", "batch": 1, "slots": 2048, "draft_length": 4, "rule": "x"}
    report["mesh"] = {"data": 1, "model": 16}
    report["programs"] = [program("target step", 1228, 100), program("round", 2456, 200)]
    costs = compiled_costs(report, latency_us=10)
    np.testing.assert_allclose([costs.round_ms(K, 1, 2048) for K in (0, 2, 4)], [2, 3, 4], rtol=0.03)
    calibrated = compiled_costs(report)
    assert calibrated.round_ms(0, 1, 2048) < calibrated.round_ms(4, 1, 2048) and calibrated.error > 0
    report["programs"][1]["hbm_bytes"] = None
    with pytest.raises(ValueError, match="do not fit v4:2x2x4"):
        compiled_costs(report, 10)
    with pytest.raises(ValueError, match="no compile report .*KeyError: 'programs'"):
        compiled_costs({}, 10)
