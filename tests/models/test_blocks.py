"""A tree scored in one call equals its paths scored alone, and can be reduced to one path."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from specsamp import TransformerLM
from specsamp.models.config import tiny
from specsamp.models.interface import Block
from support.calls import call, compact
from support.extras import slow_but
from support.weights import drawn_params

# Parents of six scored rows, in two rows of the batch: row 0 is the pending token, then five nodes.
PARENTS = np.array([[-1, 0, 0, 1, 1, 3], [-1, 0, 1, 0, 3, 4]])
PATHS = ([0, 1, 3, 5], [0, 3, 4, 5])  # the longest of each
STARTS, SLOTS = np.array([7, 10]), 24
SCHEMES = {
    "rotary": dict(positions="rotary", num_kv_heads=2),
    "learned": dict(positions="learned", max_positions=SLOTS),
    "relative": dict(positions="relative", num_kv_heads=2),
    "windowed": dict(positions="rotary", window=3, global_layers=(1,)),
    "relative, windowed": dict(positions="relative", window=3),
    "n-grams": dict(positions="rotary", ngram_rows=64, ngram_order=4),
}


def ancestors(parents):
    """Returns the path from the root to each row, ending with the row."""
    paths = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    return paths


def block_of(parents_BT, start_B):
    visible_BTR = np.zeros((*parents_BT.shape, parents_BT.shape[1]), bool)
    depths_BT = np.zeros(parents_BT.shape, np.int32)
    for b, parents in enumerate(parents_BT):
        for t, path in enumerate(ancestors(parents)):
            visible_BTR[b, t, path] = True
            depths_BT[b, t] = len(path) - 1
    return Block(
        start_B=jnp.asarray(start_B, jnp.int32),
        positions_BT=jnp.asarray(start_B[:, None] + depths_BT, jnp.int32),
        visible_BTR=jnp.asarray(visible_BTR),
    )


CHAIN = block_of(np.arange(-1, 5)[None].repeat(2, axis=0), STARTS)


@functools.cache
def prepared(scheme, order="default"):
    model = TransformerLM(tiny(**SCHEMES[scheme]), order)
    params = drawn_params(model, noise=0.15)
    return model, model.fit_slots(model.prepare(params), SLOTS)


def cached_prompts(model, weights):
    """Returns a cache with the tokens before the tree, and stale tokens after them."""
    rng = np.random.default_rng(1)
    cache = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), model.init_cache(2, SLOTS)
    )
    for start in range(0, 16, 4):  # calls of four tokens: every test shares their program
        tokens_BT = rng.integers(0, 64, (2, 4), dtype=np.int32)
        cache = call(model, weights, tokens_BT, jnp.full(2, start, jnp.int32), cache).cache
    return cache


def nodes(seed=2):
    return np.random.default_rng(seed).integers(0, 64, PARENTS.shape, dtype=np.int32)


def score_paths(model, weights, cache, tokens_BT):
    """Returns each node's logits in a chain of its ancestors, padded to one shape."""
    logits = np.zeros((*tokens_BT.shape, 64), np.float32)
    for t in range(tokens_BT.shape[1]):
        paths = [ancestors(parents)[t] for parents in PARENTS]
        chain_BT = np.stack([np.resize(tokens_BT[b, path], 4) for b, path in enumerate(paths)])
        output = call(model, weights, chain_BT, jnp.asarray(STARTS, jnp.int32), cache)
        for b, path in enumerate(paths):
            logits[b, t] = output.logits_BTV[b, len(path) - 1]
    return logits


ORDERS = [*((scheme, "default") for scheme in SCHEMES), ("relative", "cpu"), ("n-grams", "cpu")]


@pytest.mark.parametrize("scheme, order", slow_but(ORDERS, ORDERS[0], *ORDERS[4:6], ORDERS[-1]))
def test_a_tree_in_one_call_equals_its_paths(scheme, order):
    model, weights = prepared(scheme, order)
    cache = cached_prompts(model, weights)
    tokens_BT = nodes()
    start_B = jnp.asarray(STARTS, jnp.int32)
    expected = score_paths(model, weights, cache, tokens_BT)
    block = block_of(PARENTS, STARTS)
    output = call(model, weights, tokens_BT, start_B, cache, block=block)
    assert_allclose(output.logits_BTV, expected, atol=1e-5)
    causal = call(model, weights, tokens_BT, start_B, cache, block=CHAIN)
    assert np.abs(causal.logits_BTV - expected)[:, 3:].max(-1).min() > 1e-3, (
        "the control: other ancestors"
    )

    # Once the accepted path is compacted, the next call equals that of a chain.
    kept = compact(model, output.cache, start_B, jnp.asarray(PATHS, jnp.int32), PARENTS.shape[1])
    chain_BT = np.take_along_axis(tokens_BT, np.array(PATHS), axis=1)
    chained = call(model, weights, chain_BT, start_B, cache).cache
    after_BT = np.random.default_rng(3).integers(0, 64, (2, 4), dtype=np.int32)
    wanted = call(model, weights, after_BT, start_B + 4, chained).logits_BTV
    assert_allclose(call(model, weights, after_BT, start_B + 4, kept).logits_BTV, wanted, atol=1e-5)
    unmoved = call(model, weights, after_BT, start_B + 4, output.cache).logits_BTV
    assert np.abs(unmoved - wanted).max() > 1e-3, "the control: nothing was moved"


@pytest.mark.parametrize("scheme", ["rotary", "relative, windowed", "n-grams"])
def test_a_tree_may_be_scored_in_several_calls(scheme):
    """Drafters that grow a tree do so: the later call sees slots of the earlier call, R > T."""
    model, weights = prepared(scheme)
    cache = cached_prompts(model, weights)
    tokens_BT = nodes()
    start_B = jnp.asarray(STARTS, jnp.int32)
    block = block_of(PARENTS, STARTS)
    whole = call(model, weights, tokens_BT, start_B, cache, block=block).logits_BTV
    for first, last in ((0, 3), (3, 6)):
        part = Block(
            start_B=block.start_B,
            positions_BT=block.positions_BT[:, first:last],
            visible_BTR=block.visible_BTR[:, first:last],
        )
        output = call(model, weights, tokens_BT[:, first:last], start_B + first, cache, block=part)
        cache = output.cache
        assert_allclose(output.logits_BTV, whole[:, first:last], atol=1e-5)
