"""Who goes first, who is put aside, and that texts do not notice."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import (
    Adaptive,
    BlockRule,
    ChoosingDrafter,
    Confidence,
    CoupledRule,
    EarlyExitDrafter,
    ModelDrafter,
    NgramDrafter,
    Pair,
    ShortestFirst,
    TokenRule,
    chain,
    generate,
    generate_many,
    penalties,
    temperature,
)
from specsamp.decoding.request import Request
from specsamp.serving import batch
from specsamp.serving.schedule import Nearest
from support.fakes import LayeredTableLM, near, random_table, table_pair
from support.schedules import BUDGETS, PROMPTS, FakeClock, Oracle, Restless, by_row

PAIR = table_pair()
PENALISED = chain(penalties(repetition=1.3), temperature(0.9))
PACED = Adaptive(lengths=(0, 2), costs_ms=(1, 1.6), usual=2, margin=0, pause=3, stop=Confidence(0.1))
PLAIN = dict(draft_length=0, sampling=chain(temperature(0.9)), rows=3)


def layered_pair():
    table = random_table(3, 12)
    return Pair(target=LayeredTableLM(12), target_params=jnp.stack([near(table, 4, 0.5), 0.2 * table]))


@pytest.mark.parametrize(
    "pair, options",
    [
        (PAIR, dict(rule=TokenRule(), num_samples=2, return_log_probs=True)),
        (PAIR, dict(rule=BlockRule(), drafter=NgramDrafter(2))),
        (PAIR, dict(rule=CoupledRule())),
        (PAIR, dict(draft_length=0)),
        (layered_pair(), dict(drafter=EarlyExitDrafter(LayeredTableLM(12), 1, 2), sampling=PENALISED)),
        (PAIR, dict(drafter=ChoosingDrafter([NgramDrafter(2), ModelDrafter(PAIR.draft, 2)]))),
        pytest.param(PAIR, dict(draft_length=PACED), marks=pytest.mark.slow),
    ],
    ids=["token", "n-grams", "coupled", "plain", "early exit, penalties", "choosing", "adaptive"],
)
def test_a_text_that_was_put_aside_goes_on_as_if_nothing_had_happened(pair, options):
    """Tokens, log-probabilities, ends and counts are those of one batch; rounds are counted once."""
    options = dict(sampling=chain(temperature(0.9))) | options
    expected = by_row(generate(pair, PROMPTS, BUDGETS, **options))
    work = generate_many(pair, PROMPTS, BUDGETS, rows=3, schedule=Restless(), rounds_per_slice=1, **options)
    done = list(work)
    assert by_row(done) == expected and len(done) == len(expected)
    assert work.usage.preempted > len(PROMPTS)
    assert work.usage.busy == sum(row.stats.rounds for row in done)


def test_a_cache_that_gets_lost_shows(monkeypatch):
    """The control of the test above."""
    expected = by_row(generate_many(PAIR, PROMPTS, BUDGETS, **PLAIN))
    keep = batch.to_host_memory
    monkeypatch.setattr(
        batch, "to_host_memory", lambda rows, shards: dataclasses.replace(keep(rows, shards), cache=0 * rows.cache)
    )
    done = by_row(generate_many(PAIR, PROMPTS, BUDGETS, schedule=Restless(), rounds_per_slice=1, **PLAIN))
    assert sum(done[key].tokens != expected[key].tokens for key in expected) >= 3


def test_prompts_are_decoded_when_they_have_arrived(monkeypatch):
    """In the order of arrival, after which the clock waits for those still to come."""
    clock, arrivals = FakeClock(monkeypatch), [50, 0, 1000, 0, 50, 2000, 0]
    done = list(generate_many(PAIR, PROMPTS, BUDGETS, arrivals=arrivals, **PLAIN))
    assert by_row(done) == by_row(generate_many(PAIR, PROMPTS, BUDGETS, **PLAIN))
    assert [row.prompt_index for row in done][-2:] == [2, 5]
    assert 2000 < clock.seconds < 2300


def test_a_run_that_goes_on_knows_the_lengths_of_its_log(tmp_path):
    predictor, log = Nearest(), tmp_path / "texts.jsonl"
    list(generate_many(PAIR, [[1]] * 2, [12, 12], log=log, **PLAIN))
    work = generate_many(PAIR, [[1]] * 2, [12, 12], log=log, schedule=ShortestFirst(predictor=predictor), **PLAIN)
    assert work.known == 2 and predictor.remaining(Request(prompt=(1,), max_new_tokens=15)) == 12


def test_a_short_text_that_comes_late_passes_long_ones(monkeypatch):
    """With the lengths known; the control is first come, first served."""
    prompts, budgets, arrivals = [[1], [2], [3]], [40, 40, 2], [0, 0, 4]
    options = PLAIN | dict(rows=1, rounds_per_slice=1, arrivals=arrivals)

    def order(**schedule):
        FakeClock(monkeypatch)
        return [row.prompt_index for row in generate_many(PAIR, prompts, budgets, **options, **schedule)]

    assert order() == [0, 1, 2]
    assert order(schedule=ShortestFirst(predictor=Oracle(budgets))) == [2, 0, 1]
    assert order(schedule=ShortestFirst(predictor=Oracle(budgets), worth=50)) == [0, 2, 1]
    for ageing, expected in ((9.4, [0, 2, 1]), (9.6, [0, 1, 2])):  # it comes 4 s after a text with 38 tokens more
        assert order(schedule=ShortestFirst(predictor=Oracle(budgets), ageing=ageing)) == expected


def test_lengths_are_predicted_from_near_prompts():
    """Two kinds of prompts, of which no two are equal; before any text has ended there is the budget."""
    random = np.random.default_rng(0)

    def request(kind, emitted=0):
        prompt = random.integers(*((0, 50) if kind == "short" else (50, 100)), 20).tolist()
        return Request(prompt=tuple(prompt), max_new_tokens=300, emitted=emitted)

    predictor = Nearest(neighbours=4)
    first = request("short", 7)
    assert predictor.remaining(first) == 300 - 7
    for _ in range(10):
        predictor.finish(request("short", 10))
        predictor.finish(request("long", 200))
    assert predictor.remaining(first) == 10 - 7, "what was predicted of nothing is predicted again"
    assert predictor.remaining(request("short")) == 10 and predictor.remaining(request("long", 150)) == 50
    assert predictor.remaining(request("short", 10)) == 290, "it has outlived those that are near"
    small = dataclasses.replace(request("long"), max_new_tokens=16, emitted=15)
    for _ in range(4):
        predictor.finish(small)
    assert predictor.remaining(dataclasses.replace(small, emitted=14)) == 1, "those of about the same budget come first"


def test_the_nearest_forget():
    predictor = Nearest(capacity=4)
    for length in [1, 1, 1, 9, 9, 9, 9]:
        predictor.finish(Request(prompt=(1,), max_new_tokens=20, emitted=length))
    assert predictor.remaining(Request(prompt=(1,), max_new_tokens=20)) == 9
