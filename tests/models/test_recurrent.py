"""Recurrent layers: no split into calls and no rejection changes their states."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp.models.config import RecurrentConfig
from specsamp.models.delta_rule import CHUNK, mix_chunks
from specsamp.models.kernels.dispatch import PallasKernels
from specsamp.models.recurrent import HELD, REWIND, RecurrentCache, mix
from support.hybrids import hybrid

SHAPE = RecurrentConfig(
    num_key_heads=1, num_value_heads=2, key_size=4, value_size=6, attention_layers=(1,)
)
CONFIG = hybrid(recurrent=SHAPE)
LENGTH, ROWS = 85, 1000


def token_by_token(state, q, k, v, g, beta):
    """Returns outputs and the last state by the rule of its paper, in float64."""
    out = []
    for t in range(q.shape[2]):
        state = state * np.exp(g[:, :, t])[..., None, None]
        known = np.einsum("bnkv,bnk->bnv", state, k[:, :, t])
        missing = (v[:, :, t] - known) * beta[:, :, t, None]
        state = state + k[:, :, t, :, None] * missing[:, :, None]
        out.append(np.einsum("bnkv,bnk->bnv", state, q[:, :, t]))
    return np.stack(out, axis=2), state


@pytest.mark.parametrize("alike", [0.0, 20.0])
def test_chunked_rule_equals_token_by_token(alike):
    """Covers keys that are almost alike, whose corrections almost cancel."""
    rng = np.random.default_rng(0)
    shape = 2, 3, 3 * CHUNK
    q, k = rng.normal(size=(2, *shape, 8))
    k = k + alike
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(*shape, 6))
    state = rng.normal(size=(2, 3, 8, 6))
    g = -np.exp(rng.normal(size=shape) - 4)
    beta = rng.uniform(size=shape)
    inputs = [np.asarray(x, np.float32) for x in (state, q, k, v, g, beta)]
    out, last = jax.jit(mix_chunks)(*inputs, jnp.array([3, 2]))
    expected, expected_last = token_by_token(state, q, k, v, g, beta)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_allclose(last[0], expected_last[0], atol=2e-5)
    _, earlier = token_by_token(state, *(x[:, :, : 2 * CHUNK] for x in (q, k, v, g, beta)))
    np.testing.assert_allclose(last[1], earlier[1], atol=2e-5)


PARTS = sum(size for _, size in SHAPE.projections.values())
MIX = {"plain": mix, "kernel": PallasKernels(interpret=True).step_delta}


def vectors():
    rng = np.random.default_rng(1)
    channels = 2 * SHAPE.key_size + SHAPE.projections["value"][1]
    taps_MtX = rng.normal(size=(SHAPE.num_key_heads, SHAPE.taps, channels))
    rates_M2g = rng.normal(size=(SHAPE.num_key_heads, 2, SHAPE.projections["decay"][1])) - 2
    return [np.asarray(x, np.float32) for x in (taps_MtX, rates_M2g, np.ones(SHAPE.value_size))]


def read_in_random_calls(form="plain", rows=ROWS, lengths=(2, 6, REWIND + 1)):
    """Returns the cache of one text in every row, after random calls and rejections of each row;
    and the outputs of the last call.
    """
    rng = np.random.default_rng(0)
    call = jax.jit(functools.partial(MIX[form], CONFIG))
    text = rng.normal(size=(1, SHAPE.num_key_heads, LENGTH + REWIND + 1, PARTS))
    text_BMTX = np.repeat(text.astype(np.float32), rows, axis=0)
    cache = RecurrentCache.zeros(CONFIG, rows)
    at_B = np.zeros(rows, int)
    is_last = False
    while not is_last:
        is_last = at_B.min() == LENGTH
        length = rng.choice(lengths)
        index_BT = at_B[:, None] + np.arange(length)
        fed = np.take_along_axis(text_BMTX, index_BT[:, None, :, None], axis=2)
        accepted_B = rng.integers(1, length + 1, size=rows)
        wrong = np.arange(length)[None] >= accepted_B[:, None]
        fed = np.where(wrong[:, None, :, None], rng.normal(size=fed.shape), fed)
        out_BTX, cache = call(jnp.asarray(fed, jnp.float32), jnp.asarray(at_B), vectors(), cache)
        at_B = np.minimum(at_B + accepted_B, LENGTH)
    return cache, out_BTX


@pytest.mark.slow
@pytest.mark.parametrize("form", MIX)
def test_states_after_random_rejections_are_bit_equal(form):
    cache, _ = read_in_random_calls(form)
    assert set(cache.position_B.tolist()) == {(LENGTH - REWIND) // CHUNK * CHUNK}
    states = np.asarray(cache.state_BNKV)
    assert np.all(states == states[:1])
    assert np.abs(states[0]).max() > 0.1


@pytest.mark.slow
def test_kernel_equals_plain_rule_after_random_rejections():
    plain, kernel = (jax.tree.leaves(read_in_random_calls(form, 3, (6,))) for form in MIX)
    for ours, theirs in zip(kernel, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_long_prompt_is_scanned_by_chunks():
    inputs = jnp.zeros((1, SHAPE.num_key_heads, 2048, PARTS))
    cache = RecurrentCache.zeros(CONFIG, 1)
    at_B = jnp.zeros(1, jnp.int32)
    read = functools.partial(mix, CONFIG)
    program = str(jax.make_jaxpr(read)(inputs, at_B, vectors(), cache, jnp.array([2048])))
    steps = [int(length) for length in re.findall(r"\blength=(\d+)", program)]
    assert 2048 // CHUNK <= max(steps) <= (2048 + HELD) // CHUNK
    assert "while[" not in program
