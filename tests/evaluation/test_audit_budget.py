"""The audit holds lossy rules to their budgets: at a stated chance of a false alarm, and with a stated power."""

import dataclasses

import numpy as np
import pytest

from specsamp import EARS, Bounded, JointThreshold, Pair, Typical, chain, temperature
from specsamp.analysis import report
from specsamp.decoding.drafters import ModelDrafter
from specsamp.evaluation.audit import Settings, Subject, audit, budget
from specsamp.evaluation.audit.cells import Cells
from specsamp.evaluation.audit.table import audit_table
from support.fakes import TableLM, random_table
from support.mutants import IgnoresItsBudget

V, K, BUDGET = 8, 3, 0.02
TARGET, FAR = random_table(10, V), random_table(12, V)
SETTINGS = Settings(detect=0.1, rows=512, checks=("distribution",))


def audited(rule, settings=SETTINGS):
    pair = Pair(target=TableLM(V), target_params=TARGET, draft=TableLM(V), draft_params=FAR)
    drafter, sampling = ModelDrafter(TableLM(V), K), chain(temperature(1.0))
    prompts = [[0], [1, 2, 3], [4, 5, 6, 7, 0, 1, 2], [3, 3]]
    subject = Subject(pair=pair, prompts=prompts, drafter=drafter, rule=rule, sampling=sampling, max_new_tokens=24)
    return audit(subject, settings)


def test_a_rule_that_keeps_to_its_budget_passes():
    rule = Bounded(EARS(1.0), BUDGET)
    found = audited(rule, dataclasses.replace(SETTINGS, checks=("distribution", "acceptance")))
    check, acceptance = found.checks
    assert found.passed and acceptance.numbers["accepted"] == acceptance.numbers["verified"]
    assert check.numbers["allowed"] == 2 * BUDGET and 0.005 < check.numbers["measured"] < 0.06
    assert check.numbers["lower_bound"] < 2 * BUDGET < check.numbers["seen_from"] < 0.1
    assert "LOSSY: no more than its budget of 0.02 per token" in found.summary and "seen with 99%" in found.summary
    checks = report.as_json([dataclasses.asdict(check) for check in found.checks])
    assert audit_table(checks, claims=True).rows[0][2] == budget.CLAIM
    report.to_json(dataclasses.asdict(found))


def test_a_rule_that_exceeds_its_budget_fails():
    found = audited(IgnoresItsBudget(EARS(1.0), BUDGET))
    assert not found.passed and found.checks[0].numbers["lower_bound"] > 0.1


@pytest.mark.parametrize("rule", [EARS(0.3), Typical(), JointThreshold()])
def test_a_lossy_rule_without_a_budget_is_refused(rule):
    with pytest.raises(ValueError, match="is lossy.*budget"):
        audited(rule)


# The test itself, on counts that are drawn.

PROBS = np.array([0.2, 0.3, 0.25, 0.15, 0.1])
SAMPLES, ALLOWED, TURNS = 4000, 0.04, 1500


def shifted(by):
    return PROBS + by * np.array([0.5, 0.5, -0.5, -0.25, -0.25])


def rejected(variation, seed):
    """Counts how often a rule of this total variation is rejected."""
    rng, count, cells = np.random.default_rng(seed), 0, Cells(prompt_id=0, index={}, probs_C=PROBS)
    for _ in range(TURNS):
        halves = rng.multinomial(SAMPLES // 2, shifted(variation), size=2)
        hits, counted, expected = budget._hits([cells], halves[:1], halves[1:])
        count += budget.lower_bound(hits, counted) - expected > ALLOWED
    return count / TURNS


def test_false_alarms_are_as_rare_as_stated():
    assert rejected(ALLOWED, 0) <= budget.LEVEL * 1.5


def test_the_power_is_the_one_stated():
    """Tests the cells that an error of this kind raises; the control sees half of the excess far less often."""
    seen_from = budget.smallest_seen(SAMPLES // 2, 0.5, ALLOWED)
    assert 0.07 < seen_from < 0.12
    assert rejected(seen_from, 1) > 0.97
    assert rejected((seen_from + ALLOWED) / 2, 2) < 0.8


def test_what_cannot_be_seen_is_said():
    assert budget.smallest_seen(100, 0.9, 0.2) == 1.0
    assert budget.smallest_seen(3, 0.5, 0.2) == 1.0
    assert budget.lower_bound(0, 10) == 0.0
