"""What the rules draw, in float32: against the enumerated distributions, on known vectors, at the
edges.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from scipy.special import log_softmax

from specsamp.sampling.coupled import CoupledRule
from specsamp.sampling.rejection import BlockRule, TokenRule
from specsamp.sampling.rng import Purpose, RoundKeys, row_keys
from specsamp.sampling.rules import Draft
from support import mutants
from support.distributions import random_distributions
from support.enumeration import COMPILE_FAST, Given, autoregressive, enumerate_round, split

OPTIMISED = True

ROWS = 200_000
NUM_TOKENS = 3
VOCAB_SIZE = 3
FEW_ROWS, WIDE_VOCAB_SIZE = 20_000, 10  # where each row has distributions of its own
ALARM = 1e-6  # p-value: no false alarm in a million runs

RULES = {"token": TokenRule(), "block": BlockRule(), "coupled": CoupledRule()}
enumerable_rules = pytest.mark.parametrize(
    "rule", [TokenRule(), BlockRule()], ids=["token", "block"]
)
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def some_keys(rows, keys=RoundKeys):
    ids = jnp.arange(rows)
    return keys(rows_B=row_keys(20, ids, jnp.zeros_like(ids)), starts_B=3 + ids % 5)


def draw_with(rule, keys, distribution_BV, *, node, depth):
    return rule.sample(distribution_BV, keys, node=node, depth=depth)


def drafted(draw, distributions_KXV, rows):
    """Draws K tokens per row: the index of each draft among all, its tokens and the distributions
    it was drawn from.
    """
    num_tokens, _, vocab_size = distributions_KXV.shape

    def step(index_B, at):
        offset, distributions_XV = at
        distribution_BV = distributions_XV[index_B]
        tokens_B = draw(distribution_BV, node=offset, depth=offset)
        return index_B * vocab_size + tokens_B, (tokens_B, distribution_BV)

    index_B, rest = jax.lax.scan(
        step, jnp.zeros(rows, jnp.int32), (jnp.arange(num_tokens), distributions_KXV)
    )
    return index_B, *(x.swapaxes(0, 1) for x in rest)


@functools.partial(jax.jit, static_argnames=("rule", "drafted_by", "keys", "one_hot"))
def drawn(rule, target_TXV, draft_KXV, stop_D, *, drafted_by, keys, one_hot):
    """Drafts and verifies one round in ROWS rows; counts [draft, n, appended token]."""
    num_tokens, _, vocab_size = draft_KXV.shape
    round_keys = some_keys(ROWS, keys)
    index_B, tokens_BK, distributions_BKV = drafted(
        functools.partial(draw_with, drafted_by, round_keys), draft_KXV, ROWS
    )
    log_probs_BRV = None if one_hot else distributions_BKV
    draft = Draft(tokens_BK=tokens_BK, num_drafted_B=stop_D[index_B], log_probs_BRV=log_probs_BRV)
    scored = [
        target_TXV[i][index_B // vocab_size ** (num_tokens - i)] for i in range(num_tokens + 1)
    ]
    verdict = rule.verify(draft, Given(jnp.stack(scored, axis=1), draft), round_keys)
    n_B1 = verdict.num_accepted_B[:, None]
    last_B = jnp.take_along_axis(verdict.tokens_BT, n_B1, axis=1)[:, 0]
    positions = jnp.arange(num_tokens + 1)[None, :]
    accepted = jnp.where(positions < n_B1, jnp.pad(tokens_BK, ((0, 0), (0, 1))), -1)
    well_formed = jnp.all(
        verdict.tokens_BT == jnp.where(positions == n_B1, last_B[:, None], accepted)
    )
    cell_B = (index_B * (num_tokens + 1) + n_B1[:, 0]) * vocab_size + last_B
    shape = (vocab_size**num_tokens, num_tokens + 1, vocab_size)
    return jnp.bincount(cell_B, length=np.prod(shape)).reshape(shape), well_formed


def side_by_side(distributions):
    """Returns the scenario's tables, [steps, X, V] float32; short prefixes leave rows unused."""
    tables = [table[0].astype(np.float32) for table in distributions]
    return np.stack(
        [np.pad(table, ((0, len(tables[-1]) - len(table)), (0, 0))) for table in tables]
    )


def count(rule, target, draft, *, stop=None, drafted_by=None, keys=RoundKeys, one_hot=False):
    stop = len(draft) if stop is None else stop
    counts, well_formed = drawn(
        rule,
        side_by_side(target),
        side_by_side(draft),
        np.broadcast_to(np.int32(stop), draft[0].shape[-1] ** len(draft)),
        drafted_by=drafted_by or rule,
        keys=keys,
        one_hot=one_hot,
    )
    assert well_formed
    return np.asarray(counts)


def enumerated(rule, target, draft, *, stop=None, one_hot=False):
    stop = len(draft) if stop is None else stop
    rounds = enumerate_round(
        rule, target, draft, num_tokens=len(draft), num_drafted=stop, one_hot=one_hot
    )
    return rounds.joint_SXDNV[0, 0]


def p_value(counts, distribution):
    """Returns the chi-square p-value, with rare cells pooled; 0 after an impossible event."""
    np.testing.assert_allclose(distribution.sum(), 1, atol=1e-9)
    expected, counts = distribution.ravel() * counts.sum(), counts.ravel()
    if np.any(counts[expected < 1e-9] > 0):
        return 0.0
    rare = expected < 10

    def pool(x):
        return np.append(x[~rare], x[rare].sum())

    counts, expected = pool(counts), pool(expected)
    keep = expected > 1e-9
    return scipy.stats.chisquare(counts[keep], expected[keep], sum_check=False).pvalue


@functools.partial(jax.jit, static_argnums=0, compiler_options=COMPILE_FAST)
def verify(rule, draft, target, keys):
    return rule.verify(draft, Given(target, draft), keys)


def hostile_distributions(rng, steps):
    """Distributions with excluded tokens, tokens near and below the least float32, and
    distributions of a single token.
    """
    shape = (FEW_ROWS, steps, WIDE_VOCAB_SIZE)
    logits = rng.normal(size=shape) * rng.choice([0.3, 2, 30], size=shape[:2] + (1,))
    logits = np.where(
        rng.random(shape) < 0.2, rng.choice([-15, -87.5, -104, -1e4], size=shape), logits
    )
    stays = np.arange(WIDE_VOCAB_SIZE) == rng.integers(WIDE_VOCAB_SIZE, size=shape[:2] + (1,))
    return log_softmax(np.where(stays | (rng.random(shape) < 0.7), logits, -np.inf), -1).astype(
        np.float32
    )


@functools.partial(jax.jit, static_argnums=0, compiler_options=COMPILE_FAST)
def draft_each_row(rule, distributions_BKV, keys):
    """Draws tokens [B, K] from distributions that differ by row."""
    draw = functools.partial(draw_with, rule, keys)
    by_step = distributions_BKV.swapaxes(0, 1), jnp.arange(distributions_BKV.shape[1])
    return jax.lax.map(lambda at: draw(at[0], node=at[1], depth=at[1]), by_step).T


TARGET, DRAFT = (random_distributions(i, 1, VOCAB_SIZE, NUM_TOKENS + 1 - i) for i in (0, 1))
ONE_HOT = [np.where(np.eye(VOCAB_SIZE)[table.argmax(-1)], 0, -np.inf) for table in DRAFT]
FIRST, SECOND = np.arange(27) // 9, np.arange(27) // 3 % 3
STOP = np.where(FIRST == 0, 1, np.where(SECOND == 1, 2, 3))  # decided by what is drafted

SETTINGS = {
    "distributions": {"draft": DRAFT},
    "distributions, ragged": {"draft": DRAFT, "stop": STOP},
    "one-hot": {"draft": ONE_HOT, "one_hot": True},
    "nothing": {"draft": DRAFT, "stop": 0},
}


# Draws against distributions.


@pytest.mark.parametrize("setting", SETTINGS)
@enumerable_rules
def test_verify_draws_the_enumerated_distribution(rule, setting):
    setting = SETTINGS[setting]
    assert p_value(count(rule, TARGET, **setting), enumerated(rule, TARGET, **setting)) > ALARM


class AcceptReusesDraftNoise(RoundKeys):
    def uniforms(self, purpose, offsets_BT):
        if purpose != Purpose.ACCEPT:
            return super().uniforms(purpose, offsets_BT)
        # A small vocabulary uses the second.
        return super().uniforms(Purpose.DRAFT, offsets_BT)[..., ::-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule, mistake",
    [
        (TokenRule(), {"rule": mutants.AcceptAlways()}),
        (
            BlockRule(),
            {"rule": mutants.broken(BlockRule, acceptance=mutants.AcceptAlways.acceptance)},
        ),
        (BlockRule(), {"rule": mutants.StopsAtTheFirstRefusal()}),
        (BlockRule(), {"rule": TokenRule(), "drafted_by": TokenRule()}),
        (TokenRule(), {"keys": mutants.SharedNoise}),
        (TokenRule(), {"keys": AcceptReusesDraftNoise}),
    ],
)
def test_a_mistake_is_caught(rule, mistake):
    arguments = {"rule": rule, "target": TARGET, "draft": DRAFT, "drafted_by": rule} | mistake
    assert p_value(count(**arguments), enumerated(rule, TARGET, DRAFT)) < ALARM


def test_a_residual_without_mass_falls_back_to_the_target():
    counts = count(mutants.RejectAlways(), TARGET, TARGET[:-1])
    assert counts[:, 1:].sum() == 0
    distribution = enumerated(TokenRule(), TARGET, TARGET[:-1]).sum((1, 2))[:, None] * np.exp(
        TARGET[0][0]
    )
    assert p_value(counts[:, 0], distribution) > ALARM


# The coupled rule: the target's own choices, which follow its distribution.


class SameNoiseEverywhere(RoundKeys):
    def position_gumbels(self, offset, vocab_size):
        return super().position_gumbels(0, vocab_size)


def test_choices_of_the_coupled_rule_follow_the_distributions():
    """Expects three tokens in turn; the control has the same noise at every position."""

    def counts(keys):
        draw = functools.partial(draw_with, CoupledRule(), some_keys(ROWS, keys))
        return np.bincount(drafted(draw, side_by_side(TARGET[:NUM_TOKENS]), ROWS)[0], minlength=27)

    distribution = autoregressive(TARGET, NUM_TOKENS)[0]
    assert p_value(counts(RoundKeys), distribution) > ALARM
    assert p_value(counts(SameNoiseEverywhere), distribution) < ALARM


def test_coupled_rule_emits_the_targets_own_choices():
    rng, keys = np.random.default_rng(3), some_keys(FEW_ROWS)
    target, distributions = (
        hostile_distributions(rng, NUM_TOKENS + 1),
        hostile_distributions(rng, NUM_TOKENS),
    )
    own = np.asarray(draft_each_row(CoupledRule(), target, keys))
    guesses = rng.integers(WIDE_VOCAB_SIZE, size=(FEW_ROWS, NUM_TOKENS))
    tokens = np.where(rng.random(guesses.shape) < 0.7, own[:, :NUM_TOKENS], guesses).astype(
        np.int32
    )
    for log_probs in (None, distributions):
        num_drafted = rng.integers(NUM_TOKENS + 1, size=FEW_ROWS).astype(np.int32)
        draft = Draft(tokens_BK=tokens, num_drafted_B=num_drafted, log_probs_BRV=log_probs)
        verdict = verify(CoupledRule(), draft, target, keys)
        agrees = (tokens == own[:, :NUM_TOKENS]) & (np.arange(NUM_TOKENS) < num_drafted[:, None])
        np.testing.assert_array_equal(verdict.num_accepted_B, np.cumprod(agrees, axis=1).sum(1))
        emitted = np.arange(NUM_TOKENS + 1) < np.asarray(verdict.num_emitted_B)[:, None]
        np.testing.assert_array_equal(verdict.tokens_BT, np.where(emitted, own, -1))


# Known vectors and edges.

VECTORS = [  # drafted, the target's argmax, emitted: as other implementations test it
    ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),
    ([1, 2, 3], [1, 5, 3, 4], [1, 5, -1, -1]),
    ([1, 2], [1, 2, 5], [1, 2, 5]),
    ([3], [3, 4], [3, 4]),
    ([], [5], [5]),
    ([1], [2, 3], [2, -1]),
    ([1, 2, 3], [1, 2, 7, 6], [1, 2, 7, -1]),
    ([4, 5, 6], [4, 8, 6, 9], [4, 8, -1, -1]),
]


@pytest.mark.parametrize("distributions", ["none", "written out", "soft"])
@every_rule
def test_greedy_targets(rule, distributions):
    often = FEW_ROWS // len(VECTORS)

    def pad(vector, width, value):
        return vector + [value] * (width - len(vector))

    def column(i, *to):
        return np.tile(np.array([pad(row[i], *to) for row in VECTORS], np.int32), (often, 1))

    def one_hot(tokens):
        return np.where(np.eye(WIDE_VOCAB_SIZE)[tokens], 0, -np.inf).astype(np.float32)

    tokens_BK, argmax_BT, emitted_BT = column(0, 3, 0), column(1, 4, 0), column(2, 4, -1)
    soft = np.full(tokens_BK.shape + (WIDE_VOCAB_SIZE,), -np.log(WIDE_VOCAB_SIZE), np.float32)
    draft = Draft(
        tokens_BK=tokens_BK,
        num_drafted_B=np.tile(np.array([len(row[0]) for row in VECTORS], np.int32), often),
        log_probs_BRV={"none": None, "written out": one_hot(tokens_BK), "soft": soft}[
            distributions
        ],
    )
    verdict = verify(rule, draft, one_hot(argmax_BT), some_keys(FEW_ROWS))
    np.testing.assert_array_equal(verdict.tokens_BT, emitted_BT)
    np.testing.assert_array_equal(verdict.num_emitted_B, (emitted_BT >= 0).sum(-1))


@pytest.mark.parametrize("one_hot", [False, True], ids=["distributions", "one-hot"])
@every_rule
def test_nothing_but_numbers_comes_out(rule, one_hot):
    rng, keys = np.random.default_rng(4), some_keys(FEW_ROWS)
    target, distributions = (
        hostile_distributions(rng, NUM_TOKENS + 1),
        hostile_distributions(rng, NUM_TOKENS),
    )
    distributions[::4] = target[::4, :NUM_TOKENS]
    tokens = np.asarray(draft_each_row(rule, distributions, keys))
    num_drafted = rng.integers(NUM_TOKENS + 1, size=FEW_ROWS).astype(np.int32)
    log_probs = None if one_hot else distributions
    if not isinstance(rule, CoupledRule):
        in_32, in_64 = (
            split(rule, tokens, num_drafted, log_probs, target, t) for t in (np.float32, np.float64)
        )
        for acceptance, residual in (in_32, in_64):
            assert np.all((acceptance >= 0) & (acceptance <= 1 + 1e-6))
            assert np.all(np.isfinite(residual) & (residual >= 0))
        np.testing.assert_allclose(in_32[1], in_64[1], rtol=0, atol=1e-6)
    draft = Draft(tokens_BK=tokens, num_drafted_B=num_drafted, log_probs_BRV=log_probs)
    verdict = verify(rule, draft, target, keys)
    n, emitted = np.asarray(verdict.num_accepted_B), np.asarray(verdict.tokens_BT)
    assert np.all((0 <= n) & (n <= num_drafted))
    is_emitted = np.arange(NUM_TOKENS + 1) <= n[:, None]
    assert np.all(np.where(is_emitted, (0 <= emitted) & (emitted < WIDE_VOCAB_SIZE), emitted == -1))
    chosen = np.take_along_axis(target, np.where(is_emitted, emitted, 0)[..., None], axis=-1)[
        ..., 0
    ]
    assert np.all(chosen[is_emitted] > -np.inf)


@every_rule
def test_equal_distributions_are_accepted_whatever_the_noise(rule):
    distributions, keys = (
        hostile_distributions(np.random.default_rng(5), NUM_TOKENS + 1),
        some_keys(FEW_ROWS),
    )
    draft_distributions, num_drafted = (
        distributions[:, :NUM_TOKENS],
        np.full(FEW_ROWS, NUM_TOKENS, np.int32),
    )
    tokens = np.asarray(draft_each_row(rule, draft_distributions, keys))
    draft = Draft(tokens_BK=tokens, num_drafted_B=num_drafted, log_probs_BRV=draft_distributions)
    assert np.all(verify(rule, draft, distributions, keys).num_accepted_B == NUM_TOKENS)
    if not isinstance(rule, CoupledRule):
        acceptance, residual = split(
            rule, tokens, num_drafted, draft_distributions, distributions, np.float32
        )
        assert np.all(acceptance == 1)
        assert np.all(residual[:, :NUM_TOKENS] == 0)


def test_a_block_prefix_of_weight_one_is_kept_for_sure():
    rng = np.random.default_rng(6)
    shape = (FEW_ROWS, NUM_TOKENS, WIDE_VOCAB_SIZE)
    distributions = log_softmax(
        rng.normal(size=shape) * rng.uniform(0, 12, size=(FEW_ROWS, 1, 1)), -1
    )
    best = rng.integers(WIDE_VOCAB_SIZE, size=(FEW_ROWS, NUM_TOKENS + 1)).astype(np.int32)
    target = np.where(np.eye(WIDE_VOCAB_SIZE)[best], 0, -np.inf)
    num_drafted = np.full(FEW_ROWS, NUM_TOKENS, np.int32)
    acceptance, _ = split(
        BlockRule(), best[:, :NUM_TOKENS], num_drafted, distributions, target, np.float32
    )
    assert np.all(acceptance == 1)
