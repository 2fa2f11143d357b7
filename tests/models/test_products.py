"""Products in bfloat16 with float32 gradients; on a CPU, int8 matrices are widened by blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from specsamp import TransformerLM
from specsamp.models import products
from specsamp.models.config import tiny
from specsamp.models.int8 import Int8Blocks, Int8Weight, dequantise, is_int8, quantise
from specsamp.models.products import contract, contract_slice
from support.weights import drawn_params

OPTIMISED = True
multiply = products._product

SHAPES = {
    "BTD,VD->BTV": ((2, 3, 8), (5, 8)),
    "BTNH,NHD->BTD": ((2, 3, 4, 2), (4, 2, 6)),
    "BMRH,BMSH->BMRS": ((2, 2, 3, 4), (2, 2, 5, 4)),
}
every_spec = pytest.mark.parametrize("spec", SHAPES)


def operands(spec, dtype=jnp.float32):
    """Returns two operands and a cotangent of their product."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in SHAPES[spec])
    weights = jnp.asarray(rng.normal(size=jnp.einsum(spec, x, y).shape), jnp.float32)
    return x.astype(dtype), y, weights


def value_and_gradients(product, spec, x, y, weights):
    def scalar(x, y):
        return (product(spec, x, y).astype(jnp.float32) * weights).sum()

    return product(spec, x, y), *jax.grad(scalar, argnums=(0, 1))(x, y)


@every_spec
def test_float32_is_einsum(spec):
    given = operands(spec)
    for ours, plain in zip(
        value_and_gradients(contract, spec, *given), value_and_gradients(jnp.einsum, spec, *given)
    ):
        assert ours.dtype == jnp.float32
        assert_allclose(ours, plain, atol=1e-5)


# One row; the copies of the second are another axis.
ONE_ROW = {
    "BTD,VD->BTV": ((1, 1, 8), (5, 8), None),
    "NRD,NDH->NRH": ((1, 1, 8), (3, 8, 4), 3),
    "BD,DR->BR": ((1, 8), (8, 6), None),
}


@pytest.mark.parametrize("in_int8", [False, True])
@pytest.mark.parametrize("spec", ONE_ROW)
def test_one_row_is_two_on_a_tpu(spec, in_int8, monkeypatch):
    of_x, of_y, copies = ONE_ROW[spec]
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in (of_x, of_y))
    if in_int8:
        y = quantise(y, (spec.split(",")[1].index("D"),))
    plain = contract(spec, x, y, copies=copies)
    rows = []
    monkeypatch.setattr(
        products,
        "_product",
        lambda spec, x, *rest: rows.append(x.size // 8) or multiply(spec, x, *rest),
    )
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *operands, tpu, default: tpu(*operands)
    )
    assert_allclose(contract(spec, x, y, copies=copies), plain, rtol=1e-6)
    assert rows == [2]


def test_one_row_of_an_int8_expert_is_two_on_a_tpu(monkeypatch):
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((1, 8), (3, 8, 6)))
    given = "RD,DF->RF", x, quantise(y, (1,)), 1
    plain, rows = contract_slice(*given, dtype=jnp.float32), []
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *operands, tpu, default: tpu(*operands)
    )
    einsum = products._einsum
    monkeypatch.setattr(
        products,
        "_einsum",
        lambda spec, p, x, *rest: rows.append(len(x)) or einsum(spec, p, x, *rest),
    )
    assert_allclose(contract_slice(*given, dtype=jnp.float32), plain, rtol=1e-6)
    assert rows == [2]


def test_two_rows_and_products_of_rows_are_as_they_are(monkeypatch):
    monkeypatch.delattr(jax.lax, "platform_dependent")
    for spec, (of_x, of_y) in SHAPES.items():
        contract(spec, jnp.ones(of_x), jnp.ones(of_y))
    contract("BMRH,BMSH->BMRS", jnp.ones((1, 1, 1, 4)), jnp.ones((1, 1, 5, 4)))


@every_spec
def test_gradient_of_float32_weight_is_not_rounded(spec):
    """Only operands are rounded; the control rounds the gradient too, as a plain einsum would."""
    x, y, weights = operands(spec, jnp.bfloat16)
    # A cotangent that bfloat16 does not round again.
    weights = weights.astype(jnp.bfloat16).astype(jnp.float32)
    result, of_x, of_y = value_and_gradients(contract, spec, x, y, weights)
    assert (result.dtype, of_x.dtype, of_y.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    exact = value_and_gradients(jnp.einsum, spec, x.astype(jnp.float32), y, weights)[2]
    assert_allclose(of_y, exact, atol=1e-5)
    assert np.abs(of_y.astype(jnp.bfloat16).astype(jnp.float32) - exact).max() > 1e-3


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_backward_products_have_the_requested_precision(precision):
    """Holds even if the gradient is taken outside the context of the product."""
    spec = "BTD,VD->BTV"
    x, y, _ = operands(spec)

    def loss(x, y):
        with jax.default_matmul_precision(precision):
            return contract(spec, x, y).sum()

    products = [
        e
        for e in jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, y).eqns
        if "dot_general" in str(e)
    ]
    text = " ".join(map(str, products))
    wanted, other = ("HIGHEST", "DEFAULT") if precision == "float32" else ("DEFAULT", "HIGHEST")
    assert text.count("dot_general[") == 3
    assert text.count(wanted) >= 3 and other not in text


# Int8 matrices on a CPU.


GATES = tiny(
    positions="rotary", gated=True, feedforward_bias=True, num_layers=1, feedforward_width=48
)


def weight_and_rows(shape):
    weight = jax.tree.map(
        jnp.asarray, quantise(np.random.default_rng(0).normal(size=shape).astype(np.float32), (0,))
    )
    return weight, jax.random.normal(jax.random.key(0), (2, 3, shape[0]))


# Even blocks, blocks with a remainder, rows larger than a block, columns, and one block.
@pytest.mark.parametrize("shape", [(64, 8), (37, 11), (8, 100), (3, 100), (8, 8)])
def test_blocks_sum_to_the_product(shape, monkeypatch):
    monkeypatch.setattr(products, "WIDENED_ENTRIES", 64)
    weight, x_BTD = weight_and_rows(shape)
    exact = np.asarray(x_BTD, np.float64) @ np.asarray(dequantise(weight), np.float64)

    def product(weight):
        return products.contract("BTD,DF->BTF", x_BTD, weight)

    found = product(Int8Blocks(weight.values, weight.scale))
    assert_allclose(found, exact, atol=1e-4)
    turned = Int8Blocks(jnp.flip(weight.values, axis=0), weight.scale)
    assert np.abs(product(turned) - exact).max() > 0.1  # the control: reversed rows


def test_cpu_program_widens_no_whole_int8_matrix():
    """Measured in a loop, like decoding; the control widens the same matrix whole."""
    weight, x_BTD = weight_and_rows((1024, 4096))
    whole = 4 * weight.size

    def temporaries(weight):
        def step(_, x_BTD):
            return products.contract("BTD,DF->BTF", x_BTD, weight)[..., :1024]

        program = jax.jit(lambda weight, x_BTD: jax.lax.fori_loop(0, 3, step, x_BTD)).lower(
            weight, x_BTD
        )
        return program.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(Int8Blocks(weight.values, weight.scale)) < whole / 3
    assert temporaries(weight) >= whole


def test_only_the_order_of_cpus_has_blocks():
    config = dataclasses.replace(GATES, weight_dtype="int8")
    for order, kind in (("cpu", Int8Blocks), ("default", Int8Weight)):
        weights = TransformerLM(config, order).prepare(drawn_params(TransformerLM(config)))
        kinds = {type(leaf) for leaf in jax.tree.leaves(weights, is_leaf=is_int8) if is_int8(leaf)}
        assert kinds == {kind}
