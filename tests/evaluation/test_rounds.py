"""The audit's tests of rounds: each sees its mistake, none sees what is not there, and power is what is said."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import BlockRule, CoupledRule, Pair, TokenRule, chain, temperature, top_p
from specsamp.decoding.drafters import ModelDrafter
from specsamp.evaluation.audit import Settings, Subject, audit, rounds
from specsamp.evaluation.audit.evidence import MISTAKES, SHARE, mistake_sums, tilted, wrong_distributions
from specsamp.sampling.rules import Draft
from support import mutants
from support.fakes import TableLM, near, random_table

V, K = 8, 3
TARGET = random_table(10, V)
DRAFT = near(TARGET, 11, 0.8)
PROMPTS = [[0], [1, 2, 3], [4, 5, 6, 7, 0, 1, 2], [3, 3], [5, 1], [6, 1, 4, 4, 0]]
NUCLEUS = chain(temperature(0.8), top_p(0.9))
RARE = 1e-6
CHANCE = 1e-3


class OverAccepts(TokenRule):
    """The acceptance of the review: its square root."""

    def acceptance(self, draft, target_log_probs):
        return jnp.sqrt(super().acceptance(draft, target_log_probs))


class TargetAsResidual(TokenRule):
    def residual(self, draft, target_log_probs, num_accepted_B):
        return jnp.exp(jnp.take_along_axis(target_log_probs, num_accepted_B[:, None, None], axis=1)[:, 0])


class PreviousResidual(TokenRule):
    def residual(self, draft, target_log_probs, num_accepted_B):
        is_rejected_B = num_accepted_B < draft.num_drafted_B
        before_B = jnp.where(is_rejected_B, jnp.maximum(num_accepted_B - 1, 0), num_accepted_B)
        return super().residual(draft, target_log_probs, before_B)


def subject(target=TARGET, draft=DRAFT, vocab_size=V, **changes):
    model = TableLM(vocab_size)
    pair = Pair(target=model, target_params=target, draft=model, draft_params=draft)
    settings = {"drafter": ModelDrafter(model, K), "sampling": NUCLEUS, "max_new_tokens": 24} | changes
    return Subject(pair=pair, prompts=PROMPTS, **settings)


def collect(**changes):
    return rounds.collect(subject(**changes), detect=0.1, level=RARE, rows=128)


def p_values(found):
    return dict(zip(MISTAKES, found.mistakes.p_values, strict=True))


@pytest.fixture(scope="module")
def sound():
    return collect()


# What the review found: a flat pair, whose pairs of tokens lie in one cell nearly all.


def flat_pair(rule):
    target, draft = random_table(1, 32, 0.7), random_table(2, 32, 0.7)
    return subject(target, draft, 32, rule=rule, sampling=chain(), max_new_tokens=12)


@pytest.mark.slow
def test_over_acceptance_of_a_flat_pair_fails_the_audit():
    settings = Settings(checks=("distribution", "acceptance"), detect=0.1)
    found = audit(flat_pair(OverAccepts()), settings)
    assert not found.passed and found.summary == "2 of 2 checks failed: distribution, acceptance"
    numbers = found.checks[0].numbers
    assert numbers["p_value_over_acceptance"] < RARE * numbers["level_of_a_mistake"]
    assert numbers["power_over_acceptance"] > 0.99

    found = audit(flat_pair(TokenRule()), settings)
    assert found.passed and found.checks[0].numbers["power_over_acceptance"] > 0.99
    assert "over-acceptance (0.1" in found.summary and "of the probability lies in one cell" in found.summary


# Each test has a mistake that it must see; a sound pair shows none.


def test_a_sound_pair_shows_nothing(sound):
    for tests in (sound.mistakes, sound.bins, sound.positions):
        assert tests.p_values.min() > CHANCE
    assert sound.texts >= 126 and sound.mistakes.tokens_T[0] > 1500
    np.testing.assert_array_less(np.abs(sound.accepted_T - sound.expected_T), 5 * np.sqrt(sound.expected_T))
    assert not rounds.unseen_mistakes(sound.mistakes, 0.1, RARE) and (sound.mistakes.power(RARE)[:, 0] > 0.99).all()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("over-acceptance", {"rule": OverAccepts()}),
        ("target as residual", {"rule": TargetAsResidual()}),
        ("target as residual", {"rule": mutants.ResidualOfTheNextPosition()}),
        ("previous residual", {"rule": PreviousResidual()}),
        ("unwarped draft", {"drafter": mutants.DistributionBeforeWarping(TableLM(V), K)}),
    ],
)
def test_each_mistake_is_seen_by_its_test(name, changes):
    found = collect(**changes)
    assert p_values(found)[name] < RARE
    check = rounds.no_mistakes(found, detect=0.1, false_alarm=RARE)
    assert check.verdict == "failed" and check.numbers["p_value_of_the_ratio_bins"] < RARE


def test_acceptance_by_position_sees_what_changes_no_distribution():
    """A draft whose cache has a hole is accepted less often; what is emitted follows the target all the same."""
    found = collect(drafter=mutants.HoleInTheCache(TableLM(V), K))
    assert min(found.mistakes.p_values.min(), found.bins.p_values.min()) > CHANCE
    assert found.positions.p_values[1] < RARE
    check = rounds.expected_acceptance(found, false_alarm=RARE)
    assert (
        check.verdict == "failed" and check.numbers["accepted_at_position_1"] < check.numbers["expected_at_position_1"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule", [BlockRule(), CoupledRule()])
def test_other_rules_show_nothing(rule):
    found = collect(rule=rule)
    assert min(found.mistakes.p_values.min(), found.bins.p_values.min()) > CHANCE


# The statistics.


@pytest.fixture(scope="module")
def three():
    """Distributions of target, draft and unwarped draft at two successive positions."""
    rng = np.random.default_rng(3)
    q_NV, p_NV, unwarped_NV = (np.float32(rng.dirichlet(np.ones(V), 2)) for _ in range(3))
    q_NV[:, 0], p_NV[:, 1] = 0, 0
    return q_NV / q_NV.sum(1, keepdims=True), p_NV / p_NV.sum(1, keepdims=True), unwarped_NV


def test_the_distribution_under_a_mistake_is_that_of_the_broken_rule(three):
    q_NV, p_NV, unwarped_NV = three
    found = wrong_distributions(*three, jnp.arange(2))
    for rule, draft_NV, name in (
        (TokenRule(), p_NV, None),
        (OverAccepts(), p_NV, "over-acceptance"),
        (TargetAsResidual(), p_NV, "target as residual"),
        (TokenRule(), unwarped_NV, "unwarped draft"),
    ):
        tokens_BK = jnp.arange(V)[:, None]  # every token that the first position may draft
        draft = Draft(
            tokens_BK=tokens_BK,
            num_drafted_B=jnp.ones(V, jnp.int32),
            log_probs_BRV=jnp.broadcast_to(jnp.log(draft_NV[:1]), (V, 1, V)),
        )
        target = jnp.broadcast_to(jnp.log(q_NV), (V, 2, V))
        accepted_V = np.asarray(rule.acceptance(draft, target))[:, 0]
        residual_VV = np.asarray(rule.residual(draft, target, jnp.zeros(V, jnp.int32)))
        residual_VV = residual_VV / residual_VV.sum(1, keepdims=True)
        expected_V = p_NV[0] * accepted_V + (p_NV[0] * (1 - accepted_V)) @ residual_VV
        got_V = q_NV[0] if name is None else found[list(MISTAKES).index(name)][0]
        np.testing.assert_allclose(got_V, expected_V, atol=1e-6)
    previous = found[list(MISTAKES).index("previous residual")]
    np.testing.assert_allclose(previous[0], q_NV[0])
    replaced_V = previous[1] - np.minimum(q_NV[1], p_NV[1])
    residual_V = np.maximum(q_NV[0] - p_NV[0], 0)
    np.testing.assert_allclose(replaced_V / replaced_V.sum(), residual_V / residual_V.sum(), atol=1e-6)


def test_false_alarms_of_mistakes_are_as_rare_and_power_is_as_large_as_is_said(three):
    """4,000 sets of tokens, drawn from q and from each wrong distribution at 95% of the positions."""
    level, trials, rng = 0.05, 4000, np.random.default_rng(0)
    q_NV, p_NV, unwarped_NV = (x_NV[1:] for x_NV in three)
    wrong = wrong_distributions(q_NV, p_NV, unwarped_NV, jnp.ones(1, jnp.int32))
    wrong = (*wrong[:2], 0.8 * q_NV + 0.2 * unwarped_NV, wrong[3])  # any other residual for the third

    @jax.vmap
    def of_one_token(token):
        return mistake_sums(wrong, q_NV, token[None], jnp.ones(1, bool))

    one_token = jax.tree.map(lambda x: np.asarray(x, np.float64), of_one_token(jnp.arange(V)))  # arrays [V, T, 1]

    def evidence(probs_V, mistake, count):
        counts = rng.multinomial(count, np.float64(probs_V) / np.float64(probs_V).sum(), size=trials)
        tests = jax.tree.map(lambda x: np.repeat(x[0, mistake : mistake + 1] * count, trials, axis=0), one_token)
        return dataclasses.replace(tests, evidence_TS=counts @ one_token.evidence_TS[:, mistake])

    for i, name in enumerate(MISTAKES):
        true_V = q_NV[0] + SHARE * (np.asarray(wrong[i][0]) - q_NV[0])
        count = next(n for n in range(20, 10**4, 20) if evidence(true_V, i, n).power(level)[0, 0] > 0.8)
        for probs_V, least, most in ((q_NV[0], 0, level), (true_V, 0.75, 1)):
            share_rejected = (evidence(probs_V, i, count).p_values < level).mean()
            assert least <= share_rejected <= most, (name, count, share_rejected)


def test_false_alarms_of_events_are_as_rare_and_power_is_as_large_as_is_said():
    rng, trials, level = np.random.default_rng(1), 1000, 0.05
    probs_NT = np.broadcast_to(rng.uniform(0.1, 0.9, 400)[:, None], (400, trials))
    tested_NT = np.ones((400, trials), bool)

    def tests_of(happened_NT):
        return tilted(probs_NT, happened_NT, tested_NT)

    uniforms_NT = rng.random((400, trials))
    assert (tests_of(uniforms_NT < probs_NT).p_values < level).mean() <= level
    odds_NT = np.exp(0.3) * probs_NT / (1 - probs_NT)
    tests = tests_of(uniforms_NT < odds_NT / (1 + odds_NT))
    said = tests.power(level)[0, 4]
    assert 0.2 < said < 0.99 and (tests.p_values < level).mean() > said - 0.07
    # Events that cannot happen, or must, are borne a few times: rounding may decide otherwise.
    impossible = tilted(np.zeros((5, 1)), np.ones((5, 1), bool), np.ones((5, 1), bool))
    assert impossible.p_values[0] > 1e-3


def test_texts_are_drawn_until_mistakes_are_seen():
    """Small mistakes take more texts, and what is not seen in the end is said."""
    few = subject()
    batch = rounds.collect(few, detect=0.9, level=RARE, rows=6)
    assert batch.texts == 6 and rounds.unseen_mistakes(batch.mistakes, 0.02, RARE)
    assert rounds.collect(few, detect=0.02, level=RARE, rows=6).texts > 30
    check = rounds.no_mistakes(batch, detect=0.02, false_alarm=RARE)
    assert "NOT SURELY SEEN: over-acceptance" in check.seen


def test_logits_that_are_nan():
    nothing = subject(target=TARGET * jnp.nan)
    found = rounds.collect(nothing, detect=0.1, level=RARE, rows=6)
    assert found is None
    for check in (
        rounds.no_mistakes(found, detect=0.1, false_alarm=RARE),
        rounds.expected_acceptance(found, false_alarm=RARE),
    ):
        assert check.verdict == "failed" and "NaN" in check.sentence
    partly = dataclasses.replace(
        nothing, pair=dataclasses.replace(nothing.pair, target_params=TARGET.at[3].set(jnp.nan))
    )
    found = rounds.collect(partly, detect=0.1, level=RARE, rows=126)
    assert np.isfinite(found.mistakes.evidence_TS).all() and np.isfinite(found.expected_T).all()
