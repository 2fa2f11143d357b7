"""The choice of a draft length, by given clocks and never by the noise of the completions."""

import dataclasses

import jax
import pytest

from specsamp import Method, ModelDrafter, NgramDrafter, Pair, chain, generate, temperature
from specsamp.analysis import draft_length, report
from specsamp.analysis.calls import TIMED_LENGTH, TIMED_POSITIONS, time_calls
from specsamp.analysis.costs import PerCall
from specsamp.analysis.draft_length import calibrate
from specsamp.analysis.workload import TimedDecoder, Workload
from support import fakes
from support.refusals import refusal, refused_calls

PROMPTS = [[1, 2, 3], [4, 5]]
SAMPLING = chain(temperature(1.0))


@pytest.fixture(scope="module")
def pair():
    """Returns a pair whose draft is its target: everything is accepted."""
    return fakes.table_pair(8, noise=0.0, max_positions=64)


@pytest.fixture
def clocks(monkeypatch):
    """Returns a function that sets the seconds of a round by draft length; the rounds are real."""
    real, ran = TimedDecoder.decode, []

    def set_to(seconds):
        def timed(decoder, repeat):
            timing = real(decoder, repeat)
            ran.append(decoder)
            return dataclasses.replace(
                timing, loop_seconds=seconds[decoder.method.drafter.K] * timing.rounds
            )

        monkeypatch.setattr(TimedDecoder, "decode", timed)
        return ran

    return set_to


def choose(pair, prompts=PROMPTS, **options):
    return calibrate(
        pair, prompts, 30, **dict(sampling=SAMPLING, lengths=(0, 1, 4), repeats=2) | options
    )


def test_adaptive_lengths_begin_with_the_measured_costs(pair, clocks):
    ran = clocks({0: 1.0, 1: 1.1, 4: 1.5})
    found = choose(pair)
    # In turn; the first turn compiles.
    assert [decoder.method.drafter.K for decoder in ran] == [0, 1, 4] * 3
    assert len({decoder.engine.slots for decoder in ran}) == 1
    assert len(generate(pair, PROMPTS, 8, draft_length=found.usual)) == 2
    assert found.costs_ms == pytest.approx((1000, 1100, 1500))
    assert found.usual == 4 and 0.3 < found.acceptance <= 1
    clocks({0: 1.0, 1: 2.5, 4: 12.0})
    assert choose(pair).usual == 0


@pytest.mark.parametrize(
    "lengths, message", [((4,), "at least two to choose between"), ((4, 2), "lengths must rise")]
)
def test_lengths_are_checked_before_anything_is_measured(pair, clocks, lengths, message):
    ran = clocks({0: 1.0})
    with refusal(message):
        calibrate(pair, PROMPTS, 30, lengths=lengths)
    assert not ran


def test_the_clock_of_the_first_process_decides(pair, clocks, monkeypatch):
    """All processes must choose the same K: different ones would block each other for ever."""
    clocks({0: 1.0, 1: 2.5, 4: 12.0})
    monkeypatch.setattr(draft_length, "gather_objects", lambda found: ["of the first", found])
    assert choose(pair) == "of the first"


def test_calibration_noise_differs_from_completions(pair, clocks):
    """K does not depend on the random numbers that decide the completions."""
    ran = clocks({0: 1.0, 1: 1.0})
    choose(pair, lengths=(0, 1))
    requests = ran[-1].requests(0)
    assert [request.seed for request in requests] == [draft_length.SEED] * 2


def test_choosing_a_length_without_jit_is_refused(pair):
    with jax.disable_jit(), refusal("choose K yourself under JAX_DISABLE_JIT"):
        choose(pair)


# Costs of rounds from single calls.


def test_round_scores_one_position_more():
    costs = PerCall(target_ms={8: 16.0, 1: 10.0, 2: 12.0, 4: 16.0}, draft_ms=0.5)
    assert [costs.round_ms(K) for K in (0, 1, 2, 3, 7)] == [10, 12.5, 15, 17.5, 19.5]
    assert PerCall.from_json(report.as_json(costs)) == costs


@pytest.mark.parametrize("batch", [1, 3])
def test_every_call_is_timed_in_turn(pair, batch):
    methods = {
        "model": Method(drafter=ModelDrafter(pair.draft, TIMED_LENGTH)),
        "ngram": Method(drafter=NgramDrafter(TIMED_LENGTH)),
    }
    costs = time_calls(
        pair, methods, Workload(batch=batch, prompt_length=8, max_new_tokens=8), seconds=0.0
    )
    assert [*costs] == [*methods] and costs["model"].target_ms == costs["ngram"].target_ms
    target_ms = costs["model"].target_ms
    assert [*target_ms] == [*TIMED_POSITIONS]
    assert sorted(target_ms.values()) == [*target_ms.values()]
    assert all(one.draft_ms > 0 for one in costs.values()) and target_ms[1] > 0


MODEL = fakes.TableLM(8, max_positions=64)
TABLE = fakes.random_table(0, 8)
PAIR = Pair(target=MODEL, target_params=TABLE, draft=MODEL, draft_params=TABLE)
ALONE = Pair(target=MODEL, target_params=TABLE)

test_refused_calibrations = refused_calls(
    {
        "prompt 1 is empty": lambda: calibrate(PAIR, [[1], []], 4),
        "the pair has no draft model": lambda: calibrate(ALONE, PROMPTS, 4),
        r"lengths\[0\] must be an integer >= 0": lambda: calibrate(
            PAIR, PROMPTS, 4, lengths=(-1, 2)
        ),
        "together 203, more than the target's 64 positions": lambda: calibrate(PAIR, PROMPTS, 200),
    }
)
