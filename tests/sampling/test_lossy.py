"""Lossy rules by enumeration in float64: golden values, and meters equal to a token's cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from specsamp import EARS, Bounded, Draft, JointThreshold, Lenience, Typical
from support import mutants
from support.distributions import constant, grid, log, one_hots, random_distributions
from support.enumeration import enumerate_round
from support.price import joint_and_price, meters, text_variation, token_outputs, variation
from support.refusals import refused_calls

EXACT = 1e-12

RULES = {
    "EARS": EARS(0.3),
    "lenience": Lenience(0.5),
    "typical": Typical(),
    "bounded EARS": Bounded(EARS(1.0), 0.02),
    "bounded lenience": Bounded(Lenience(0.1), 0.05),
    "bounded typical": Bounded(Typical(), 0.03),
    "joint threshold": JointThreshold(0.5),
    "bounded joint threshold": Bounded(JointThreshold(0.5), 0.03),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)

FLAT, SKEWED = [0.5, 0.3, 0.2, 0.0], [0.9, 0.06, 0.03, 0.01]
UNIFORM = [0.25] * 4
RISING, FALLING = [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]


@pytest.mark.parametrize(
    "rule, q, p, accepted, cost",
    [
        (EARS(0.3), FLAT, UNIFORM, 0.7375, 0.0375),
        (EARS(0.3), FALLING, RISING, 0.726, 0.126),
        (EARS(1.0), FALLING, RISING, 0.94, 0.34),
        (Lenience(0.5), FLAT, UNIFORM, 0.75, 0.05),
        (Lenience(1.0), FALLING, RISING, 0.6, 0.0),
        (Typical(), FLAT, UNIFORM, 0.75, 0.125),
        (Typical(), SKEWED, UNIFORM, 0.25, 0.025),
        (Typical(epsilon=0.3, delta=0.09), SKEWED, UNIFORM, 0.5, 0.22),
        (Bounded(EARS(0.5), 0.01), FALLING, RISING, 0.61, 0.01),
        (Bounded(Lenience(0.5), 0.5), FLAT, UNIFORM, 0.75, 0.05),
        (Bounded(Typical(), 0.025), FLAT, UNIFORM, 0.71, 0.025),
    ],
)
def test_golden_values_of_one_token(rule, q, p, accepted, cost):
    """A budget reduces the extra acceptance in proportion."""
    with jax.enable_x64(True):
        log_q, log_p = jnp.asarray(log(q)), jnp.asarray(log(p))
        assert_allclose((jnp.exp(log_p) * rule.accepts(log_q, log_p)).sum(), accepted, atol=EXACT)
        assert_allclose(rule.variation(log_q, log_p), cost, atol=EXACT)


def test_typical_rule_has_golden_outputs():
    with jax.enable_x64(True):
        out = Typical().output(*map(jnp.asarray, (log(FLAT), log(UNIFORM))))
    assert_allclose(out, [0.375, 0.325, 0.3, 0], atol=EXACT)


@pytest.mark.parametrize(
    "tau, scores, passed, cost",
    [
        (0.5, None, [1, 1], None),  # ratios .8 and .71
        (0.75, None, [1, 0], None),
        (0.5, [0.9, 0.3], [0, 1], [0.0, 0.2]),  # ratios .44 and 1.19; the second is never reached
        (0.5, [0.4, 0.9], [1, 1], [0.6, 0.2]),  # ratios 1 and .89
    ],
)
def test_golden_joint_ratios(tau, scores, passed, cost):
    """The draft (1, 1) is drawn, or found by a search, which makes an accepted token certain."""
    q = [[[0.6, 0.4], [0.2, 0.8], [0.5, 0.5]]]
    p = [[[0.5, 0.5], [0.1, 0.9]]]
    tokens, count = jnp.ones((1, 2), jnp.int32), jnp.full(1, 2)
    with jax.enable_x64(True):
        found = None if scores is None else jnp.log(jnp.asarray([scores]))
        laws = jnp.log(jnp.asarray(p)) if scores is None else None
        draft = Draft(tokens_BK=tokens, num_drafted_B=count, log_probs_BRV=laws, scores_BK=found)
        target = jnp.log(jnp.asarray(q))
        rule = JointThreshold(tau)
        np.testing.assert_array_equal(rule.acceptance(draft, target), [passed])
        spent = rule.meter(draft, target, count).variation[0, :2]
    if scores is not None:
        np.testing.assert_allclose(spent, cost, atol=EXACT)


@every_rule
def test_meter_equals_the_emitted_total_variation(rule):
    """Covers each token of a round, given the tokens before it; the enumeration has no meter."""
    num_tokens = 2
    for one_hot in (False, True):
        names, target, draft = one_hots(*grid(3)) if one_hot else grid(3)
        rounds = enumerate_round(rule, target, draft, num_tokens=num_tokens, one_hot=one_hot)
        costs, extras = meters(rule, target, draft, num_tokens=num_tokens, one_hot=one_hot)
        for step in range(num_tokens):
            outputs, accepted = token_outputs(rounds, step)
            drafted = rounds.drafted_SXD.reshape(outputs.shape[:3] + (-1,))
            # One meter for all drawn drafts with these first tokens.
            with np.errstate(invalid="ignore"):
                weights = drafted / drafted.sum(-1, keepdims=True)
            metered, extra = (
                (x[..., num_tokens, step].reshape(weights.shape) * weights).sum(-1)
                for x in (costs, extras)
            )
            happens = ~np.isnan(accepted)
            q, p = (np.exp(x[step]).reshape(outputs.shape) for x in (target, draft))
            assert_allclose(metered[happens], variation(outputs, q)[happens], atol=EXACT)
            exact = np.minimum(q, p).sum(-1)
            assert_allclose(extra[happens], (accepted - exact)[happens], atol=EXACT)


@every_rule
def test_only_emitted_drafted_tokens_are_metered(rule):
    target = random_distributions(0, 4, 3, 4)
    draft = random_distributions(1, 4, 3, 3)
    costs, extras = meters(rule, target, draft, num_tokens=3)
    for n in range(4):
        assert np.all(costs[..., n, n + 1 :] == 0) and np.all(extras[..., n, n + 1 :] == 0)
    assert np.all(costs[..., 3] == 0)  # the bonus token costs nothing
    assert np.all((costs > -EXACT) & (costs < 1))


@every_rule
def test_summed_meters_bound_text_total_variation(rule):
    target = random_distributions(2, 20, 3, 6)
    draft = random_distributions(3, 20, 3, 6)
    for length in (1, 3):
        joint, price = joint_and_price(rule, target, draft, num_tokens=2, length=length)
        measured = text_variation(joint, target, length)
        assert np.all(measured <= price + EXACT)
        assert measured.max() > 0.004
        if length == 1:
            assert_allclose(measured, price, atol=EXACT)


@pytest.mark.parametrize("rule", [EARS(1.0), Lenience(0.05), Typical()])
@pytest.mark.parametrize("budget", [0.0, 0.01, 0.2])
def test_a_budget_is_kept_and_spent(rule, budget):
    """Covers all kinds of pairs; the meter of bounded rules is tested above."""
    names, target, draft = grid(3)
    with jax.enable_x64(True):
        log_q, log_p = jnp.asarray(target[2]), jnp.asarray(draft[2])
        free, spent = (
            np.asarray(one.variation(log_q, log_p)) for one in (rule, Bounded(rule, budget))
        )
    assert_allclose(spent, np.minimum(free, budget), atol=EXACT)
    assert free.max() > 0.2


# Controls: mistakes that the enumeration must catch.


class ReplacesByLessThanWasRejected(Lenience):
    """Subtracts ``l p`` instead of p, which costs more than necessary."""

    def replaces(self, log_q, log_p):
        return jnp.maximum(jnp.exp(log_q) - self.lenience * jnp.exp(log_p), 0)


class MetersAcceptedTokensOnly(EARS):
    def meter(self, draft, target_log_probs, num_accepted_B):
        return super().meter(draft, target_log_probs, num_accepted_B - 1)


class MetersTheDraftAgainstTheTarget(EARS):
    def variation(self, log_q, log_p):
        return jnp.maximum(jnp.exp(log_p) - jnp.exp(log_q), 0).sum(-1)


def test_costlier_residual_is_caught():
    with jax.enable_x64(True):
        cost = ReplacesByLessThanWasRejected(0.5).variation(
            *map(jnp.asarray, (log(FLAT), log(UNIFORM)))
        )
    assert_allclose(cost, 0.1, atol=EXACT)


@pytest.mark.parametrize(
    "rule", [MetersAcceptedTokensOnly(0.3), MetersTheDraftAgainstTheTarget(0.3)]
)
def test_wrong_meter_is_caught(rule):
    target, draft = constant(FALLING, 2), constant(RISING, 1)
    joint, price = joint_and_price(rule, target, draft, num_tokens=1, length=1)
    assert not 0.9 < text_variation(joint, target, 1)[0] / price[0] < 1.1


def test_ignored_budget_is_caught():
    target, draft = constant(FALLING, 2), constant(RISING, 1)
    joint, price = joint_and_price(
        mutants.IgnoresItsBudget(EARS(0.3), 0.01), target, draft, num_tokens=1, length=1
    )
    assert_allclose([text_variation(joint, target, 1)[0], price[0]], 0.126, atol=EXACT)


# Edges.


@every_rule
def test_greedy_targets_are_written_exactly(rule):
    """A target that is certain has nothing to relax."""
    names, target, draft = grid(3)
    keep = [i for i, name in enumerate(names) if "greedy" in name and "greedy draft" not in name]
    target, draft = ([table[keep] for table in side] for side in (target, draft))
    joint, price = joint_and_price(rule, target, draft, num_tokens=2, length=2)
    assert text_variation(joint, target, 2).max() < EXACT and price.max() < EXACT


test_refused_lossy_rules = refused_calls(
    {
        "Lenience's lenience must be a number above 0 to 1; got 0": lambda: Lenience(0),
        "Typical's epsilon must be a number above 0 to 1; got nan": lambda: Typical(epsilon=np.nan),
        "Typical's delta must be a number above 0 to 1; got 2": lambda: Typical(delta=2),
        "JointThreshold's tau must be a number above 0 to 1; got 0": lambda: JointThreshold(0),
        "Bounded takes a lossy rule that verifies token by token": lambda: Bounded(Bounded(EARS())),
    }
)
