"""The planner against published tables, closed forms against simulation, and what it refuses."""

import dataclasses
import math

import numpy as np
import pytest

from launch.studies.figures import PAPER_EMITTED, PAPER_MS, PAPER_ROUND_MS
from specsamp.analysis.acceptance import ByLength, Profile, expected_tokens, mirrored_block_survival
from specsamp.analysis.costs import CostTable, PerCall, Round
from specsamp.analysis.planner import make_plan, rounds_per_token
from specsamp.decoding.results import RowStats

# Chen et al.: the acceptance that explains the curve of a task, the best K in figure 1, ms per token at K = 4 in table 1.
PAPER = {"HumanEval": (0.885, 7, 5.73), "XSum": (0.755, 3, 7.52)}
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
BEST = {  # draft over target: (best K, speedup) at ALPHAS, scoring as quick as a step
    0.01: ((5, 1.88), (7, 2.30), (9, 2.97), (14, 4.23), (24, 7.49)),
    0.02: ((4, 1.79), (6, 2.17), (8, 2.76), (11, 3.82), (19, 6.37)),
    0.05: ((3, 1.63), (4, 1.92), (6, 2.35), (8, 3.09), (13, 4.67)),
    0.10: ((2, 1.46), (3, 1.67), (4, 1.98), (6, 2.47), (10, 3.43)),
    0.128: ((2, 1.39), (3, 1.57), (4, 1.84), (5, 2.25), (9, 3.03)),
    0.20: ((2, 1.25), (2, 1.40), (3, 1.58), (4, 1.87), (7, 2.37)),
    0.30: ((1, 1.15), (1, 1.23), (2, 1.37), (3, 1.55), (5, 1.87)),
}
BLOCK_ACCEPTED = {2: (10 / 9, 11 / 9), 3: (1.4074, 1.6667), 4: (1.6049, 2.0494)}  # Sun et al., K: token, block


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


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("K", [0, 1, 5])
def test_expected_tokens(alpha, K):
    closed = K + 1 if alpha == 1 else (1 - alpha ** (K + 1)) / (1 - alpha)
    assert math.isclose(expected_tokens(alpha, K), closed)
    assert math.isclose(Profile.of_rate(alpha).tokens_per_round(K).value, closed)


@pytest.mark.parametrize("draft_ms", BEST)
def test_the_table_of_best_draft_lengths(draft_ms):
    for alpha, (K, speedup) in zip(ALPHAS, BEST[draft_ms], strict=True):
        plan = make_plan(Profile.of_rate(alpha), PerCall(1.0, draft_ms), draft_lengths=range(31))
        assert abs(plan.best.speedup.value - speedup) < 6e-3
        # Neighbours may be equal to the last published digit.
        assert plan.best.draft_length == K or abs(plan[K].speedup.value - plan.best.speedup.value) < 2e-3


@pytest.mark.parametrize("task", PAPER)
def test_figure_1_and_table_1_of_the_paper(task):
    alpha, best, ms_per_token = PAPER[task]
    costs = CostTable(rounds=tuple(Round(draft_length=K, ms=ms) for K, ms in enumerate(PAPER_ROUND_MS)))
    plan = make_plan(Profile.of_rate(alpha), costs, draft_lengths=range(8))
    np.testing.assert_allclose([128 * one.ms_per_token.value for one in plan.forecasts], PAPER_MS[task], rtol=0.012)
    tokens = [one.tokens_per_round.value / (one.draft_length + 1) for one in plan.forecasts]
    np.testing.assert_allclose(tokens, PAPER_EMITTED[task], rtol=0.02)
    assert plan.best.draft_length == best
    assert math.isclose(plan[4].ms_per_token.value, ms_per_token, rel_tol=0.02)
    # The control: another acceptance does not reproduce it.
    wrong = make_plan(Profile.of_rate(alpha - 0.05), costs, draft_lengths=range(8))
    assert abs(wrong[7].ms_per_token.value * 128 / PAPER_MS[task][7] - 1) > 0.05


@pytest.mark.parametrize("K", BLOCK_ACCEPTED)
def test_the_block_rule_of_two_mirrored_tokens(K):
    token, block = BLOCK_ACCEPTED[K]
    assert math.isclose(Profile.of_rate(2 / 3).survival(K).sum(), token, rel_tol=1e-4)
    assert math.isclose(mirrored_block_survival(2 / 3, K).sum(), block, rel_tol=1e-4)


def simulate(by_position, exponents, batch, new_tokens, runs, seed=0):
    """Mean rounds of the slowest row, drawn token by token."""
    random = np.random.default_rng(seed)
    chances_T = np.array(by_position)[None, :] ** np.array(exponents)[:, None]
    chances = chances_T[random.integers(len(exponents), size=(runs, batch))]
    emitted, rounds = np.zeros((runs, batch), int), np.zeros((runs, batch), int)
    while (running := emitted < new_tokens).any():
        accepted = np.cumprod(random.random(chances.shape) < chances, axis=-1).sum(-1)
        emitted += np.where(running, accepted + 1, 0)
        rounds += running
    return rounds.max(1).mean()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("exponents", [(1.0,), (0.3, 1.0, 2.5)])
def test_rounds_against_simulation(batch, exponents):
    profile = Profile(by_position=(0.8, 0.7, 0.6), beyond=0.5, texts=exponents)
    drawn = simulate((0.8, 0.7, 0.6, 0.5), exponents, batch, new_tokens=24, runs=40_000)
    planned = rounds_per_token(profile, 4, batch, new_tokens=24) * 24
    assert abs(planned - drawn) < 0.06  # at least six standard errors
    # Controls: twice the rows, one text for all, and rows that never end.
    assert abs(rounds_per_token(profile, 4, 2 * batch, 24) * 24 - drawn) > 0.24
    if len(exponents) > 1:
        alike = dataclasses.replace(profile, texts=(1.0,))
        assert abs(rounds_per_token(alike, 4, batch, 24) * 24 - drawn) > 0.24
    assert abs(rounds_per_token(profile, 4, batch) * 24 - drawn) > 0.24


def test_a_batch_takes_longer_and_endless_rows_do_not():
    known = tuple(Round(draft_length=K, ms=1 + 0.1 * K, batch=batch) for batch in (1, 8) for K in (0, 1))
    profile, costs = Profile.of_rate(0.8), CostTable(rounds=known)

    def at(batch, n):
        return make_plan(profile, costs, batch=batch, new_tokens=n)[4].ms_per_token.value * batch

    assert at(8, 64) > at(1, 64) > at(1, None)
    assert math.isclose(at(8, None), at(1, None))
    assert make_plan(profile, costs, batch=8, new_tokens=64)[0].rounds_per_token == 1
    assert at(4, None) == pytest.approx(at(1, None))  # between two measured batches


def test_speculation_that_does_not_pay_is_not_planned():
    plan = make_plan(Profile.of_rate(0.2), PerCall(1.0, 0.5))
    assert plan.best.draft_length == 0 and plan.best.speedup.value == 1
    assert plan[1].speedup.value < 1


def test_a_profile_from_counts():
    """Judged (10, 6), accepted (6, 3): what budgets cut off does not count as refused."""
    profile = Profile.of_texts([stats((4, 3, 3), reached=(10, 6))])
    assert profile.by_position == (0.6, 0.5) and profile.beyond == 0.5
    np.testing.assert_allclose(profile.survival(3), [0.6, 0.3, 0.15])
    assert Profile.of_histogram((4, 3, 3)).by_position == (0.6, 0.5)
    nothing_drafted = stats((10, 0, 5), reached=(5, 5))  # prompt lookup: ten rounds without a match
    assert Profile.of_texts([nothing_drafted]).by_position == (1 / 3, 1.0)
    never = Profile.of_histogram((7, 0, 0))
    assert never.by_position == (0.0,) and never.tokens_per_round(4).value == 1


def drawn_texts(rates, rounds, K, random):
    accepted = [np.cumprod(random.random((rounds, K)) < rate, axis=1).sum(1) for rate in rates]
    return [stats(np.bincount(n, minlength=K + 1)) for n in accepted]


def test_texts_spread_as_they_do():
    """Neither as the counts, to which chance adds, nor as the best estimate of each, which is drawn to the whole."""
    random, sd = np.random.default_rng(0), 0.06
    counted = drawn_texts(random.beta(*np.array([0.7, 0.3]) * (0.21 / sd**2 - 1), 4000), 30, 4, random)
    whole = sum(one.accepted for one in counted) / sum(sum(one.reached) for one in counted)
    spread = np.std(whole ** np.array(Profile.of_texts(counted, [0] * len(counted)).texts))
    assert abs(spread / sd - 1) < 0.06  # three standard errors
    counts = np.std([one.acceptance_rate for one in counted])
    assert counts / sd > 1.2 and sd / counts < 0.85  # the controls: counts, and best estimates of each


@pytest.mark.parametrize("by_position", [(0.7,) * 6, (0.95, 0.6, 0.5, 0.5, 0.5, 0.5)], ids=["alike", "falling"])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_batch_of_counted_texts_against_simulation(batch, by_position):
    """Counted in 30 rounds of K = 4, forecast for 6."""
    random = np.random.default_rng(0)
    exponents = random.gamma(10, 0.1, 400)
    chances = [np.array(by_position[:4]) ** e for e in exponents]
    profile = Profile.of_texts(drawn_texts(chances, 30, 4, random), [0] * 400)
    drawn = simulate(by_position, exponents, batch, new_tokens=96, runs=20_000)

    def at(texts):
        return rounds_per_token(dataclasses.replace(profile, texts=texts), 6, batch, 96) * 96 / drawn - 1

    assert abs(at(profile.texts)) < 0.02
    if batch > 1:  # the controls: texts that are all alike, or that differ by a third less or more

        def wider(factor):
            return tuple(max(1 + factor * (e - 1), 0.0) for e in profile.texts)

        assert at((1.0,)) < -0.06 and at(wider(2 / 3)) < -0.02 and at(wider(4 / 3)) > 0.02


def test_rounds_without_drafts_are_hard_texts():
    """Prompt lookup that finds nothing in most rounds: the chance of a first position is of all rounds."""
    random = np.random.default_rng(0)
    texts = []
    for share in random.beta(4, 6, 200):
        drafted = random.random(60) < share
        n = np.where(drafted, np.cumprod(random.random((60, 2)) < 0.7, axis=1).sum(1), 0)
        counts = np.bincount(n, minlength=3)
        texts.append(stats(counts, reached=(int(drafted.sum()), int(counts[1:].sum()))))
    profile = Profile.of_texts(texts, [0] * 200)
    assert np.std(profile.texts) > 0.2
    emitted = np.mean([profile.survival(2, text).sum() for text in profile.texts])
    assert abs(emitted / profile.survival(2).sum() - 1) < 0.05
    empty = stats((60, 0, 0), reached=(0, 0))
    assert Profile.of_texts([*texts, empty], [0] * 201).texts[-1] > 1.5


def test_texts_without_rounds_tell_nothing():
    one, none = stats((4, 3, 3)), stats((0, 0, 0))
    assert Profile.of_texts([one, none]) == Profile.of_texts([one])
    with pytest.raises(ValueError, match="1 texts without rounds"):
        Profile.of_texts([none])
    with pytest.raises(ValueError, match="0 texts without rounds"):
        Profile.of_texts([])
    with pytest.raises(ValueError, match="2 texts need as many numbers of prompts; got 3"):
        Profile.of_texts([one, one], [0, 0, 1])


@pytest.mark.parametrize("counts", [(0, 10), (10, 0), (0, 10, 0), (0, 0, 10), (10, 0, 0)])
def test_texts_without_chance(counts):
    profile = Profile.of_texts([stats(counts), stats(counts), stats((*[0] * (len(counts) - 1), 3))])
    assert np.isfinite(profile.texts).all() and np.isfinite(rounds_per_token(profile, 4, 2, 16))


@pytest.fixture(scope="module")
def stretches():
    """Counts of 60 texts by K: tokens are easy or hard to draft, in stretches of ten on average."""

    def decoded(K, tokens=128):
        texts = []
        for number in range(60):
            random = np.random.default_rng([number])
            easy = np.cumsum(random.random(tokens + K) < 0.1) % 2
            accepts = random.random(tokens + K) < np.where(easy, 0.95, 0.4)
            at, counts, reached = 0, np.zeros(K + 1, int), np.zeros(K, int)
            while at < tokens:
                n = int(np.cumprod(accepts[at : at + K]).sum())
                given = min(n + 1, tokens - at)
                counts[min(n, given)] += 1
                reached[: min(n + 1, K, given)] += 1
                at += given
            texts.append(stats(counts, reached))
        return texts

    return {K: decoded(K) for K in (1, 2, 4, 6, 8, 12)}


@pytest.mark.parametrize("batch", [1, 4])
def test_rounds_of_another_length_begin_elsewhere(stretches, batch):
    by_length = ByLength({K: Profile.of_texts(stretches[K]) for K in (1, 4, 8)})

    def error(acceptance, K):
        rounds = np.random.default_rng(0).permuted(np.tile([one.rounds for one in stretches[K]], (2000, 1)), axis=1)
        measured = rounds[:, : 60 // batch * batch].reshape(2000, -1, batch).max(2).mean()
        return rounds_per_token(acceptance.at(K), K, batch, new_tokens=128) * 128 / measured - 1

    assert max(abs(error(by_length, K)) for K in stretches) < 0.03
    assert error(by_length.profiles[8], 1) > 0.05  # the control


def test_chances_between_lengths_run_on_lines():
    short = Profile(by_position=(0.9,), beyond=0.9, texts=(0.5,))
    long = Profile(by_position=(0.7, 0.6, 0.5, 0.4, 0.3), beyond=0.2, texts=(1.0, 2.0))
    both = ByLength({5: long, 1: short})
    assert both.at(0) is both.at(1) is short and both.at(5) is both.at(9) is long
    np.testing.assert_allclose(both.at(2).by_position, (0.85, 0.6, 0.5, 0.4, 0.3))
    assert both.at(4).beyond == 0.2 and both.at(4).texts == (0.5, 1.0, 2.0)
    reversed_ = ByLength({1: long, 5: dataclasses.replace(short, beyond=0.8)})  # the longer was followed less far
    np.testing.assert_allclose(reversed_.at(3).by_position, (0.8, 0.7, 0.65, 0.6, 0.55))
    assert make_plan(both, PerCall(1, 0.1))[4].tokens_per_round == both.at(4).tokens_per_round(4)
    with pytest.raises(ValueError, match=r"profiles are needed at draft lengths >= 1; got \[0\]"):
        ByLength({0: long})
    with pytest.raises(ValueError, match=r"at draft lengths >= 1; got \[\]"):
        ByLength({})


def test_the_band_between_lengths():
    """Of prompts, where both lengths were counted on the same; else of the longer."""
    random = np.random.default_rng(0)
    rates = random.uniform(0.5, 0.8, 30)
    at = {K: Profile.of_texts(drawn_texts(rates, 60, K, random)) for K in (1, 4, 8)}

    def error(profile, K):
        return profile.tokens_per_round(K).relative_error

    both = ByLength(at)
    assert len(both.at(6).leave_one_out) == 30
    assert abs(error(both.at(6), 6) / np.mean([error(at[4], 6), error(at[8], 6)]) - 1) < 0.15
    fewer = Profile.of_texts(drawn_texts(rates[:20], 60, 4, random))
    assert ByLength({4: fewer, 8: at[8]}).at(6).leave_one_out == at[8].leave_one_out
    # Without texts it is of tokens: two counts of a hundred know as much as one of two hundred.
    counts = (40, 24, 14, 8, 14)
    short, long = Profile.of_histogram(counts), Profile.of_histogram((*counts[:4], 4, 3, 2, 2, 3))
    assert ByLength({4: short, 8: long}).at(6).num_verified == (200, 120, 72, 44, 14, 10, 7, 5)


def test_texts_of_one_prompt_count_as_one_where_prompts_are_asked_for():
    texts = drawn_texts([0.4, 0.6, 0.7, 0.8], 60, 4, np.random.default_rng(0))
    once, threefold = Profile.of_texts(texts), Profile.of_texts(texts * 3, [0, 1, 2, 3] * 3)

    def error(profile):
        return profile.tokens_per_round(4).relative_error

    assert math.isclose(error(once), error(threefold)) and len(threefold.texts) == 12
    assert error(Profile.of_texts(texts * 3)) < 0.6 * error(once)  # the control
    one = Profile.of_texts(texts, [5] * 4)
    assert not one.leave_one_out and error(one) > 0 and len(one.texts) == 4


def test_bands_cover_the_truth_as_often_as_they_say():
    """95% of 400 data sets, for counts and for texts; an error half as large is the control."""
    random = np.random.default_rng(0)
    truth, covered, covered_by_half = expected_tokens(0.7, 4), [], []
    for number in range(400):
        texts = drawn_texts([0.7] * 8, 30, 4, random)
        total = stats(np.sum([one.accepted_counts for one in texts], axis=0))
        band = (Profile.of_texts(texts) if number % 2 else Profile.of_texts([total])).tokens_per_round(4)
        covered.append(band.lower <= truth <= band.upper)
        covered_by_half.append(math.sqrt(band.lower * band.value) <= truth <= math.sqrt(band.upper * band.value))
    assert 0.88 < np.mean(covered) < 0.99 and np.mean(covered_by_half) < 0.8


def test_the_error_reaches_beyond_the_counted_positions():
    """Counted at K = 2, forecast for 8: as much as histograms that were drawn anew differ."""
    random = np.random.default_rng(0)
    drawn = [drawn_texts([0.7], 240, 2, random)[0] for _ in range(1500)]
    bands = [Profile.of_histogram(one.accepted_counts).tokens_per_round(8) for one in drawn]
    told = np.mean([band.value * band.relative_error for band in bands])
    assert abs(told / np.std([band.value for band in bands]) - 1) < 0.1  # five standard errors


def test_a_rate_that_was_counted_has_a_band():
    assert Profile.of_rate(0.7).tokens_per_round(4).upper == Profile.of_rate(0.7).tokens_per_round(4).value
    band = Profile.of_rate(0.7, num_verified=1000).tokens_per_round(4)
    half = 1.96 * math.sqrt(0.21 / 1000)
    low, high = expected_tokens(0.7 - half, 4), expected_tokens(0.7 + half, 4)
    np.testing.assert_allclose([band.lower, band.upper], [low, high], rtol=2e-3)
    sure, unsure = PerCall(1, 0.1), dataclasses.replace(PerCall(1, 0.1), error=0.05)

    def width(costs):
        return (lambda b: b.upper / b.lower)(make_plan(Profile.of_rate(0.7), costs)[4].speedup)

    assert width(sure) == 1 and math.isclose(width(unsure), math.exp(2 * 1.96 * 0.05 * math.sqrt(2)))


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan"), "0.5", True])
def test_impossible_acceptance_rates(rate):
    for make in (Profile.of_rate, lambda rate: mirrored_block_survival(rate, 2)):
        with pytest.raises(ValueError, match=r"the acceptance rate must be from 0 to 1; got"):
            make(rate)
    with pytest.raises(ValueError, match="the acceptance at position 2 must be from 0 to 1"):
        Profile.of_positions((0.5, rate))


@pytest.mark.parametrize("counts", [(), (3,), (0, 0), (-1, 3), (0.5, 0.5)])
def test_histograms_that_are_none(counts):
    with pytest.raises(ValueError, match="a histogram is rounds by accepted tokens"):
        Profile.of_histogram(counts)


def test_numbers_out_of_range():
    profile, costs = Profile.of_rate(0.5), PerCall(1, 0.1)
    with pytest.raises(ValueError, match="a draft length must be an integer >= 0 .*got -1"):
        make_plan(profile, costs, draft_lengths=(1, -1))
    with pytest.raises(ValueError, match="a draft length must be at most 1024; got 20000"):
        make_plan(profile, costs, draft_lengths=range(20_001))
    with pytest.raises(ValueError, match="batch must be an integer >= 1 .*got 0"):
        make_plan(profile, costs, batch=0)
    with pytest.raises(ValueError, match="new_tokens must be an integer >= 1 .*got 0"):
        make_plan(profile, costs, new_tokens=0)
    with pytest.raises(ValueError, match="verified .* times cannot have accepted"):
        Profile.of_histogram((1, 2, 3), reached=(6, 2))
    with pytest.raises(ValueError, match="the acceptance by position is empty"):
        Profile.of_positions(())
