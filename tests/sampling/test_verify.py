"""Draws of the rules in float32, at the edges.

test_rules.py enumerates the distributions; decoding/test_loop_distribution.py draws from them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.special import log_softmax

from specsamp import BlockRule, CoupledRule, Draft, TokenRule
from specsamp.sampling.rng import RoundKeys, row_keys
from support import mutants
from support.enumeration import COMPILE_FAST, Given, split

OPTIMISED = True

NUM_TOKENS = 3
ROWS, VOCAB_SIZE = 20_000, 10  # each row has its own distributions

RULES = {"token": TokenRule(), "block": BlockRule(), "coupled": CoupledRule()}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def some_keys():
    ids = jnp.arange(ROWS)
    return RoundKeys(rows_B=row_keys(20, ids, jnp.zeros_like(ids)), starts_B=3 + ids % 5)


@functools.partial(jax.jit, static_argnums=0, compiler_options=COMPILE_FAST)
def verify(rule, draft, target, keys):
    return rule.verify(draft, Given(target, draft), keys)


def hostile_distributions(rng, steps):
    """Returns distributions with excluded tokens, with tokens near and below the least float32, and
    of a single token.
    """
    shape = (ROWS, steps, VOCAB_SIZE)
    logits = rng.normal(size=shape) * rng.choice([0.3, 2, 30], size=shape[:2] + (1,))
    logits = np.where(
        rng.random(shape) < 0.2, rng.choice([-15, -87.5, -104, -1e4], size=shape), logits
    )
    stays = np.arange(VOCAB_SIZE) == rng.integers(VOCAB_SIZE, size=shape[:2] + (1,))
    return log_softmax(np.where(stays | (rng.random(shape) < 0.7), logits, -np.inf), -1).astype(
        np.float32
    )


@functools.partial(jax.jit, static_argnums=0, compiler_options=COMPILE_FAST)
def draft_each_row(rule, distributions_BKV, keys):
    """Draws tokens [B, K] from distributions that differ by row."""
    by_step = distributions_BKV.swapaxes(0, 1), jnp.arange(distributions_BKV.shape[1])
    return jax.lax.map(lambda at: rule.sample(at[0], keys, at[1]), by_step).T


@pytest.mark.parametrize("one_hot", [False, True], ids=["distributions", "one-hot"])
@every_rule
def test_verification_returns_finite_numbers(rule, one_hot):
    rng, keys = np.random.default_rng(4), some_keys()
    target = hostile_distributions(rng, NUM_TOKENS + 1)
    distributions = hostile_distributions(rng, NUM_TOKENS)
    distributions[::4] = target[::4, :NUM_TOKENS]
    tokens = np.asarray(draft_each_row(rule, distributions, keys))
    num_drafted = rng.integers(NUM_TOKENS + 1, size=ROWS).astype(np.int32)
    log_probs = None if one_hot else distributions
    if not isinstance(rule, CoupledRule):
        in_32, in_64 = (
            split(rule, tokens, num_drafted, log_probs, target, t) for t in (np.float32, np.float64)
        )
        for acceptance, residual in (in_32, in_64):
            assert np.all((acceptance >= 0) & (acceptance <= 1 + 1e-6))
            assert np.all(np.isfinite(residual) & (residual >= 0))
        assert_allclose(in_32[1], in_64[1], rtol=0, atol=1e-6)
    draft = Draft(tokens_BK=tokens, num_drafted_B=num_drafted, log_probs_BRV=log_probs)
    verdict = verify(rule, draft, target, keys)
    n = np.asarray(verdict.num_accepted_B)
    emitted = np.asarray(verdict.tokens_BT)
    assert np.all((0 <= n) & (n <= num_drafted))
    is_emitted = np.arange(NUM_TOKENS + 1) <= n[:, None]
    assert np.all(np.where(is_emitted, (0 <= emitted) & (emitted < VOCAB_SIZE), emitted == -1))
    chosen = np.take_along_axis(target, np.where(is_emitted, emitted, 0)[..., None], axis=-1)[
        ..., 0
    ]
    assert np.all(chosen[is_emitted] > -np.inf)


@every_rule
def test_equal_distributions_are_always_accepted(rule):
    distributions = hostile_distributions(np.random.default_rng(5), NUM_TOKENS + 1)
    keys = some_keys()
    draft_distributions = distributions[:, :NUM_TOKENS]
    num_drafted = np.full(ROWS, NUM_TOKENS, np.int32)
    tokens = np.asarray(draft_each_row(rule, draft_distributions, keys))
    draft = Draft(tokens_BK=tokens, num_drafted_B=num_drafted, log_probs_BRV=draft_distributions)
    assert np.all(verify(rule, draft, distributions, keys).num_accepted_B == NUM_TOKENS)
    if not isinstance(rule, CoupledRule):
        acceptance, residual = split(
            rule, tokens, num_drafted, draft_distributions, distributions, np.float32
        )
        assert np.all(acceptance == 1)
        assert np.all(residual[:, :NUM_TOKENS] == 0)


def test_residual_without_mass_is_the_target():
    """Rounding may refuse a token although both distributions are equal."""
    target = hostile_distributions(np.random.default_rng(7), NUM_TOKENS + 1)
    draft = Draft(
        tokens_BK=np.zeros((ROWS, NUM_TOKENS), np.int32),
        num_drafted_B=np.full(ROWS, NUM_TOKENS, np.int32),
        log_probs_BRV=target[:, :NUM_TOKENS],
    )
    verdict = verify(mutants.RejectAlways(), draft, target, some_keys())
    assert np.all(verdict.num_accepted_B == 0)
    chosen = np.take_along_axis(target[:, 0], np.asarray(verdict.tokens_BT)[:, :1], axis=1)
    assert np.all(chosen > -np.inf)


def test_block_prefix_of_weight_one_is_kept():
    rng = np.random.default_rng(6)
    shape = (ROWS, NUM_TOKENS, VOCAB_SIZE)
    distributions = log_softmax(rng.normal(size=shape) * rng.uniform(0, 12, size=(ROWS, 1, 1)), -1)
    best = rng.integers(VOCAB_SIZE, size=(ROWS, NUM_TOKENS + 1)).astype(np.int32)
    target = np.where(np.eye(VOCAB_SIZE)[best], 0, -np.inf)
    num_drafted = np.full(ROWS, NUM_TOKENS, np.int32)
    acceptance, _ = split(
        BlockRule(), best[:, :NUM_TOKENS], num_drafted, distributions, target, np.float32
    )
    assert np.all(acceptance == 1)
