"""Medusa heads before training.

checkpoints/test_heads.py and checkpoints/test_modules.py compare heads and modules with other
packages and with NumPy.
"""

import jax
import jax.numpy as jnp
from numpy.testing import assert_array_equal

from support.heads import medusa

V, D = 16, 8


def test_new_head_with_target_output_equals_target():
    """A new residual block adds nothing."""
    head = medusa(V, 2, own_output=False)
    weights, hidden = head.prepare(head.init(jax.random.key(0))), jnp.ones((1, 1, D))
    assert_array_equal(head.logits(weights, hidden, lambda x_BTD: x_BTD, 1), hidden)
