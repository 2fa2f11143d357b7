"""Medusa heads against the formula, in NumPy and float64; the switches of modules for multi-token
prediction.

The module itself is compared with NumPy in checkpoints/test_golden.py, EAGLE's
heads in checkpoints/test_heads.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from support.heads import medusa
from support.weights import drawn_params

V, D = 16, 8


@pytest.mark.parametrize("bias", [False, True])
def test_medusa_is_the_formula(bias):
    """Head k: ``output (h + SiLU(linear h + bias))``, also where the offset is only known on the
    device.
    """
    head, hidden = medusa(V, 3, bias=bias), np.random.default_rng(0).normal(size=(1, 4, D))
    params = drawn_params(head, noise=0.5)
    weights, given = head.prepare(params), jnp.asarray(hidden, jnp.float32)
    features, cache = head(weights, jnp.zeros((1, 4, D)), head.fuse(weights, (given,)), None, ())
    assert cache == head.init_cache(1, 8) == ()
    logits = jax.jit(lambda offset: head.logits(weights, features, None, offset))
    for k in range(3):
        of_head = jax.tree.map(lambda x: np.asarray(x, np.float64), params[f"head_{k}"])
        y = hidden @ of_head["linear"] + of_head.get("bias", 0)
        expected = (hidden + y / (1 + np.exp(-y))) @ of_head["output"].T
        assert_allclose(head.logits(weights, features, None, k), expected, atol=1e-5)
        assert_allclose(logits(k), expected, atol=1e-5)


def test_new_heads_that_share_the_targets_output_say_what_the_target_says():
    """Their residual blocks add nothing at first."""
    head = medusa(V, 2, own_output=False)
    weights, hidden = head.prepare(head.init(jax.random.key(0))), jnp.ones((1, 1, D))
    assert_array_equal(head.logits(weights, hidden, lambda x_BTD: x_BTD, 1), hidden)
