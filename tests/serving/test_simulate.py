"""Schedules under loads, by the simulator: who gains, who waits, and who would starve."""

import dataclasses

import numpy as np
import pytest

from specsamp.serving.schedule import FirstCome, Nearest, ShortestFirst, summary
from specsamp.serving.simulate import Arrival, Costs, Oracle, poisson, schedules, simulate

COSTS = Costs(seconds_per_round=0.1, emitted_per_round=2.0)
SHORT, LONG = 10, 200
CAPACITY = 4 * 2.0 / 0.1 / (0.9 * SHORT + 0.1 * LONG)  # texts a second of the mixture below


def mixture(count, seed=0):
    """One text in ten is long, and its prompt is of other words."""
    random = np.random.default_rng(seed)
    texts = []
    for is_long in random.random(count) < 0.1:
        prompt = random.integers(*((50, 100) if is_long else (0, 50)), 12).tolist()
        texts.append(Arrival(prompt=prompt, length=LONG if is_long else SHORT, budget=256))
    return texts


def latency(texts, schedule, **costs):
    return summary(simulate(texts, schedule, dataclasses.replace(COSTS, **costs), rows=4))


def test_one_text_takes_what_the_table_says():
    text = Arrival(prompt=[1, 2, 3], length=9, budget=20, seconds=7.0)
    costs = dataclasses.replace(COSTS, seconds_per_prefill_token=0.5)
    (served,) = simulate([text], FirstCome(), costs, rows=4)
    assert served.ended == pytest.approx(7.0 + 3 * 0.5 + 5 * 0.1) and served.emitted == 9
    (late,) = simulate([dataclasses.replace(text, dropped=8)], FirstCome(), costs, rows=4)
    assert late.ended == pytest.approx(served.ended + 4 * 0.1) and late.emitted == 9
    assert served.seconds_per_token == pytest.approx((3 * 0.5 + 5 * 0.1) / 9)


def test_texts_of_one_length_gain_nothing():
    texts = poisson([Arrival(prompt=[1], length=20, budget=20)] * 200, rate=3.6)
    first, *others = [latency(texts, schedule) for schedule in schedules([], texts).values()]
    assert others == [first, first]


def test_the_shortest_first_halve_the_latency_of_a_mixture():
    """At nine tenths of what the machine can do; the predictor, which has to learn, comes near the oracle."""
    texts = poisson(mixture(400), 0.9 * CAPACITY)
    found = {name: latency(texts, schedule)["mean"] for name, schedule in schedules([], texts).items()}
    assert found["oracle"] <= found["shortest predicted"] < 0.5 * found["first come"]
    assert found["shortest predicted"] < 1.5 * found["oracle"]
    blind = ShortestFirst(predictor=Nearest(neighbours=400))
    assert latency(texts, blind)["mean"] > 1.2 * found["shortest predicted"], "the control: the mean of all texts"


def test_what_a_swap_costs_is_paid():
    texts = poisson(mixture(100), 0.9 * CAPACITY)
    oracle = schedules([], texts)["oracle"]
    assert latency(texts, oracle, seconds_per_swap=0.2)["mean"] > latency(texts, oracle)["mean"]


def test_ageing_bounds_the_wait():
    """Short texts come faster than they are decoded; a long one that came first."""
    short = [Arrival(prompt=[1], length=SHORT, budget=256, seconds=0.12 * i) for i in range(1, 600)]
    texts = [Arrival(prompt=[2], length=LONG, budget=256, seconds=0.0)] * 4 + short
    oracle = Oracle([one.length for one in texts])

    def ends(ageing):
        served = simulate(texts, ShortestFirst(predictor=oracle, ageing=ageing), COSTS, rows=4)
        return max(one.ended for one in served[:4]), max(one.ended for one in served)

    ended, all_ended = ends(ageing=0.0)
    assert ended == all_ended, "the control: it starves to the end"
    ended, _ = ends(ageing=10.0)
    passing = LONG / 10.0 / 0.12  # texts that may go first
    assert ended < (passing * SHORT + 4 * LONG) / (4 * 2.0 / 0.1) + 5
