"""The forecast of adaptive lengths: that of the planner where nothing adapts, and close to the best fixed length."""

import dataclasses

import numpy as np
import pytest

from specsamp import Adaptive
from specsamp.analysis.acceptance import Profile
from specsamp.analysis.costs import PerCall
from specsamp.analysis.planner import make_plan, plan_adaptive, play

COSTS = PerCall(target_ms=10.0, draft_ms=1.0)
MIXED = dataclasses.replace(Profile.of_rate(0.7), texts=(0.4, 1.0, 3.0))  # of some texts more is accepted


@pytest.mark.parametrize("batch", [1, 4])
def test_where_nothing_adapts_it_is_the_planners(batch):
    asked = dict(batch=batch, new_tokens=40)
    plan = make_plan(MIXED, COSTS, draft_lengths=(0, 4), **asked)
    stubborn = Adaptive(lengths=(0, 4), costs_ms=(10, 14.0), usual=4, margin=1e6)
    found = play(stubborn, MIXED, plan[0].ms_per_token.value, texts=1000, seed=1, **asked)
    assert found.ms_per_token == pytest.approx(plan[4].ms_per_token.value, rel=5 * found.error)
    assert found.speedup == pytest.approx(plan[4].speedup.value, rel=5 * found.error)
    assert found.rounds_by_drafted[0] == 0 and 5 * found.error < 0.15


def test_it_is_near_the_best_fixed_length_and_beats_it_alone_where_texts_differ():
    for batch in (1, 8):
        plan = make_plan(MIXED, COSTS, draft_lengths=(0, 1, 2, 4, 8), batch=batch, new_tokens=64)
        found = plan_adaptive(MIXED, COSTS, lengths=(0, 1, 2, 4, 8), batch=batch, new_tokens=64)
        assert found.ms_per_token < plan.best.ms_per_token.value * (1.0 if batch == 1 else 1.03)


def test_drafts_that_are_refused_cost_little():
    bad = Profile.of_rate(0.02)
    found = plan_adaptive(bad, COSTS, lengths=(0, 1, 4), new_tokens=128)
    assert found.adaptive.usual == 0 and 0.97 < found.speedup <= 1.0
    assert np.argmax(found.rounds_by_drafted) == 0
