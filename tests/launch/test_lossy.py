"""Words name rules, and tables show the price of lossy rules."""

import dataclasses

import pytest

from launch.lib.evaluation_tables import evaluation_tables
from launch.lib.experiment import rule_name
from launch.lib.rules import make_rule
from specsamp import EARS, Bounded, JointThreshold, Lenience, RowStats, TokenRule, Typical
from specsamp.analysis import report
from support.refusals import refused_calls


@pytest.mark.parametrize(
    "word, rule",
    [
        ("token", TokenRule()),
        ("ears", EARS()),
        ("lenience:0.25", Lenience(0.25)),
        ("typical:0.3:0.55", Typical(0.3, 0.55)),
        ("bounded:0.01:typical", Bounded(Typical(), 0.01)),
        ("bounded:0.01:joint:0.9", Bounded(JointThreshold(0.9), 0.01)),
    ],
)
def test_a_word_names_a_rule(word, rule):
    assert make_rule(word) == rule
    assert ("LOSSY" in rule_name(rule)) == (not rule.exact)


LOSSY = RowStats(
    rounds=4,
    emitted=10,
    drafted=12,
    reached=(4, 3, 3),
    accepted_counts=(1, 0, 1, 2),
    variation=0.5,
    extra_accepted=0.4,
)
EXACT = dataclasses.replace(LOSSY, variation=None, extra_accepted=None)


def test_evaluations_show_the_price_of_lossy_rules():
    def row(name, stats, per_text=None):
        scores = {"right": {"mean": 0.5, "low": 0.4, "high": 0.6}}
        one = {
            "name": name,
            "exact": stats.variation is None,
            "problems": 9,
            "scores": scores,
            "differences": {},
        }
        one |= {
            "counts": report.as_json(stats),
            "counts_by_category": {},
            "ms_per_token": 1.0,
            "speedups": [],
        }
        return one | {"variation_per_text": per_text}

    rows = [row("token", EXACT), row("ears:1", LOSSY, 0.25)]
    (price,) = [one for one in evaluation_tables("x", rows) if "Price" in one.title]
    assert price.rows == [("ears:1 (control, not exact)", "0.05000", "0.250", "+0.0400")]
    assert not [one for one in evaluation_tables("x", rows[:1]) if "Price" in one.title]


test_refused_rules = refused_calls(
    {
        "rule 'token:1': token takes no constants": lambda: make_rule("token:1"),
        "rule 'ears:0.3:0.4': ears takes 1 constants": lambda: make_rule("ears:0.3:0.4"),
        "'bounded:0.1' needs .*, such as bounded:0.01:ears:1.0": lambda: make_rule("bounded:0.1"),
    }
)
