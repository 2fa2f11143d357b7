"""The audit holds lossy rules to their budgets: at a stated chance of a false alarm, and with a stated power."""

import dataclasses

import pytest

from specsamp import EARS, Bounded, JointThreshold, Pair, Typical, chain, temperature
from specsamp.analysis import report
from specsamp.decoding.drafters import ModelDrafter
from specsamp.evaluation.audit import Settings, audit, audit_table
from support.audits import subject_of
from support.fakes import TableLM, random_table
from support.mutants import IgnoresItsBudget

V, K, BUDGET = 8, 3, 0.02
TARGET, FAR = random_table(10, V), random_table(12, V)
SETTINGS = Settings(detect=0.1, rows=512, checks=("distribution",))


def audited(rule, settings=SETTINGS):
    pair = Pair(target=TableLM(V), target_params=TARGET, draft=TableLM(V), draft_params=FAR)
    drafter, sampling = ModelDrafter(TableLM(V), K), chain(temperature(1.0))
    prompts = [[0], [1, 2, 3], [4, 5, 6, 7, 0, 1, 2], [3, 3]]
    subject = subject_of(pair=pair, prompts=prompts, drafter=drafter, rule=rule, sampling=sampling, max_new_tokens=24)
    return audit(subject, settings)


def test_a_rule_that_keeps_to_its_budget_passes():
    rule = Bounded(EARS(1.0), BUDGET)
    found = audited(rule, dataclasses.replace(SETTINGS, checks=("distribution", "acceptance")))
    check, acceptance = found.checks
    assert found.passed and acceptance.numbers["accepted"] == acceptance.numbers["verified"]
    assert check.numbers["allowed"] == 2 * BUDGET and 0.005 < check.numbers["measured"] < 0.06
    assert "LOSSY: no more than its budget of 0.02 per token" in found.summary and "seen with 99%" in found.summary
    checks = report.as_json([dataclasses.asdict(check) for check in found.checks])
    assert "up to its budget" in audit_table(checks, claims=True).rows[0][2]
    report.json_text(dataclasses.asdict(found))


def test_a_rule_that_exceeds_its_budget_fails():
    found = audited(IgnoresItsBudget(EARS(1.0), BUDGET))
    assert not found.passed and found.checks[0].numbers["measured"] > 0.1


@pytest.mark.parametrize("rule", [EARS(0.3), Typical(), JointThreshold()])
def test_a_lossy_rule_without_a_budget_is_refused(rule):
    with pytest.raises(ValueError, match="is lossy.*budget"):
        audited(rule)
