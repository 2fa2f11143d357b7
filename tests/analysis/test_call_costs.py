"""Costs of rounds from single calls."""

import pytest

from specsamp import ModelDrafter, NgramDrafter, Pair
from specsamp.analysis import report
from specsamp.analysis.costs import CallCosts
from specsamp.analysis.draft_length import TIMED_LENGTH, TIMED_POSITIONS, time_calls
from specsamp.analysis.workload import Workload
from specsamp.decoding.method import Method
from support import fakes


def test_a_round_scores_one_position_more_than_it_drafts():
    costs = CallCosts(target_ms={1: 10.0, 2: 12.0, 4: 16.0, 8: 16.0}, draft_ms=0.5)
    assert [costs.round_ms(K) for K in (0, 1, 2, 3, 7)] == [10, 12.5, 15, 17.5, 19.5]
    with pytest.raises(ValueError, match="draft_length 8 lies beyond 7"):
        costs.round_ms(8)
    assert CallCosts.from_json(report.as_json(costs)) == costs


@pytest.mark.parametrize("batch", [1, 3])
def test_every_call_is_timed_in_turn(batch):
    table, model = fakes.random_table(0, 8), fakes.TableLM(8, max_positions=64)
    pair = Pair(target=model, target_params=table, draft=model, draft_params=table)
    methods = {
        "model": Method(drafter=ModelDrafter(model, TIMED_LENGTH)),
        "ngram": Method(drafter=NgramDrafter(TIMED_LENGTH)),
    }
    costs = time_calls(pair, methods, Workload(batch=batch, prompt_length=8, max_new_tokens=8), seconds=0.0)
    assert [*costs] == [*methods] and costs["model"].target_ms == costs["ngram"].target_ms
    target_ms = costs["model"].target_ms
    assert [*target_ms] == [*TIMED_POSITIONS] and sorted(target_ms.values()) == [*target_ms.values()]
    assert all(one.draft_ms > 0 for one in costs.values()) and target_ms[1] > 0
