"""Costs of a round: known rounds, milliseconds of calls, a roofline, a compile report."""

import pytest

from specsamp.analysis.acceptance import Profile
from specsamp.analysis.costs import CostTable, PerCall
from specsamp.analysis.planner import make_plan
from specsamp.models.config import chinchilla_70b, draft_4b
from specsamp.tpu.pair_report import compiled_costs
from specsamp.tpu.work import Roofline
from support.refusals import refusal, refused_calls


def test_lines_between_known_rounds():
    table = CostTable({1: {0: 1, 1: 2, 4: 5, 8: 13}, 3: {0: 3}}, context=100)
    assert [table.round_ms(K, 1, 100) for K in (0, 1, 2, 4, 6, 12)] == [1, 2, 3, 5, 9, 21]
    assert table.round_ms(0, 2, 100) == table.round_ms(0, 2) == 2
    twofold = CostTable({1: {0: 1, 4: 3}, 5: {0: 9, 8: 17}})
    assert twofold.round_ms(2, 2) == 4.25


def test_beyond_the_longest_known_round():
    """Costs are extrapolated from the longest round and half of it, and never fall with length."""
    assert CostTable({1: {0: 1, 4: 4, 7: 9, 8: 6}}).round_ms(12) == 8
    assert CostTable({1: {0: 4, 4: 9, 8: 6}}).round_ms(32) == 6
    assert CostTable({1: {0: 2, 1: 3}}).round_ms(3) == 5


def test_the_roofline_of_chinchilla_on_16_chips():
    """Lower bounds and the ridge equal public numbers: 140 GB over 16 x 1.2 TB/s, 275
    TFLOP/s each.
    """
    target, draft = chinchilla_70b(), draft_4b()
    roof = Roofline(target=target, draft=draft, chip="v4", devices=16, default_context=0)
    assert roof.round_ms(0) == pytest.approx(7.30, abs=0.01)
    assert roof.round_ms(4) - roof.round_ms(0) == pytest.approx(4 * 0.43, abs=0.01)
    ridge = 229  # rows from which products are bound by arithmetic
    assert roof.call_ms(target, 1, 220, 0) == pytest.approx(roof.call_ms(target, 1, 1, 0))
    assert roof.call_ms(target, 1, 2 * ridge, 0) == pytest.approx(
        2 * roof.call_ms(target, 1, 1, 0), rel=0.03
    )

    # Layers with a window read its slots alone.
    ms = [
        roof.call_ms(chinchilla_70b(**window), 1, 64, context)
        for window in ({}, {"window": 512, "global_layers": (0,)})
        for context in (512, 4096)
    ]
    assert ms[2] == ms[0] and (ms[1] - ms[0]) / (ms[3] - ms[2]) == pytest.approx(80)

    # Beyond the ridge speculation does not pay, except with long caches.
    def plan(**where):
        return make_plan(Profile.of_rate(0.8), roof, **where)

    assert plan(batch=1).best.draft_length >= 4 and plan(batch=512).best.draft_length == 0
    assert plan(batch=512, context=32768).best.draft_length > 0


def test_costs_of_a_compile_report():
    def program(name, mb, collectives):
        return {
            "name": name,
            "tokens": 5,
            "floor_bytes": 1.0,
            "live_floor_bytes": 1.0,
            "memory": None,
            "out_of_memory": None,
            "hbm_bytes": mb * 1e6,
            "cycles": 1e3,
            "collectives": {"all-reduce": collectives},
            "collective_bytes": {"all-reduce": 1e3},
        }

    report = {"topology": "v4:2x2x4", "batch": 1, "slots": 2048, "draft_length": 4, "rule": "x"}
    report["mesh"] = {"data": 1, "model": 16}
    report["programs"] = [program("target step", 1228, 100), program("round", 2456, 200)]
    calibrated = compiled_costs(report)
    assert calibrated.round_ms(0, 1, 2048) < calibrated.round_ms(4, 1, 2048)
    least, _ = calibrated.bounds  # no program of today was measured on v4
    assert least.round_ms(0, 1, 2048) == pytest.approx(1.023, abs=0.001)  # streaming alone
    of_v5e = compiled_costs(report | {"topology": "v5e:4x4"})
    assert of_v5e.error == 0 and not of_v5e.is_range and calibrated.is_range
    low, likely, high = (
        table.round_ms(4, 1, 2048) for table in (of_v5e.bounds[0], of_v5e, of_v5e.bounds[1])
    )
    assert low < likely < high
    report["programs"][1]["hbm_bytes"] = None
    with refusal("do not fit v4:2x2x4"):
        compiled_costs(report)
    with refusal("no compile report .*KeyError: 'programs'"):
        compiled_costs({})


OF_BATCHES = CostTable({1: {0: 1}, 3: {0: 3}}, context=100)

test_refused_costs = refused_calls(
    {
        "batch 4 lies beyond the measured 1, 3": lambda: OF_BATCHES.round_ms(0, 4, 100),
        "context 50 is not the measured 100": lambda: OF_BATCHES.round_ms(0, 1, 50),
        "no cost at draft_length 3: known are 0": lambda: CostTable({1: {0: 2}}).round_ms(3),
        "draft_length 0: known are 1, 2": lambda: CostTable({1: {1: 3, 2: 4}}).round_ms(0),
        "costs need at least one round of each batch": lambda: CostTable({1: {}}),
        "draft_length 8 lies beyond 7": lambda: PerCall({1: 10.0, 8: 16.0}, 0.5).round_ms(8),
    }
)
