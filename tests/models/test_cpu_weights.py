"""Matrices as a CPU multiplies by them: of int8 ones a block at a time is widened."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp.models import products
from specsamp.models.config import tiny
from specsamp.models.int8 import Int8Blocks, Int8Weight, dequantise, is_int8, quantise
from specsamp.models.transformer import TransformerLM
from support.weights import drawn_params

OPTIMISED = True

GATES = tiny(positions="rotary", gated=True, feedforward_bias=True, num_layers=1, feedforward_width=48)


def weight_and_rows(shape):
    weight = jax.tree.map(jnp.asarray, quantise(np.random.default_rng(0).normal(size=shape).astype(np.float32), (0,)))
    return weight, jax.random.normal(jax.random.key(0), (2, 3, shape[0]))


# Even blocks, a rest behind them, one row a block because a row is larger than a block, columns, and one block.
@pytest.mark.parametrize("shape", [(64, 8), (37, 11), (8, 100), (3, 100), (8, 8)])
def test_blocks_sum_to_the_product(shape, monkeypatch):
    monkeypatch.setattr(products, "WIDENED_ENTRIES", 64)
    weight, x_BTD = weight_and_rows(shape)
    exact = np.asarray(x_BTD, np.float64) @ np.asarray(dequantise(weight), np.float64)

    def product(weight):
        return products.contract("BTD,DF->BTF", x_BTD, weight)

    found = product(Int8Blocks(weight.values, weight.scale))
    np.testing.assert_allclose(found, exact, atol=1e-4)
    turned = Int8Blocks(jnp.flip(weight.values, axis=0), weight.scale)
    assert np.abs(product(turned) - exact).max() > 0.1  # each row meets its own


def test_no_program_of_a_cpu_holds_a_large_int8_matrix_in_float():
    """Counted in a loop, as decoding is one; the control is the same matrix widened whole."""
    weight, x_BTD = weight_and_rows((1024, 4096))
    whole = 4 * weight.size

    def temporaries(weight):
        def step(_, x_BTD):
            return products.contract("BTD,DF->BTF", x_BTD, weight)[..., :1024]

        program = jax.jit(lambda weight, x_BTD: jax.lax.fori_loop(0, 3, step, x_BTD)).lower(weight, x_BTD)
        return program.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(Int8Blocks(weight.values, weight.scale)) < whole / 3
    assert temporaries(weight) >= whole


def test_only_the_order_of_cpus_has_blocks():
    config = dataclasses.replace(GATES, weight_dtype="int8")
    for order, kind in (("cpu", Int8Blocks), ("default", Int8Weight)):
        weights = TransformerLM(config, order).prepare(drawn_params(TransformerLM(config)))
        kinds = {type(leaf) for leaf in jax.tree.leaves(weights, is_leaf=is_int8) if is_int8(leaf)}
        assert kinds == {kind}
