"""The inverse-CDF draw: exhaustive sweeps of its uniforms instead of samples."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import specsamp.sampling.draw as draw_module
from specsamp.sampling.draw import BLOCK, draw

OPTIMISED = True

drawn = jax.jit(draw)
LARGEST = np.float32(1 - 2**-24)  # the largest float32 below 1
EXTREMES = np.float32([0, 2**-126, 2**-23, 0.5, 1 - 2**-23, LARGEST])
CORNERS = np.stack(np.meshgrid(EXTREMES, EXTREMES), axis=-1).reshape(-1, 2)


def positive_weights(size, seed=0, spread=2.0):
    """Returns ``[V]`` float32 weights of very different sizes, with sum 1."""
    weights = np.exp(spread * np.random.default_rng(seed).normal(size=size))
    return (weights / weights.sum()).astype(np.float32)


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 128, 129, 300, 4096, 32000])
def test_never_a_token_of_weight_zero(vocab_size):
    """Covers sparse weights of all densities and scales, at corners of the unit square and
    within.
    """
    rng, rows = np.random.default_rng(vocab_size), 24
    shape = (rows, vocab_size)
    density = np.geomspace(1 / vocab_size, 1, rows)[:, None]
    spread = rng.choice([0.1, 3, 8], size=(rows, 1))
    scale = 10 ** rng.uniform(-15, 15, (rows, 1))
    weights = np.where(
        rng.random(shape) < density, scale * np.exp(spread * rng.normal(size=shape)), 0
    )
    weights = weights.astype(np.float32)
    weights[np.arange(rows), rng.integers(vocab_size, size=rows)] = 1  # no row is all zero
    weights[:2] = np.arange(vocab_size) == [[0], [vocab_size - 1]]
    pairs = np.concatenate([CORNERS, rng.random((12, 2), np.float32)])
    on_device = jnp.asarray(weights)
    tokens = np.stack([drawn(on_device, np.broadcast_to(pair, (rows, 2))) for pair in pairs])
    assert tokens.dtype == np.int32 and tokens.min() >= 0 and tokens.max() < vocab_size
    assert (weights[np.arange(rows), tokens] > 0).all()
    assert (tokens[:, 0] == 0).all() and (tokens[:, 1] == vocab_size - 1).all()


@pytest.mark.parametrize("vocab_size", [128, 2000])
def test_parallel_sum_draws_no_zero_weight_token(vocab_size, monkeypatch):
    """A tree-shaped prefix sum, as on accelerators, may step by a rounding error at weight zero."""
    tree_sum = functools.partial(jax.lax.associative_scan, jnp.add)
    monkeypatch.setattr(
        draw_module, "jnp", types.SimpleNamespace(**{**vars(jnp), "cumsum": tree_sum})
    )
    rng, rows = np.random.default_rng(0), 5000
    weights = np.where(
        rng.random((rows, vocab_size)) < 0.3, np.exp(3 * rng.normal(size=(rows, vocab_size))), 0
    )
    # A whole block of zeros, if there are several blocks.
    weights[:, vocab_size // 2 : vocab_size // 2 + BLOCK] = 0
    weights = weights.astype(np.float32)
    cumulative = np.asarray(jax.jit(lambda x: tree_sum(x, axis=-1))(weights[:, :BLOCK]))
    assert (np.diff(cumulative) != 0)[weights[:, 1:BLOCK] == 0].any()  # the sum does step
    fresh = jax.jit(lambda *args: draw(*args))
    for uniforms in (
        rng.random((rows, 2), np.float32),
        np.full((rows, 2), LARGEST),
        np.zeros((rows, 2), np.float32),
    ):
        assert (weights[np.arange(rows), fresh(weights, uniforms)] > 0).all()


def test_a_boundary_belongs_to_the_next_token():
    """Without rounding, [0, 1/4) draws token 0, [1/4, 1/2) token 2, and [1/2, 1) token 3."""
    weights = np.float32([1, 0, 1, 2])
    pairs = np.float32([[0, 0], [0, 0.25], [0, 0.5], [0, 0.75]])
    assert_array_equal(drawn(np.broadcast_to(weights, (4, 4)), pairs), [0, 2, 3, 3])


@pytest.mark.parametrize("vocab_size", [1, 2, 5, 127, 128])
def test_distribution_of_one_block(vocab_size):
    """The second uniform sweeps a grid of 2^14; with one block, the first decides nothing."""
    points = 2**14
    weights = positive_weights(vocab_size)
    for first in (0.0, 0.4, LARGEST):
        pairs = np.stack([np.full(points, first), np.arange(points) / points], axis=-1).astype(
            np.float32
        )
        tokens = drawn(np.broadcast_to(weights, (points, vocab_size)), pairs)
        counts = np.bincount(tokens, minlength=vocab_size)
        # The two edges of a token add or miss less than one point; rounding may move one more.
        assert_allclose(counts / points, weights, atol=2 / points, rtol=0)
        assert (np.diff(tokens) >= 0).all()


@pytest.mark.parametrize("vocab_size", [129, 300, 1000])
def test_distribution_of_several_blocks(vocab_size):
    """A grid of 2^8 x 2^9 uniforms gives the distribution of blocks, and of tokens in each block.

    Weights need not be normalised: a power of two multiplies them, without rounding.
    """
    firsts, seconds = 2**8, 2**9
    weights = positive_weights(vocab_size)
    weights[-1] = 0.1  # so that the last block is drawn even if it has one token
    weights /= weights.sum()
    draw_all = jax.jit(jax.vmap(jax.vmap(draw, in_axes=(None, 0)), in_axes=(None, 0)))
    pairs = np.stack(
        np.meshgrid(np.arange(firsts) / firsts, np.arange(seconds) / seconds, indexing="ij"),
        axis=-1,
    )
    tokens = np.asarray(draw_all(8 * weights, pairs.astype(np.float32)))

    def padded(x):
        return np.pad(x, (0, -vocab_size % BLOCK)).reshape(-1, BLOCK)

    counts = padded(np.bincount(tokens.ravel(), minlength=vocab_size))
    distributions = padded(weights)
    assert_allclose(counts.sum(-1) / tokens.size, distributions.sum(-1), atol=2 / firsts, rtol=0)
    assert (counts.sum(-1) > 0).all()

    def given_block(x):
        return x / x.sum(-1, keepdims=True)

    assert_allclose(given_block(counts), given_block(distributions), atol=2 / seconds, rtol=0)
