"""Draws a token from weights by inverse CDF, with a two-level cumulative sum.

The vocabulary is cut into blocks. The first of a draw's two uniforms chooses a block by the block
sums, the second a token within it. A float32 uniform has 23 random bits: a single uniform for the
whole vocabulary would round every token's probability to a multiple of 2^-23, together an error of
up to V * 2^-24 in total variation; two keep 23 bits *per level* (tests/sampling/test_draw.py
measures both). Gumbel noise needs a random number per token of the vocabulary, so only the coupled
rule uses it.
"""

import jax
import jax.numpy as jnp

from specsamp.arrays import pad_axis

Array = jax.Array

BLOCK = 128  # tokens per block: the lane width of a TPU


def draw(weights: Array, uniforms: Array) -> Array:
    """Draws a token with probability ``weights / sum(weights)``.

    Args:
      weights: ``[..., V]``, not negative, not all zero; need not be normalised.
      uniforms: ``[..., 2]`` in [0, 1): for the block, and for the token within it.

    Returns:
      ``[...]`` int32; never a token of weight zero, however the sums round.
    """
    vocab_size = weights.shape[-1]
    size = min(BLOCK, vocab_size)
    count = -(-vocab_size // size)
    padded = pad_axis(weights, count * size - vocab_size)
    blocks = padded.reshape(weights.shape[:-1] + (count, size))
    block = _invert(blocks.sum(-1), uniforms[..., 0])
    within = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return (block * size + _invert(within, uniforms[..., 1])).astype(jnp.int32)


def _invert(weights: Array, uniform: Array) -> Array:
    """Returns the first index whose cumulative weight exceeds ``uniform * total``; one level of
    `draw`.
    """
    cumulative = jnp.cumsum(weights, axis=-1)
    # A parallel prefix sum may step by a rounding error where the weight is zero: test both.
    beyond = (cumulative > uniform[..., None] * cumulative[..., -1:]) & (weights > 0)
    last = weights.shape[-1] - 1 - jnp.argmax(jnp.flip(weights > 0, -1), axis=-1)
    return jnp.where(beyond.any(-1), jnp.argmax(beyond, axis=-1), last)
