"""Medusa heads against the formula, in NumPy and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.heads import medusa

V, D = 16, 8


def by_formula(params, hidden):
    """Head k: ``output (h + SiLU(linear h + bias))``."""
    y = hidden @ params["linear"] + params.get("bias", 0)
    return (hidden + y / (1 + np.exp(-y))) @ params["output"].T


def random_head(**changes):
    head, rng = medusa(V, 3, **changes), np.random.default_rng(0)
    shapes = jax.eval_shape(head.init, jax.random.key(0))
    params = jax.tree.map(lambda x: rng.normal(size=x.shape) * 0.5, shapes)
    weights = head.prepare(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params))
    return head, params, weights, rng.normal(size=(1, 4, D))


@pytest.mark.parametrize("bias", [False, True])
def test_the_formula(bias):
    """Also where the offset is only known on the device; what a call returns is what it was given."""
    head, params, weights, hidden = random_head(bias=bias)
    features, cache = head(
        weights, jnp.zeros((1, 4, D)), head.fuse(weights, (jnp.asarray(hidden, jnp.float32),)), None, ()
    )
    assert cache == head.init_cache(1, 8) == ()
    logits = jax.jit(lambda offset: head.logits(weights, features, None, offset))
    for k in range(3):
        expected = by_formula(params[f"head_{k}"], hidden)
        np.testing.assert_allclose(head.logits(weights, features, None, k), expected, atol=1e-5)
        np.testing.assert_allclose(logits(k), expected, atol=1e-5)


def test_new_heads_that_share_the_targets_output_say_what_the_target_says():
    """Their residual blocks add nothing at first."""
    head = medusa(V, 2, own_output=False)
    weights, hidden = head.prepare(head.init(jax.random.key(0))), jnp.ones((1, 1, D))
    np.testing.assert_array_equal(head.logits(weights, hidden, lambda x_BTD: x_BTD, 1), hidden)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_layers": (2,)}, r"the stream after the final norm, hidden_layers \(6,\); got \(2,\)"),
        ({"num_heads": 0}, "num_heads must be an integer >= 1.*got 0"),
    ],
)
def test_shapes_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        medusa(V, **({"num_heads": 2} | changes))
