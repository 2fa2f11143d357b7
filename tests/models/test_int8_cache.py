"""A cache in int8: scales in attention, and logits that do not depend on the split into calls."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from specsamp import TransformerLM
from specsamp.models.cache import Int8KVCache, KVCache
from specsamp.models.config import tiny
from specsamp.models.int8 import dequantise, quantise
from specsamp.models.visibility import Visibility
from support.calls import call
from support.weights import drawn_params

BATCH, KV_HEADS, HEADS, SLOTS, SIZE = 2, 2, 4, 12, 8
SCHEMES = {
    "rotary, grouped": dict(positions="rotary", num_kv_heads=2, window=4, global_layers=(1,)),
    "relative, multi-query": dict(num_kv_heads=1, attention_cap=5.0),
}


@functools.cache
def prepared(scheme, order="default"):
    model = TransformerLM(tiny(**SCHEMES[scheme], cache_dtype="int8"), order)
    params = drawn_params(model, noise=0.05)
    return model, model.fit_slots(model.prepare(params), SLOTS)


TOKENS_BT = np.random.default_rng(0).integers(0, 64, (BATCH, 8), dtype=np.int32)


def read(model, weights, cuts):
    """Returns logits ``[B, 8, V]`` of a text that is split into calls, and the cache."""
    cache, logits, start = model.init_cache(BATCH, SLOTS), [], 0
    for length in cuts:
        starts_B = jnp.full((BATCH,), start, jnp.int32)
        output = call(model, weights, TOKENS_BT[:, start : start + length], starts_B, cache)
        logits.append(output.logits_BTV)
        cache, start = output.cache, start + length
    return np.concatenate(logits, axis=1), cache


def written(rng, start=3, length=5):
    """Returns an int8 cache, a plain cache with its rounded keys and values, and their starts."""
    k, v = (
        jnp.asarray(rng.normal(size=(BATCH, KV_HEADS, length, SIZE)), jnp.float32) for _ in range(2)
    )
    start_B = jnp.asarray([start, start + 1], jnp.int32)
    layer = tiny(num_kv_heads=KV_HEADS, head_size=SIZE)
    caches = [kind.zeros(layer, BATCH, SLOTS) for kind in (Int8KVCache, KVCache)]
    ours = caches[0].append(k, v, start_B)
    plain = caches[1].append(*(dequantise(quantise(x, (3,))) for x in (k, v)), start_B)
    return ours, plain, start_B


def attended(cache, q_BNTH, start_B):
    visible = Visibility(start_B=start_B, num_queries=q_BNTH.shape[2], window=6)
    distances_BNTS = jnp.broadcast_to(
        0.1 * jnp.arange(SLOTS, dtype=jnp.float32), (*q_BNTH.shape[:3], SLOTS)
    )
    return cache.attend(q_BNTH, visible, scale=0.3, distances_BNTS=distances_BNTS, cap=4.0)


def test_scales_are_folded_into_scores_and_probabilities():
    """Attention equals a plain cache of the rounded values; the control exchanges the scales of
    keys and values.
    """
    rng = np.random.default_rng(0)
    ours, plain, start_B = written(rng)
    q_BNTH = jnp.asarray(rng.normal(size=(BATCH, HEADS, 5, SIZE)), jnp.float32)
    expected = attended(plain, q_BNTH, start_B)
    assert_allclose(attended(ours, q_BNTH, start_B), expected, atol=1e-6)
    of_keys, of_values = ours.scales_BM1S
    exchanged = dataclasses.replace(ours, key_scales_BM1S=of_values, value_scales_BM1S=of_keys)
    assert np.abs(attended(exchanged, q_BNTH, start_B) - expected).max() > 0.01
    rows_BT = jnp.array([[0, 2, 3], [1, 2, 4]])
    moved = (cache.compact(start_B, rows_BT, 5) for cache in (ours, plain))
    assert_allclose(*(attended(cache, q_BNTH[:, :, :3], start_B) for cache in moved), atol=1e-6)


@pytest.mark.parametrize("scheme, order", list(zip(SCHEMES, ("default", "cpu"))))
def test_int8_cache_ignores_the_split_into_calls(scheme, order):
    """Equal up to the rounding of sums, which int8 magnifies only at the border of two steps."""
    model, weights = prepared(scheme, order)
    whole, cache = read(model, weights, (8,))
    for cuts in ((1,) * 8, (4, 4)):
        pieces, made = read(model, weights, cuts)
        assert_allclose(pieces, whole, atol=2e-6)
        jax.tree.map(lambda a, b: assert_allclose(a, b, atol=1e-6), made, cache)
    plain = TransformerLM(tiny(**SCHEMES[scheme]), order)
    assert np.abs(read(plain, weights, (8,))[0] - whole).max() > 1e-3
