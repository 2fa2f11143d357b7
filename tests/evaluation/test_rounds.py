"""The audit's tests of rounds: each mistake fails, sound pairs pass, and stated errors are seen."""

import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import BlockRule, TokenRule, chain
from specsamp.evaluation.audit import Settings, audit, round_evidence
from specsamp.evaluation.audit.round_evidence import Evidence
from support import mutants
from support.audits import RARE, TARGET, K, V, table_subject
from support.fakes import TableLM, near, random_table

DRAFT = near(TARGET, 11, 0.8)
CHANCE = 1e-3


class OverAccepts(TokenRule):
    """The token rule with the square root of its acceptance."""

    def acceptance(self, draft, target_log_probs):
        return jnp.sqrt(super().acceptance(draft, target_log_probs))


class TargetAsResidual(TokenRule):
    def residual(self, draft, target_log_probs, num_accepted_B):
        return jnp.exp(
            jnp.take_along_axis(target_log_probs, num_accepted_B[:, None, None], axis=1)[:, 0]
        )


def collect(**changes):
    return round_evidence.collect(
        table_subject(draft=DRAFT, **changes), detect=0.1, false_alarm=RARE, rows=128
    )


@pytest.fixture(scope="module")
def sound():
    return collect()


# A flat pair: nearly all pairs of tokens lie in one cell.


def flat_pair(rule):
    target = random_table(1, 32, 0.7)
    draft = random_table(2, 32, 0.7)
    settings = {"rule": rule, "sampling": chain(), "max_new_tokens": 12}
    return table_subject(TableLM(32), target=target, draft=draft, **settings)


@pytest.mark.slow
def test_over_acceptance_of_flat_pair_fails_audit():
    settings = Settings(checks=("distribution",), detect=0.1)
    found = audit(flat_pair(OverAccepts()), settings)
    assert not found.passed and found.summary == "1 of 1 checks failed: distribution"
    numbers = found.checks[0].numbers
    assert numbers["p_value_of_the_ratios"] < RARE * numbers["level_of_a_ratio"]

    found = audit(flat_pair(TokenRule()), settings)
    assert found.passed and "the draft prefers seen with 99%" in found.summary
    assert "of the probability lies in one cell" in found.summary


# Each test detects its mistake, and shows none of a sound pair.


def test_sound_pair_has_no_evidence_of_error(sound):
    for tests in (sound.ratios, sound.positions):
        assert tests.p_values.min() > CHANCE
    assert sound.texts >= 126 and sound.ratios.tokens_T[0] > 1500
    positions = sound.positions
    deviation_T = np.abs(positions.happened_T - positions.expected_T)
    np.testing.assert_array_less(deviation_T, 5 * np.sqrt(positions.expected_T))
    assert round_evidence.error_seen(sound.ratios, RARE) <= 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"rule": TargetAsResidual()}, {"drafter": mutants.DistributionBeforeWarping(TableLM(V), K)}],
    ids=lambda changes: type(next(iter(changes.values()))).__name__,
)
def test_round_evidence_catches_mistakes(changes):
    check = round_evidence.expected_ratios(collect(**changes), detect=0.1, false_alarm=RARE)
    assert check.verdict == "failed"


def test_acceptance_by_position_catches_a_cache_hole():
    """A draft whose cache has a hole is accepted less often, although tokens follow the target."""
    found = collect(drafter=mutants.HoleInTheCache(TableLM(V), K))
    assert found.ratios.p_values.min() > CHANCE
    assert found.positions.p_values[1] < RARE
    check = round_evidence.expected_acceptance(found, false_alarm=RARE)
    assert check.verdict == "failed"
    assert check.numbers["accepted_at_position_1"] < check.numbers["expected_at_position_1"]


@pytest.mark.slow
def test_block_rule_has_no_evidence_of_error():
    assert collect(rule=BlockRule()).ratios.p_values.min() > CHANCE


# The statistics.


def test_event_false_alarm_and_detection_rates_hold():
    rng, trials, level = np.random.default_rng(1), 1000, 0.05
    probs_NT = np.broadcast_to(rng.uniform(0.3, 0.5, 400)[:, None], (400, trials))
    tested_NT = np.ones((400, trials), bool)
    uniforms_NT = rng.random((400, trials))

    def share_that_fails(error):
        return (
            Evidence.of(probs_NT, uniforms_NT < probs_NT + error, tested_NT).p_values < level
        ).mean()

    assert share_that_fails(0.0) <= level
    error = Evidence.of(probs_NT, tested_NT, tested_NT).error_seen(level)[0]
    assert 0.1 < error < 0.25 and share_that_fails(error) > 0.99 and share_that_fails(-error) > 0.99
    assert share_that_fails(error / 4) < 0.5  # the control
    # By rounding, an impossible event may happen a few times.
    impossible = Evidence.of(np.zeros((5, 1)), np.ones((5, 1), bool), np.ones((5, 1), bool))
    assert impossible.p_values[0] > 1e-3


def test_texts_are_drawn_until_errors_are_seen():
    """Small errors require more texts, and an error that remains unseen is named."""
    few = table_subject()
    batch = round_evidence.collect(few, detect=0.9, false_alarm=RARE, rows=6)
    assert batch.texts == 6 and round_evidence.error_seen(batch.ratios, RARE) > 0.1
    more = round_evidence.collect(few, detect=0.1, false_alarm=RARE, rows=60)
    assert more.texts > 60 and round_evidence.error_seen(more.ratios, RARE) <= 0.1
    assert (
        "NOT SURELY SEEN"
        in round_evidence.expected_ratios(batch, detect=0.05, false_alarm=RARE).seen
    )
