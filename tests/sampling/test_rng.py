"""Addressed randomness: the address determines the number, and every part of it counts."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

from specsamp.sampling.rng import Purpose, RoundKeys, row_keys

SEED = 11


@functools.partial(jax.jit, static_argnums=0)
def uniforms(seed, prompts_B, samples_B, starts_B, offsets_BT, purpose):
    keys = RoundKeys(rows_B=row_keys(seed, prompts_B, samples_B), starts_B=starts_B)
    return keys.uniforms(purpose, offsets_BT)


@functools.partial(jax.jit, static_argnums=(0, 5))
def position_gumbels(seed, prompts_B, samples_B, starts_B, offset, vocab_size=9):
    keys = RoundKeys(rows_B=row_keys(seed, prompts_B, samples_B), starts_B=starts_B)
    return keys.position_gumbels(offset, vocab_size)


def ids(*values):
    return jnp.asarray(values, jnp.int32)


PROMPTS = ids(3, 3, 0, 900_000)
SAMPLES = ids(0, 1, 1, 7)
STARTS = ids(5, 5, 17, 2000)
OFFSETS = jnp.broadcast_to(jnp.arange(6), (4, 6))


def test_every_part_of_the_address_counts():
    """No two of 648 addresses share a number, even if their parts are exchanged."""
    seeds, purposes = (0, 1), tuple(Purpose)
    prompts, samples, starts = (
        ids(*column) for column in zip(*itertools.product(range(3), repeat=3), strict=True)
    )
    offsets = jnp.broadcast_to(jnp.arange(4), (27, 4))
    numbers = np.stack(
        [
            uniforms(seed, prompts, samples, starts, offsets, purpose)
            for seed, purpose in itertools.product(seeds, purposes)
        ]
    ).reshape(-1, 2)
    assert len(numbers) == 2 * 3 * 27 * 4
    # 46 bits: a chance of 1e-8 that two agree.
    assert len(np.unique(numbers, axis=0)) == len(numbers)
    assert (numbers[:, 0] != numbers[:, 1]).all()


def test_uniforms_are_uniform():
    """Mean, variance and correlation match independent draws, within five standard deviations."""
    rows, columns = 200, 400
    offsets = jnp.broadcast_to(jnp.arange(columns), (rows, columns))
    prompts = jnp.arange(rows)
    numbers = np.asarray(
        uniforms(SEED, prompts, prompts % 3, prompts + 9, offsets, Purpose.ACCEPT), np.float64
    )
    assert numbers.shape == (rows, columns, 2)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert numbers.min() < 1e-3 and numbers.max() > 1 - 1e-3
    count = rows * columns
    assert_allclose(numbers.mean((0, 1)), 0.5, atol=5 * np.sqrt(1 / 12 / count))
    assert_allclose(numbers.var((0, 1)), 1 / 12, atol=5 * np.sqrt(1 / 180 / count))
    assert abs(np.corrcoef(numbers[..., 0].ravel(), numbers[..., 1].ravel())[0, 1]) < 5 / np.sqrt(
        count
    )
    neighbours = np.corrcoef(numbers[:, :-1, 0].ravel(), numbers[:, 1:, 0].ravel())[0, 1]
    assert abs(neighbours) < 5 / np.sqrt(count)


def test_position_gumbels_depend_on_the_absolute_position_only():
    first = position_gumbels(SEED, PROMPTS, SAMPLES, STARTS, 0)
    for offset in (1, 4):
        assert_array_equal(position_gumbels(SEED, PROMPTS, SAMPLES, STARTS - offset, offset), first)
    moved = ids(0, 1, 0, 5)  # one offset per row
    assert_array_equal(position_gumbels(SEED, PROMPTS, SAMPLES, STARTS - moved, moved), first)


def test_position_gumbels_differ_between_seeds_rows_and_positions():
    rows = ids(1, 1, 2, 1), ids(0, 1, 0, 0), ids(5, 5, 5, 6)
    gumbels = [position_gumbels(seed, *rows, 0) for seed in (SEED, SEED + 1)]
    assert gumbels[0].shape == (4, 9) and gumbels[0].dtype == jnp.float32
    assert len(np.unique(gumbels)) == 2 * 4 * 9


NUM_DRAWS = 400_000


@pytest.fixture(scope="module")
def gumbels():
    """Returns the noise of 400,000 positions of one row, ``[400000, 4]``."""
    same = jnp.zeros((NUM_DRAWS,), jnp.int32)
    return np.asarray(position_gumbels(SEED, same, same, jnp.arange(NUM_DRAWS), 0, 4))


def chi_square(noise, sampled, expected):
    counts = np.bincount(np.argmax(np.log(sampled) + noise, axis=-1), minlength=4)
    return stats.chisquare(counts, expected * NUM_DRAWS).statistic


def test_argmax_with_gumbels_draws_from_the_distribution(gumbels):
    distribution = np.array([0.6, 0.3, 0.09, 0.01])
    limit = stats.chi2.isf(1e-6, df=3)
    assert chi_square(gumbels, distribution, distribution) < limit
    # Controls: a distribution off by 0.01, and noise that is not Gumbel.
    assert chi_square(gumbels, np.array([0.61, 0.29, 0.09, 0.01]), distribution) > limit
    assert (
        chi_square(
            np.random.default_rng(0).logistic(size=gumbels.shape), distribution, distribution
        )
        > limit
    )


def test_gumbels_have_a_fine_upper_tail(gumbels):
    """With one word, exp(-gumbel) is a multiple of 2^-23 there: no token below 1e-7 is drawn."""

    def distance_to_grid(numbers):
        tail = np.exp(-numbers[numbers > 9].astype(np.float64)) * 2**23
        assert len(tail) > 100
        return np.abs(tail - np.round(tail)).mean()

    one_word = jax.random.gumbel(jax.random.key(0), gumbels.shape, jnp.float32, mode="low")
    assert distance_to_grid(np.asarray(one_word)) < 0.1
    assert distance_to_grid(gumbels) > 0.2  # 1/4 when the tail is continuous
