"""Distributions of the rules, enumerated in float64: an exact rule is exact to rounding."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import log_softmax

from specsamp import BlockRule, TokenRule
from support import mutants
from support.distributions import constant, grid, log, one_hots, random_distributions
from support.enumeration import autoregressive, enumerate_round, joint_distribution, split

OPTIMISED = True

EXACT = 1e-12
BIASED = 1e-3

every_rule = pytest.mark.parametrize("rule", [TokenRule(), BlockRule()], ids=["token", "block"])


def assert_exact(rule, names, target, draft, *, num_tokens, length, tolerance=EXACT, **kwargs):
    distribution = joint_distribution(
        rule, target, draft, num_tokens=num_tokens, length=length, **kwargs
    )
    error = np.abs(distribution - autoregressive(target, length)).max(-1)
    worst = error.argmax()  # the first NaN, if any
    assert error[worst] < tolerance, names[worst]


# Distributions of emitted tokens.


every_size = pytest.mark.parametrize(
    "vocab_size, num_tokens, length", [(3, 1, 4), (3, 2, 4), (3, 3, 4), (4, 2, 3)]
)


@every_size
@every_rule
def test_emitted_tokens_have_the_targets_joint_distribution(rule, vocab_size, num_tokens, length):
    names, target, draft = grid(vocab_size)
    assert_exact(rule, names, target, draft, num_tokens=num_tokens, length=length)


@every_size
@every_rule
def test_a_draft_without_distributions_is_one_hot(rule, vocab_size, num_tokens, length):
    names, target, draft = one_hots(*grid(vocab_size))
    assert_exact(rule, names, target, draft, num_tokens=num_tokens, length=length, one_hot=True)


@every_rule
def test_float32_rounds_but_does_not_bias(rule):
    names, target, draft = grid(3)
    assert_exact(
        rule, names, target, draft, num_tokens=3, length=3, dtype=np.float32, tolerance=1e-6
    )


def drafted_until_told_to_stop(rng, names, vocab_size, num_tokens, length):
    """Returns draft lengths of a stopping time, by the prefix and the tokens already drafted."""
    num_drafted = []
    for m in range(length):
        num = np.full((len(names), vocab_size**m, vocab_size**num_tokens), num_tokens)
        for i in reversed(range(num_tokens)):
            stops = rng.random((len(names), vocab_size**m, vocab_size**i)) < 0.3
            num = np.where(np.repeat(stops, vocab_size ** (num_tokens - i), axis=-1), i, num)
        num_drafted.append(num)
    return num_drafted


@pytest.mark.parametrize("one_hot", [False, True], ids=["distributions", "one-hot"])
@every_rule
def test_any_number_of_tokens_may_be_drafted(rule, one_hot):
    length, num_tokens = 3, 3
    names, target, draft = grid(3)
    if one_hot:
        names, target, draft = one_hots(names, target, draft)
    num_drafted = drafted_until_told_to_stop(np.random.default_rng(0), names, 3, num_tokens, length)
    assert {0, 1, 2, 3} <= set(num_drafted[0].ravel()) | set(num_drafted[1].ravel())
    assert_exact(
        rule,
        names,
        target,
        draft,
        num_tokens=num_tokens,
        length=length,
        one_hot=one_hot,
        num_drafted=num_drafted,
    )


@pytest.mark.parametrize("one_hot", [False, True], ids=["distributions", "one-hot"])
@every_rule
def test_padding_is_not_looked_at(rule, one_hot):
    rng = np.random.default_rng(1)
    rows = 500
    num_tokens = 3
    vocab_size = 4
    tokens = rng.integers(vocab_size, size=(rows, num_tokens)).astype(np.int32)
    num_drafted = rng.integers(num_tokens + 1, size=rows).astype(np.int32)
    draft = log_softmax(rng.normal(size=(rows, num_tokens, vocab_size)), -1)
    target = log_softmax(rng.normal(size=(rows, num_tokens + 1, vocab_size)), -1)
    padding = np.arange(num_tokens + 1) >= num_drafted[:, None]
    other_tokens = np.where(padding[:, :-1], (tokens + 1) % vocab_size, tokens)
    other_draft = np.where(padding[:, :-1, None], np.nan, draft)
    other_target = np.where(
        np.arange(num_tokens + 1)[None, :, None] > num_drafted[:, None, None], np.nan, target
    )

    def distributions(x):
        return None if one_hot else x

    acceptance, residual = split(rule, tokens, num_drafted, distributions(draft), target)
    other_acceptance, other_residual = split(
        rule, other_tokens, num_drafted, distributions(other_draft), other_target
    )
    assert_array_equal(other_acceptance, acceptance)
    reachable = np.arange(num_tokens + 1) <= num_drafted[:, None]
    assert_array_equal(other_residual[reachable], residual[reachable])
    assert np.all(acceptance[padding[:, :-1]] == 0)


# Broken rules, which the enumeration must catch.


def always(answer):
    def acceptance(self, draft, target_log_probs):
        return jnp.where(draft.is_drafted_BK, answer, 0.0).astype(target_log_probs.dtype)

    return acceptance


def next_residual(self, draft, target_log_probs, num_accepted_B):
    next_B = jnp.minimum(num_accepted_B + 1, draft.tokens_BK.shape[1])
    return super(type(self), self).residual(draft, target_log_probs, next_B)


BROKEN = {
    f"{rule.__name__}: {name}": mutants.broken(rule, **methods)
    for rule in (TokenRule, BlockRule)
    for name, methods in {
        "accepts always": {"acceptance": always(1)},
        "refuses always": {"acceptance": always(0)},
        "residual of the next position": {"residual": next_residual},
    }.items()
} | {
    "BlockRule: stops at the first refusal": mutants.StopsAtTheFirstRefusal(),
    "BlockRule: scale c_(n+1)": mutants.COfTheNextIndex(),
    "BlockRule: scale 1": mutants.broken(BlockRule, residual=TokenRule.residual),
    "BlockRule: accepts like the token rule": mutants.broken(
        BlockRule, acceptance=TokenRule.acceptance
    ),
    "TokenRule: keeps the longest": mutants.broken(TokenRule, num_accepted=BlockRule.num_accepted),
}


WITHOUT_DISTRIBUTIONS = [name for name in BROKEN if name.startswith("TokenRule") or "stops" in name]


@pytest.mark.parametrize(
    "name, one_hot",
    [(name, False) for name in BROKEN] + [(name, True) for name in WITHOUT_DISTRIBUTIONS],
)
def test_a_broken_rule_is_caught(name, one_hot):
    target = random_distributions(3, 4, 3, 6)
    draft = random_distributions(4, 4, 3, 6)
    if one_hot:
        draft = [log(np.eye(3)[table.argmax(-1)]) for table in draft]
    distribution = joint_distribution(
        BROKEN[name], target, draft, num_tokens=3, length=3, one_hot=one_hot
    )
    assert np.abs(distribution - autoregressive(target, 3)).max() > BIASED


@every_rule
def test_the_distributions_shown_must_be_those_drawn_from(rule):
    target = random_distributions(5, 4, 3, 5)
    raw = random_distributions(6, 4, 3, 5)
    draft = [log_softmax(2 * table, -1) for table in raw]
    distribution = joint_distribution(rule, target, draft, num_tokens=2, length=3, shown=raw)
    assert np.all(np.abs(distribution - autoregressive(target, 3)).max(-1) > BIASED)


@every_rule
def test_dropping_tokens_by_probability_is_biased(rule):
    target = random_distributions(7, 4, 3, 5)
    draft = random_distributions(8, 4, 3, 5)
    drop = [
        np.where(np.repeat(np.exp(draft[m]).reshape(4, 3**m, 3), 3, axis=-1) < 0.3, 0, 2)
        for m in range(3)
    ]
    distribution = joint_distribution(rule, target, draft, num_tokens=2, length=3, num_drafted=drop)
    assert np.all(np.abs(distribution - autoregressive(target, 3)).max(-1) > BIASED)


# Values in closed form.


@pytest.mark.parametrize(
    "num_tokens, token, block",
    [(2, 10 / 9, 11 / 9), (3, 38 / 27, 45 / 27), (4, 130 / 81, 166 / 81)],
)
def test_expected_accepted_equals_enumeration(num_tokens, token, block):
    target = constant([1 / 3, 2 / 3], num_tokens + 1)
    draft = constant([2 / 3, 1 / 3], num_tokens)
    for rule, expected in ((TokenRule(), token), (BlockRule(), block)):
        rounds = enumerate_round(rule, target, draft, num_tokens=num_tokens)
        assert_allclose(rounds.expected_accepted_SX, expected, atol=EXACT)
