"""Experts chosen by each token: sums equal NumPy's, in calls of any length, and matrices of experts
that were not chosen are not read.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from specsamp import TransformerLM
from specsamp.models.config import ExpertsConfig, tiny
from specsamp.models.experts import (
    BIAS_AXES,
    STACKED_AXES,
    Experts,
    block_size,
    expected_steps,
    mix_experts,
    route,
)
from specsamp.models.int8 import decode_weights, dequantise, is_int8, quantise
from specsamp.models.kernels import mix_experts as mix_kernel
from specsamp.models.kernels.dispatch import PallasKernels
from support.calls import call, forward
from support.enumeration import COMPILE_FAST
from support.weights import drawn_params

EXPERTS = ExpertsConfig(num_experts=8, experts_per_token=2, width=12, dense_layers=(0,))
CONFIG = tiny(positions="rotary", gated=True, activation="silu", experts=EXPERTS)
MODEL = TransformerLM(CONFIG)
LENGTH, CHUNK, SLOTS = 70, 5, 80

mix = jax.jit(
    lambda *arrays: mix_experts(CONFIG, Experts.inner_spec, *arrays), compiler_options=COMPILE_FAST
)


@pytest.fixture(scope="module")
def params():
    return drawn_params(MODEL)


@pytest.fixture(scope="module")
def stacked(params):
    return {name: params["layer_1"]["experts"][name] for name in STACKED_AXES}


def some_tokens(length, seed=0):
    return np.random.default_rng(seed).normal(size=(length, CONFIG.width)).astype(np.float32)


def by_numpy(x_RD, logits_RE, stacked, experts):
    """Returns sums token by token, in float64, with a softmax over all experts before the
    choice.
    """
    stacked = {name: np.asarray(matrix, np.float64) for name, matrix in stacked.items()}
    rows = []
    for x_D, logits_E in zip(x_RD.astype(np.float64), np.asarray(logits_RE, np.float64)):
        shares_E = np.exp(logits_E - logits_E.max())
        shares_E /= shares_E.sum()
        chosen = sorted(range(len(shares_E)), key=lambda e: -shares_E[e])[
            : experts.experts_per_token
        ]
        total = shares_E[chosen].sum() if experts.normalised else 1.0
        row_D = np.zeros_like(x_D)
        for e in chosen:
            gate_F = stacked["gate"][e] @ x_D
            up_F = stacked["up"][e] @ x_D
            row_D += (
                shares_E[e] / total * ((gate_F / (1 + np.exp(-gate_F)) * up_F) @ stacked["down"][e])
            )
        rows.append(row_D)
    return np.array(rows)


@pytest.mark.parametrize(
    "tokens, liking", [(1, 0.0), (6, 0.0), (64, 5.0), (65, 0.0), (150, 0.0), (150, 9.0)]
)
def test_tokens_get_outputs_of_their_experts(tokens, liking, stacked):
    """Covers few tokens, and many in blocks; a liking for the last experts gives them several
    blocks, and some experts none.
    """
    x_RD = some_tokens(tokens)
    logits_RE = some_tokens(tokens, seed=1)[:, :8] + liking * (np.arange(8) >= 6)
    experts = dataclasses.replace(EXPERTS, normalised=tokens % 2 == 0)
    ours = mix(x_RD, route(jnp.asarray(logits_RE), experts), stacked)
    assert_allclose(ours, by_numpy(x_RD, logits_RE, stacked, experts), atol=1e-5)
    other = dataclasses.replace(experts, experts_per_token=1)  # the control
    assert np.abs(by_numpy(x_RD, logits_RE, stacked, other) - ours).max() > 1e-2


@pytest.mark.parametrize("tokens", [20, 100])
def test_experts_that_no_token_chose_are_not_read(tokens, stacked):
    """A product with all experts, most of them weighted by zero, would spread NaN.

    NaN in a chosen expert affects exactly the tokens that chose it.
    """
    logits_RE = some_tokens(tokens)[:, :8] + np.where(np.arange(8) == 3, -50.0, 0.0)
    shares_RE = route(jnp.asarray(logits_RE, jnp.float32), EXPERTS)
    spoilt = {name: matrix.at[3].set(jnp.nan) for name, matrix in stacked.items()}
    x_RD = some_tokens(tokens, seed=1)
    assert_array_equal(mix(x_RD, shares_RE, spoilt), mix(x_RD, shares_RE, stacked))
    without = np.isnan(mix(x_RD, shares_RE, {**stacked, "up": stacked["up"].at[4].set(jnp.nan)}))
    assert_array_equal(without.all(axis=1), np.asarray(shares_RE[:, 4]) != 0)
    assert_array_equal(without.any(axis=1), without.all(axis=1))


def test_a_text_may_be_cut_into_calls(params):
    """One call of both rows, sorted in blocks, equals short calls, where every expert multiplies
    all tokens, in both weight orders.
    """
    tokens_BT = np.random.default_rng(0).integers(0, 64, (2, LENGTH), dtype=np.int32)
    at_once = forward(MODEL, params, tokens_BT).logits_BTV
    for order in ("default", "cpu"):
        model = TransformerLM(CONFIG, order)
        weights = model.prepare(params)
        cache = model.init_cache(2, SLOTS)
        for start in range(0, 20, CHUNK):
            fed = tokens_BT[:, start : start + CHUNK]
            output = call(model, weights, fed, jnp.full(2, start), cache)
            cache = output.cache
            assert_allclose(output.logits_BTV, at_once[:, start : start + CHUNK], atol=1e-5)


def test_int8_experts_are_the_matrices_they_stand_for(params, stacked):
    stored = decode_weights(params, jnp.float32, "int8")["layer_1"]["experts"]
    assert all(is_int8(stored[name]) == (name in STACKED_AXES) for name in stored)
    assert stored["gate"].scale.shape == (8, 12, 1) and stored["down"].scale.shape == (8, 1, 32)
    in_int8 = {name: stored[name] for name in STACKED_AXES}
    for tokens in (5, 100):
        x_RD = some_tokens(tokens)
        shares_RE = route(jnp.asarray(some_tokens(tokens, seed=1)[:, :8]), EXPERTS)
        ours = mix(x_RD, shares_RE, in_int8)
        assert_allclose(
            ours,
            mix(x_RD, shares_RE, jax.tree.map(dequantise, in_int8, is_leaf=is_int8)),
            atol=1e-5,
        )
        assert 1e-4 < np.abs(ours - mix(x_RD, shares_RE, stacked)).max() < 0.1


@pytest.mark.parametrize(
    "dtype, in_int8, tokens, part", [("float32", False, 5, 16), ("bfloat16", True, 40, 32)]
)
def test_experts_kernel_equals_the_plain_form(dtype, in_int8, tokens, part, monkeypatch):
    """Halves of the experts, mixed in parts as on two devices, add up; unchosen ones are not
    read.
    """
    experts = dataclasses.replace(EXPERTS, width=64, limit=0.5 if in_int8 else None)
    width = 128 if in_int8 else 192  # one and a half rows of a TPU's memory
    config = tiny(width=width, gated=True, activation="silu", experts=experts)
    monkeypatch.setattr(mix_kernel, "STEP_BYTES", 3 * part * width * (2 if in_int8 else 4))
    random = np.random.default_rng(0)
    axes = {"gate": (2,), "up": (2,), "down": (1,)}
    drawn = random.normal(size=(3, 8, 64, width)) / 8
    stacked = {
        name: jnp.asarray(x, dtype).at[3].set(jnp.nan) for name, x in zip(STACKED_AXES, drawn)
    }
    x_RD = jnp.asarray(random.normal(size=(tokens, width)), dtype)
    # Logits with ties.
    logits_RE = random.integers(0, 5, (tokens, 8)).astype(np.float32) - 50.0 * (np.arange(8) == 3)
    logits_RE[1] = np.nan  # affects its own row only
    if in_int8:
        stacked = {name: quantise(jnp.nan_to_num(x), axes[name]) for name, x in stacked.items()}
        stacked |= {
            name: jnp.asarray(drawn[0, :, :, i], "float32") for i, name in enumerate(BIAS_AXES)
        }
    kernels = PallasKernels(interpret=True)
    assert kernels.take_experts(tokens, (4, 64, width), jnp.dtype("int8" if in_int8 else dtype))
    for normalised in (True, False):
        experts = dataclasses.replace(config.experts, normalised=normalised)
        shares_RE = route(jnp.asarray(logits_RE), experts)
        plain = mix_experts(config, Experts.inner_spec, x_RD, shares_RE, stacked)
        config = dataclasses.replace(config, experts=experts)
        halves = []
        for i in (0, 4):
            half = jax.tree.map(lambda x: x[i : i + 4], stacked)
            halves.append(kernels.mix_experts(config, x_RD, logits_RE, half, jnp.int32(i)))
        assert_allclose(sum(halves), plain, atol=1e-5 if dtype == "float32" else 0.02)
        assert np.nanmax(np.abs(halves[0] - plain)) > 0.1
        assert np.isnan(plain).all(axis=1).nonzero()[0].tolist() == [1]


def test_gradients_are_those_of_all_experts(stacked):
    """Gradients by tokens, router and matrices equal gradients of plain sums over all experts."""
    operands = (some_tokens(70), some_tokens(70, seed=1)[:, :8], stacked)
    other_RD = some_tokens(70, seed=2)

    def plain(x_RD, shares_RE, stacked):
        gate_ERF, up_ERF = (
            jnp.einsum("RD,EFD->ERF", x_RD, stacked[name]) for name in ("gate", "up")
        )
        return jnp.einsum(
            "RE,ERF,EFD->RD", shares_RE, jax.nn.silu(gate_ERF) * up_ERF, stacked["down"]
        )

    def gradients(mix):
        def loss(x_RD, logits_RE, stacked):
            return jnp.sum(mix(x_RD, route(logits_RE, EXPERTS), stacked) * other_RD)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)), compiler_options=COMPILE_FAST)(*operands)

    ours = gradients(functools.partial(mix_experts, CONFIG, Experts.inner_spec))
    expected = gradients(plain)
    jax.tree.map(functools.partial(assert_allclose, atol=1e-4, rtol=1e-4), ours, expected)
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(ours)) > 1e-2


# The expected number of experts that a call reads.


@pytest.mark.parametrize("tokens, block", [(1, 1), (3, 3), (17, 17), (40, 8)])
def test_expected_experts_equal_the_routed_count(tokens, block):
    """The router chooses independently and uniformly; with favourites, the number is smaller."""
    logits = np.random.default_rng(0).normal(size=(400 * tokens, 8)).astype(np.float32)

    def count(logits):
        counts = (
            (np.asarray(route(jnp.asarray(logits), EXPERTS)) != 0).reshape(400, tokens, 8).sum(1)
        )
        return np.ceil(counts / block).sum(1)

    counted = count(logits)
    expected = EXPERTS.expected_blocks(tokens, block)
    assert counted.mean() == pytest.approx(expected, abs=5 * max(counted.std(), 0.01) / 20)
    if tokens == block:
        assert EXPERTS.expected_touched(tokens) == pytest.approx(expected)
        assert tokens == 1 or count(logits + np.arange(8) / 3).mean() < 0.95 * expected


def test_expert_loop_names_its_expected_steps(stacked):
    """The device with most blocks sets the number; only the scope of this loop has one."""
    half = {name: matrix[:4] for name, matrix in stacked.items()}
    for tokens in (6, 150):
        text = mix.lower(some_tokens(tokens), np.zeros((tokens, 4), np.float32), half).as_text(
            debug_info=True
        )
        scope = next(line for line in text.splitlines() if "experts_" in line)
        most = EXPERTS.expected_blocks(tokens, block_size(tokens, EXPERTS), 2)
        assert (
            expected_steps(scope)
            == most
            >= EXPERTS.expected_blocks(tokens, block_size(tokens, EXPERTS)) / 2
        )
    assert expected_steps("jit(call)/Decoder/layer_0/experts/while") is None


@pytest.mark.parametrize("weight_dtype", [None, "int8"])
def test_a_measurement_streams_the_experts_of_one_token(params, weight_dtype):
    """A step reads two of the eight experts, in the one layer that has experts."""
    model = TransformerLM(dataclasses.replace(CONFIG, weight_dtype=weight_dtype), "cpu")
    weights = model.prepare(params)
    shares = [share for _, share in model.matrices_read(weights, 1)]
    assert shares.count(2 / 8) == len(STACKED_AXES) and set(shares) == {2 / 8, 1}
