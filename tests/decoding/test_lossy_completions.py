"""Completions under a lossy rule say what they cost; nobody who demands exactness gets one."""

import functools

import numpy as np
import pytest

from specsamp import EARS, BlockRule, Lenience, chain, generate, generate_many, stream, temperature
from specsamp.decoding.drafters import NgramDrafter
from specsamp.decoding.results import RowStats
from specsamp.sampling.synthetic import SyntheticAcceptance
from support.fakes import counting_pair, table_pair

NEVER = "\0\0\0"  # a stop text, so that all calls share a program
OPTIONS = {
    "sampling": chain(temperature(8.0)),
    "draft_sampling": chain(temperature(4.0)),
    "rule": Lenience(0.5),
    "seed": 3,
}


@functools.cache
def whole():
    return generate(counting_pair(), ["a"], 24, stop=[NEVER], **OPTIONS)[0]


def test_completions_say_what_they_cost():
    stats = whole().stats
    assert not whole().exact
    assert 0 < stats.variation < stats.emitted
    assert stats.extra_accepted == pytest.approx(stats.variation, abs=1e-5)
    assert stats.variation_per_token == stats.variation / len(whole().tokens)
    assert (stats + stats).variation == 2 * stats.variation
    assert RowStats.from_json(vars(stats)) == stats


def test_what_a_stop_text_cuts_off_is_not_metered():
    """The same text stopped by a budget and by a string reports the same."""
    (cut,) = generate(counting_pair(), ["a"], 24, stop=[whole().text[4:7]], **OPTIONS)
    count = len(cut.tokens)
    assert cut.finish == "stop" and whole().tokens[:count] == cut.tokens and cut.dropped
    (short,) = generate(counting_pair(), ["a"], count, stop=[NEVER], **OPTIONS)
    assert short.tokens == cut.tokens
    assert cut.stats.variation == pytest.approx(short.stats.variation, abs=1e-6)
    assert cut.stats.extra_accepted == pytest.approx(short.stats.extra_accepted, abs=1e-6)
    assert 0 < cut.stats.variation < whole().stats.variation


def test_a_row_that_is_refilled_meters_its_own_text():
    prompts = ["a", "xyz"]
    first, second = generate_many(counting_pair(), prompts, [24, 5], rows=1, stop=[NEVER], **OPTIONS)
    assert first.tokens == whole().tokens
    assert first.stats.variation == pytest.approx(whole().stats.variation, abs=1e-5)
    assert 0 < second.stats.variation < first.stats.variation


class LossyDrafter(NgramDrafter):
    exact = False


@pytest.mark.parametrize("call", [generate, lambda *a, **b: next(stream(*a, **b)), generate_many])
def test_exactness_can_be_demanded(call):
    call = functools.partial(call, table_pair(), [[1]], 4, require_exact=True)
    with pytest.raises(ValueError, match=r"EARS\(beta=0.3, .*\) is lossy"):
        call(rule=EARS(0.3))
    with pytest.raises(ValueError, match="exactness is required, but LossyDrafter"):
        call(drafter=LossyDrafter(2))


def test_exact_rules_have_no_meter():
    (one,) = generate(table_pair(), [[1]], 4, require_exact=True, rule=BlockRule())
    assert one.exact and one.stats.variation is None and np.isnan(one.stats.variation_per_token)
    assert (one.stats + one.stats).variation is None
    assert not SyntheticAcceptance(EARS(), 0.5).metered, "made-up texts follow no rule"


def test_a_rule_must_say_whether_it_is_metered():
    class Own:
        exact, trees, draft_independent = True, False, False
        sample, verify = BlockRule.sample, BlockRule.verify

    with pytest.raises(ValueError, match="the rule must set metered"):
        generate(table_pair(), [[1]], 4, rule=Own())
