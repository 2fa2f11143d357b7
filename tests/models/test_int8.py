"""Weights in int8: scales on outputs, table rows, and logits of the rounded weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from specsamp.models.config import tiny
from specsamp.models.eagle import Eagle1Config
from specsamp.models.heads import FeatureHead
from specsamp.models.int8 import (
    Int8,
    Int8Weight,
    decode_weights,
    dequantise,
    is_int8,
    quantise,
    take_rows,
)
from specsamp.models.medusa import MedusaConfig
from specsamp.models.products import contract
from specsamp.models.transformer import WEIGHT_ORDERS, TransformerLM
from support.enumeration import COMPILE_FAST
from support.refusals import refused_arguments
from support.weights import drawn_params

SLOTS = 16
MODELS = {
    "relative": tiny(num_kv_heads=2, ngram_rows=32),
    "rotary": tiny(positions="rotary", gated=True, tied=False, num_kv_heads=1, attention_bias=True),
}
SPECS = {  # specs of the models; shapes, and the summed axes of the weight
    "BTD,VD->BTV": ((2, 3, 8), (5, 8), (1,)),
    "NRD,NDH->NRH": ((4, 3, 8), (4, 8, 2), (1,)),
    "BTD,NDH->BNTH": ((2, 3, 8), (4, 8, 2), (1,)),
    "BTX,XD->BTD": ((2, 3, 8), (8, 6), (0,)),
}
HEAD_LAYER = tiny(positions="rotary", num_layers=1)
HEADS = [
    Eagle1Config(
        layer=HEAD_LAYER, target_layers=2, hidden_layers=(2,), own_embedding=True, own_output=True
    ),
    MedusaConfig(
        layer=HEAD_LAYER, target_layers=2, hidden_layers=(2,), num_heads=2, own_output=True
    ),
]


def in_int8(config):
    return dataclasses.replace(config, weight_dtype="int8")


def rounded(params):
    """Returns float parameters with the values of the int8 weights."""
    stored = decode_weights(params, jnp.float32, "int8")
    return jax.tree.map(lambda x: dequantise(x) if is_int8(x) else x, stored, is_leaf=is_int8)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_scale_multiplies_sums_in_float32(spec, dtype):
    """Sums of unrounded operands are exact; the controls round a weight first, or reverse
    scales.
    """
    x_shape, y_shape, axes = SPECS[spec]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-8, 9, x_shape), dtype)
    weight = quantise(rng.normal(size=y_shape).astype(np.float32), axes)
    exact = np.einsum(
        spec, np.asarray(x, np.float64), weight.values.astype(np.float64) * weight.scale
    )
    ours = contract(spec, x, weight, dtype=jnp.float32)
    assert ours.dtype == jnp.float32 and contract(spec, x, weight).dtype == x.dtype
    assert_allclose(ours, exact, rtol=1e-6, atol=1e-6)
    if dtype == "bfloat16":
        before = np.einsum(
            spec, np.asarray(x, np.float64), (weight.values * weight.scale).astype(jnp.bfloat16)
        )
        assert np.abs(before - exact).max() > 1e-3
    turned = Int8Weight(weight.values, np.flip(weight.scale))
    assert np.abs(contract(spec, x, turned, dtype=jnp.float32) - exact).max() > 0.1


def test_int8_on_device_equals_numpy():
    weight = np.random.default_rng(1).normal(size=(40, 30)).astype(np.float32)
    weight[3], weight[5] = 0, 1e-37 * weight[5]  # a scale of 1e-39 has no finite reciprocal
    for axes in ((0,), (1,)):
        ours = quantise(weight, axes)
        theirs = quantise(jnp.asarray(weight), axes)
        jax.tree.map(assert_array_equal, ours, theirs)
        again = quantise(dequantise(ours), axes)
        assert_array_equal(again.values, ours.values)
        assert np.abs(dequantise(ours) - weight).max() <= ours.scale.max() * 0.5001
    table = quantise(weight, (1,))
    assert_array_equal(
        take_rows(jax.tree.map(jnp.asarray, table), jnp.array([[3, 7]])),
        dequantise(table)[[[3, 7]]],
    )


@functools.cache
def call(model):
    return jax.jit(model.__call__, compiler_options=COMPILE_FAST)


@pytest.mark.parametrize("order", WEIGHT_ORDERS)
@pytest.mark.parametrize("name", MODELS)
def test_int8_model_equals_its_rounded_weights(name, order):
    """Equal up to rounding, in both orders; the unrounded model is a hundred times as far."""
    plain = TransformerLM(MODELS[name], order)
    ours = TransformerLM(in_int8(MODELS[name]), order)
    params = drawn_params(plain, noise=0.02)
    weights = ours.fit_slots(ours.prepare(params), SLOTS)
    tokens_BT = jax.random.randint(jax.random.key(1), (2, 5), 0, 60)
    start_B = jnp.array([0, 4])

    def logits(model, weights):
        return call(model)(weights, tokens_BT, start_B, model.init_cache(2, SLOTS)).logits_BTV

    found = logits(ours, weights)
    expected = logits(plain, plain.fit_slots(plain.prepare(rounded(params)), SLOTS))
    before = logits(plain, plain.fit_slots(plain.prepare(params), SLOTS))
    assert_allclose(found, expected, atol=2e-5)
    assert 2e-3 < np.abs(found - before).max() < 0.5
    # Every matrix of a product is in int8, so that a step streams a quarter of the bytes.
    matrices = [
        leaf
        for leaf in jax.tree.leaves(weights["params"], is_leaf=is_int8)
        if leaf.ndim == 2 and leaf.size > 600
    ]
    assert matrices and all(map(is_int8, matrices))
    read = ours.matrices_read(weights, 1)
    assert sum(x.nbytes for x, _ in read) < 1.2 * sum(x.size for x, _ in read)


@pytest.mark.parametrize("config", HEADS, ids=lambda config: config.kind)
def test_int8_head_equals_its_rounded_weights(config):
    head = FeatureHead(config)
    ours = FeatureHead(dataclasses.replace(config, layer=in_int8(config.layer)))
    params = drawn_params(head, noise=0.02)
    x_BTD = jax.random.normal(jax.random.key(0), (1, 3, 32))
    start_B = jnp.zeros(1, jnp.int32)

    def run(head, params):
        def logits(weights):
            y_BTD, _ = head(
                weights, x_BTD, head.fuse(weights, (x_BTD,)), start_B, head.init_cache(1, 8)
            )
            return head.logits(weights, y_BTD, lambda x_BTD: x_BTD, 0)

        return jax.jit(logits, compiler_options=COMPILE_FAST)(head.prepare(params))

    found = run(ours, params)
    assert_allclose(found, run(head, rounded(params)), atol=2e-5)
    assert np.abs(found - run(head, params)).max() > 1e-3


test_refused_int8_weights = refused_arguments(
    Int8,
    {
        "weights in int8 must be a tuple of target and draft; got .*both": dict(weights=("both",)),
        "must be a tuple of target and draft; got 'target'": dict(weights="target"),
        "must be a tuple of target and draft; got None": dict(weights=None),
    },
)
