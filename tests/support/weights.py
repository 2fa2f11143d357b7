"""Random parameters for tests that need no particular values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.models.assistant import CLUSTERS
from specsamp.models.heads import DRAFT_IDS


@functools.lru_cache
def shapes_of(model):
    """Returns the shapes of a model's parameters."""
    return jax.eval_shape(model.init, jax.random.key(0))


def _fan_in(name, shape):
    """Returns the approximate number of terms of a sum over this weight."""
    if name == "output" and len(shape) == 3:
        return 2 * shape[0] * shape[1]
    return shape[-1] if name.endswith("embedding") or name == "output" else shape[-2 % len(shape)]


def drawn_params(model, seed=0, noise=0.0):
    """Returns parameters with the distribution of `init`, drawn by NumPy: this saves compilation,
    which takes a second a shape.

    Args:
      model: a transformer or a head.
      seed: of all numbers.
      noise: the standard deviation of noise on all parameters, scales and biases too.
    """
    random = np.random.default_rng(seed)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if name == DRAFT_IDS:
            return jnp.arange(leaf.shape[0], dtype=leaf.dtype)
        if name == CLUSTERS:  # pairs
            return jnp.arange(leaf.shape[0], dtype=leaf.dtype) // 2
        values = random.normal(size=leaf.shape) * _fan_in(name, leaf.shape) ** -0.5
        if len(leaf.shape) == 1:
            values = np.full(leaf.shape, float(name == "scale"))
        return jnp.asarray(values + noise * random.normal(size=leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes_of(model))
