"""Speedup curves: their arithmetic, what they decode, and what must come out equal; never their times."""

import dataclasses
import json
import math
import types

import numpy as np
import pytest

from specsamp.analysis import report, speedup
from specsamp.analysis.acceptance import expected_tokens
from specsamp.analysis.decoder import Workload
from specsamp.analysis.speedup import BASELINE, Costs, speedup_curve
from specsamp.analysis.spread import Spread
from specsamp.decoding.drafters import ModelDrafter
from specsamp.decoding.pair import Pair
from specsamp.decoding.results import RowStats
from specsamp.sampling.rejection import BlockRule, TokenRule
from specsamp.sampling.warp import chain, temperature
from support import fakes

PROMPTS = ((1, 2, 3), (4,), (5, 6))
WORK = Workload(prompt_length=4, max_new_tokens=9, repeats=3, seed=4, prompts=PROMPTS)
LENGTHS = (1, 3)


def TIME(ms):
    return types.SimpleNamespace(ms=Spread.of([ms]))


SPLIT = types.SimpleNamespace(
    step=TIME(4.0),
    draft_model=TIME(1.5),
    score=TIME(5.0),
    verify=TIME(0.25),
    commit=TIME(0.5),
    stream_step=TIME(3.0),
    draft_sampling=Spread.of([0.125]),
    least_round=Spread.of([1.7]),
)


class Clock:
    """Counts how often it is read."""

    made: list["Clock"] = []

    def __init__(self, *_):
        self.reads = 0
        self.made.append(self)

    def measure(self):
        self.reads += 1

    def split(self):
        return SPLIT


def test_a_workload_takes_prompts_in_turn():
    work = dataclasses.replace(WORK, batch=2)
    tokens_BP, lengths_B, _ = work.rows(0, 8)
    np.testing.assert_array_equal(tokens_BP, [[1, 2, 3, 0], [4, 0, 0, 0]])
    np.testing.assert_array_equal(lengths_B, [3, 1])
    tokens_BP, _, ids_B = work.rows(1, 8)  # from the first again after the last
    np.testing.assert_array_equal(tokens_BP, [[5, 6, 0, 0], [1, 2, 3, 0]])
    np.testing.assert_array_equal(ids_B, [2, 3])


def test_a_workload_without_prompts_draws_them():
    work = dataclasses.replace(WORK, prompts=())
    tokens_BP, lengths_B, _ = work.rows(1, 8)
    assert tokens_BP.shape == (1, 4) and lengths_B.tolist() == [4] and 0 <= tokens_BP.min() <= tokens_BP.max() < 8
    np.testing.assert_array_equal(work.rows(1, 8)[0], tokens_BP)
    assert (work.rows(2, 8)[0] != tokens_BP).any()


@pytest.mark.parametrize("prompts", [((1, 2, 3, 4, 5),), ((1,), ())])
def test_prompts_that_do_not_fit(prompts):
    with pytest.raises(ValueError, match="1 to prompt_length = 4 tokens; the shortest has .*, the longest"):
        dataclasses.replace(WORK, prompts=prompts)


@pytest.fixture(scope="module")
def pair():
    table, model = fakes.random_table(0, 8), fakes.TableLM(8, max_positions=64)
    return Pair(target=model, target_params=table, draft=model, draft_params=fakes.near(table, 1, 0.5))


def measured(pair, heat, rules, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speedup, "PhaseClock", Clock)
        return speedup_curve(
            pair,
            lambda K: ModelDrafter(pair.draft, K),
            rules,
            LENGTHS,
            chain(temperature(heat)),
            WORK,
            passes=2,
            **options,
        )


@pytest.fixture(scope="module")
def greedy(pair):
    return measured(pair, 0.0, {"token": TokenRule(), "block": BlockRule()}, deterministic=True)


def test_there_is_a_point_for_every_rule_and_length(greedy):
    assert [(p.rule, p.draft_length) for p in greedy.points] == [
        (rule, K) for rule in ("token", "block") for K in LENGTHS
    ]
    assert greedy.prompts == len(PROMPTS)
    for point in greedy.points:
        assert point.acceptance.emitted == len(PROMPTS) * WORK.max_new_tokens  # of one pass
        assert len(point.acceptance.by_position) == point.draft_length
        assert point.speedup.lower <= point.speedup.median <= point.speedup.upper
    json.dumps(dataclasses.asdict(greedy), allow_nan=False)
    table = report.curve_table("greedy", greedy)
    assert len(table.rows) == len(greedy.points) and all(len(row) == len(table.header) for row in table.rows)


def test_efficiency_is_the_share_of_what_theory_allows(greedy):
    for point in greedy.points:
        K = point.draft_length
        assert math.isclose(point.allowed, expected_tokens(point.acceptance.rate, K) / 1.7)
        assert math.isclose(point.efficiency, point.overall / point.allowed)
        rounds = point.overall / (point.acceptance.emitted_per_round / 1.7)
        assert math.isclose(point.efficiency_of_rounds, rounds)


def test_the_best_point_of_a_rule(greedy):
    for rule in ("token", "block"):
        best = greedy.best(rule)
        assert best.rule == rule
        assert best.speedup.median == max(p.speedup.median for p in greedy.points if p.rule == rule)


def test_greedy_contenders_write_the_same(greedy):
    assert greedy.same_tokens == len(PROMPTS)


def test_sampled_contenders_need_not(pair):
    """And are told apart where they are compared all the same: the control of the count above."""
    rules = {"token": TokenRule()}
    assert measured(pair, 1.0, rules).same_tokens is None
    assert measured(pair, 1.0, rules, deterministic=True).same_tokens < len(PROMPTS)


def test_the_baseline_is_compared_prompt_by_prompt(pair, monkeypatch):
    """With clocks that are known: ratios of medians over passes, spread over prompts."""
    clocks = {BASELINE: [[8.0, 8.0, 100.0], [12.0, 12.0, 12.0]], "token 2": [[4.0, 4.0, 4.0], [2.0, 50.0, 2.0]]}
    stats = RowStats(rounds=5, emitted=12, drafted=10, reached=(5, 4), accepted_counts=(1, 1, 3))

    class Side:
        def __init__(self, name):
            self.name, self.calls = name, [0, 0]

        def decode(self, prompt):
            if prompt == 0 and not self.calls[0]:  # compiling: its time is not counted
                self.calls[0] = 1
                return None
            number = self.calls[prompt] - (prompt == 0)
            self.calls[prompt] += 1
            seconds = clocks[self.name][prompt][number]
            return types.SimpleNamespace(loop_seconds=seconds, stats=stats, texts=((1, 2),))

    monkeypatch.setattr(speedup, "_clock", Clock)
    monkeypatch.setattr(speedup, "decoders", lambda pair, contenders, *_: {name: Side(name) for name in contenders})
    work = Workload(max_new_tokens=4, repeats=2)
    rules = {"token": TokenRule()}
    curve = speedup_curve(pair, lambda K: None, rules, [2], chain(), work, passes=3, deterministic=True)
    (point,) = curve.points
    assert point.speedup == Spread.of([8 / 4, 12 / 2]) and point.overall == (8 + 12) / (4 + 2)
    assert curve.ms_per_token == Spread.of([2000.0, 3000.0]) and point.ms_per_token == Spread.of([1000.0, 500.0])
    assert point.acceptance.rounds == 2 * stats.rounds and curve.same_tokens == 2
    assert Clock.made[-1].reads == 3 * 2  # after every prompt of every pass, on the machine as it then was


def test_costs_come_from_the_split():
    """One call of the draft is a K-th of the draft's phase."""
    assert speedup._costs(3, SPLIT) == Costs(
        target_step=4.0, draft_call=0.5, score=5.0, least_round=1.7, draws_and_verdict=0.875, streaming_share=0.75
    )
