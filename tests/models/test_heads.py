"""Medusa heads before training, and heads in the order of weights for CPUs.

checkpoints/test_heads.py and checkpoints/test_modules.py compare heads and modules with other
packages and with NumPy.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from numpy.testing import assert_array_equal

from specsamp import Pair, TransformerLM, chain, generate, temperature
from specsamp.models.cpu_weights import UNEMBEDDING
from support.extras import slow_but
from support.heads import LAYERS, dflash2, dspark, eagle1, eagle3, layer_config, medusa, mtp
from support.refusals import refused_calls
from support.weights import drawn_params

V, D = 16, 8
HEADS = {
    "EAGLE-1": eagle1,
    "EAGLE-3": functools.partial(eagle3, draft_vocab_size=V // 2),
    "MTP": functools.partial(mtp, own_output=True),
    "DFlash 2": functools.partial(dflash2, own_output=True),
    "DSpark": dspark,
    "Medusa": functools.partial(medusa, num_heads=3),
}


def test_new_head_with_target_output_equals_target():
    """A new residual block adds nothing."""
    head = medusa(V, 2, own_output=False)
    weights = head.prepare(head.init(jax.random.key(0)))
    hidden = jnp.ones((1, 1, D))
    assert_array_equal(head.logits(weights, hidden, lambda x_BTD: x_BTD, 1), hidden)


@pytest.mark.parametrize("weight_dtype", slow_but([None, "int8"], None), ids=str)
@pytest.mark.parametrize("kind", slow_but(HEADS, "EAGLE-3"))
def test_drafts_do_not_depend_on_the_weight_order(kind, weight_dtype):
    head = HEADS[kind](V)
    layer = dataclasses.replace(head.config.layer, weight_dtype=weight_dtype)
    head = dataclasses.replace(head.config, layer=layer).head()
    config = layer_config(V, num_layers=LAYERS)
    params, texts = drawn_params(TransformerLM(config)), []
    for order in ("default", "cpu"):
        target = TransformerLM(config, order)
        pair = Pair(
            target=target, target_params=params, head=head, draft_params=drawn_params(head, 1)
        )
        found = generate(
            pair, [[1, 2, 3], [4, 5]], 24, sampling=chain(temperature(1.0)), draft_length=3, stop=[]
        )
        texts.append([(text.tokens, text.stats.accepted) for text in found])
    assert texts[0] == texts[1]
    turned = head.to_cpu_order(head.prepare(drawn_params(head)))["params"]
    assert (UNEMBEDDING in turned) == (head.config.own_output and kind != "Medusa")


test_refused_head_configs = refused_calls(
    {
        r"hidden_layers \(6,\); got \(2,\)": lambda: medusa(V, 2, hidden_layers=(2,)),
        "num_heads must be an integer >= 1.*got 0": lambda: medusa(V, 0),
        r"reads one hidden state; got hidden_layers \(0, 1\)": lambda: mtp(V, hidden_layers=(0, 1)),
    }
)
