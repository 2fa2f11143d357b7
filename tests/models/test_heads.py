"""Medusa heads before training.

checkpoints/test_heads.py and checkpoints/test_modules.py compare heads and modules with other
packages and with NumPy.
"""

import jax
import jax.numpy as jnp
from numpy.testing import assert_array_equal

from support.heads import medusa, mtp
from support.refusals import refused_calls

V, D = 16, 8


def test_new_head_with_target_output_equals_target():
    """A new residual block adds nothing."""
    head = medusa(V, 2, own_output=False)
    weights = head.prepare(head.init(jax.random.key(0)))
    hidden = jnp.ones((1, 1, D))
    assert_array_equal(head.logits(weights, hidden, lambda x_BTD: x_BTD, 1), hidden)


test_refused_head_configs = refused_calls(
    {
        r"hidden_layers \(6,\); got \(2,\)": lambda: medusa(V, 2, hidden_layers=(2,)),
        "num_heads must be an integer >= 1.*got 0": lambda: medusa(V, 0),
        r"reads one hidden state; got hidden_layers \(0, 1\)": lambda: mtp(V, hidden_layers=(0, 1)),
    }
)
