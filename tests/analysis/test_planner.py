"""The planner against published tables, and closed forms against simulation."""

import dataclasses
import math

import numpy as np
import pytest
from numpy.testing import assert_allclose

from launch.studies.figures import PAPER_EMITTED, PAPER_MS, PAPER_ROUND_MS
from specsamp import RowStats
from specsamp.analysis.acceptance import Profile, expected_tokens, profile_at
from specsamp.analysis.costs import CostTable, PerCall
from specsamp.analysis.planner import make_plan, rounds_per_token
from specsamp.analysis.report import json_text
from support.refusals import refused_calls

# Chen et al.: the acceptance that explains the curve of a task, the best K in figure 1, ms per
# token at K = 4 in table 1.
PAPER = {"HumanEval": (0.885, 7, 5.73), "XSum": (0.755, 3, 7.52)}
ALPHAS = (0.5, 0.7, 0.9)
BEST = {  # draft over target: (best K, speedup) at ALPHAS, scoring as quick as a step
    0.01: ((5, 1.88), (9, 2.97), (24, 7.49)),
    0.128: ((2, 1.39), (4, 1.84), (9, 3.03)),
}


def stats(accepted_counts, reached=None):
    counts = np.asarray(accepted_counts)
    at_least = np.cumsum(counts[::-1])[::-1]
    return RowStats(
        rounds=int(counts.sum()),
        emitted=int((counts * np.arange(1, len(counts) + 1)).sum()),
        drafted=0,
        reached=tuple(int(n) for n in (at_least[:-1] if reached is None else reached)),
        accepted_counts=tuple(int(n) for n in counts),
    )


@pytest.mark.parametrize("draft_ms", BEST)
def test_the_table_of_best_draft_lengths(draft_ms):
    for alpha, (K, speedup) in zip(ALPHAS, BEST[draft_ms], strict=True):
        plan = make_plan(Profile.of_rate(alpha), PerCall(1.0, draft_ms), draft_lengths=range(31))
        assert abs(plan.best.speedup.value - speedup) < 6e-3
        # Neighbours may be equal to the last published digit.
        assert (
            plan.best.draft_length == K
            or abs(plan[K].speedup.value - plan.best.speedup.value) < 2e-3
        )


@pytest.mark.parametrize("task", PAPER)
def test_figure_1_and_table_1_of_the_paper(task):
    alpha, best, ms_per_token = PAPER[task]
    costs = CostTable({1: dict(enumerate(PAPER_ROUND_MS))})
    plan = make_plan(Profile.of_rate(alpha), costs, draft_lengths=range(8))
    assert_allclose(
        [128 * one.ms_per_token.value for one in plan.forecasts], PAPER_MS[task], rtol=0.012
    )
    tokens = [one.tokens_per_round.value / (one.draft_length + 1) for one in plan.forecasts]
    assert_allclose(tokens, PAPER_EMITTED[task], rtol=0.02)
    assert plan.best.draft_length == best
    assert math.isclose(plan[4].ms_per_token.value, ms_per_token, rel_tol=0.02)
    # The control: another acceptance does not reproduce it.
    wrong = make_plan(Profile.of_rate(alpha - 0.05), costs, draft_lengths=range(8))
    assert abs(wrong[7].ms_per_token.value * 128 / PAPER_MS[task][7] - 1) > 0.05


def simulate(by_position, batch, new_tokens, runs, seed=0):
    """Returns the mean rounds of the slowest row, by simulation token by token."""
    random = np.random.default_rng(seed)
    chances = np.broadcast_to(by_position, (runs, batch, len(by_position)))
    emitted = np.zeros((runs, batch), int)
    rounds = np.zeros((runs, batch), int)
    while (running := emitted < new_tokens).any():
        accepted = np.cumprod(random.random(chances.shape) < chances, axis=-1).sum(-1)
        emitted += np.where(running, accepted + 1, 0)
        rounds += running
    return rounds.max(1).mean()


@pytest.mark.parametrize("batch", [1, 4])
def test_rounds_against_simulation(batch):
    profile = Profile(by_position=(0.8, 0.7, 0.6), beyond=0.5)
    drawn = simulate((0.8, 0.7, 0.6, 0.5), batch, new_tokens=24, runs=40_000)
    planned = rounds_per_token(profile, 4, batch, new_tokens=24) * 24
    assert abs(planned - drawn) < 0.06  # at least six standard errors
    # Controls: twice the rows, and rows that never end.
    assert abs(rounds_per_token(profile, 4, 2 * batch, 24) * 24 - drawn) > 0.24
    assert abs(rounds_per_token(profile, 4, batch) * 24 - drawn) > 0.24


def test_a_profile_from_counts():
    """Judged (10, 6), accepted (6, 3): tokens that a budget cuts off do not count as rejected."""
    profile = Profile.of_texts([stats((4, 3, 3), reached=(10, 6))])
    assert profile.by_position == (0.6, 0.5) and profile.beyond == 0.5
    assert_allclose(profile.survival(3), [0.6, 0.3, 0.15])
    assert Profile.of_histogram((4, 3, 3)).by_position == (0.6, 0.5)
    never = Profile.of_histogram((7, 0, 0))
    assert never.by_position == (0.0,) and never.tokens_per_round(4).value == 1


def drawn_texts(rates, rounds, K, random):
    accepted = [np.cumprod(random.random((rounds, K)) < rate, axis=1).sum(1) for rate in rates]
    return [stats(np.bincount(n, minlength=K + 1)) for n in accepted]


def test_each_draft_length_has_its_own_profile():
    by_length = {K: Profile.of_rate(K / 10) for K in (8, 1, 4)}
    found = {K: profile_at(by_length, K).beyond for K in (0, 1, 2, 4, 7, 8, 12)}
    assert found == {0: 0.1, 1: 0.1, 2: 0.1, 4: 0.4, 7: 0.4, 8: 0.8, 12: 0.8}
    assert profile_at(by_length[4], 8) is by_length[4]
    assert make_plan(by_length, PerCall(1, 0.1))[4].tokens_per_round == by_length[
        4
    ].tokens_per_round(4)


def test_bands_cover_the_truth_at_their_rate():
    """Intervals cover the truth in 95% of 400 data sets, for counts and for texts; the control
    halves the error.
    """
    random = np.random.default_rng(0)
    truth = expected_tokens(0.7, 4)
    covered = []
    covered_by_half = []
    for number in range(400):
        texts = drawn_texts([0.7] * 8, 30, 4, random)
        total = stats(np.sum([one.accepted_counts for one in texts], axis=0))
        band = (
            Profile.of_texts(texts) if number % 2 else Profile.of_texts([total])
        ).tokens_per_round(4)
        covered.append(band.lower <= truth <= band.upper)
        covered_by_half.append(
            math.sqrt(band.lower * band.value) <= truth <= math.sqrt(band.upper * band.value)
        )
    assert 0.88 < np.mean(covered) < 0.99 and np.mean(covered_by_half) < 0.8


def test_bands_include_errors_of_acceptance_and_clocks():
    known = Profile.of_rate(0.7)
    counted = dataclasses.replace(Profile.of_rate(0.7), error=0.03)
    sure = PerCall(1, 0.1)
    unsure = dataclasses.replace(PerCall(1, 0.1), error=0.05)

    def width(profile, costs):
        speedup = make_plan(profile, costs)[4].speedup
        return math.log(speedup.upper / speedup.lower) / (2 * 1.96)

    assert width(known, sure) == 0 and width(counted, sure) == pytest.approx(0.03)
    assert width(known, unsure) == pytest.approx(0.05 * math.sqrt(2))
    assert width(counted, unsure) == pytest.approx(math.hypot(0.03, 0.05 * math.sqrt(2)))


test_refused_plans = refused_calls(
    {
        "at position 1 must be a number from 0 to 1; got -0.1": lambda: Profile.of_rate(-0.1),
        "must be a number from 0 to 1; got nan": lambda: Profile.of_rate(math.nan),
        "must be a number from 0 to 1; got '0.5'": lambda: Profile.of_rate("0.5"),
        "must be a number from 0 to 1; got True": lambda: Profile.of_rate(True),
        "the acceptance by position is empty": lambda: Profile.of_positions(()),
        r"a histogram is rounds by accepted tokens, .*got \(3,\)": lambda: Profile.of_histogram(
            (3,)
        ),
        r"K >= 1; got \(0.5, 0.5\)": lambda: Profile.of_histogram((0.5, 0.5)),
        "verified .* times cannot have accepted": lambda: Profile.of_histogram((1, 2, 3), (6, 2)),
        "a draft length must be .*below 1025; got 20000": lambda: make_plan(
            Profile.of_rate(0.5), PerCall(1, 0.1), draft_lengths=(20_000,)
        ),
        "draft_ms must be": lambda: PerCall(1, math.nan),
        "1 texts without rounds": lambda: Profile.of_texts([stats((0, 0, 0))]),
        "0 texts without rounds": lambda: Profile.of_texts([]),
        "object has no JSON form": lambda: json_text({"x": object()}),
        "not JSON compliant": lambda: json_text({"x": math.nan}),
    }
)
