"""Embeddings of n-grams: the same in one call, in pieces, and against a sum written out token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp.models import ngrams
from specsamp.models.config import tiny
from specsamp.models.transformer import WEIGHT_ORDERS, TransformerLM
from support.weights import drawn_params


@pytest.mark.parametrize("order", WEIGHT_ORDERS)
def test_pieces_give_the_logits_of_the_whole(order):
    """One sequence, whose tokens are read without a gather; several are in test_switches.py."""
    model = TransformerLM(tiny(num_layers=1, positions="rotary", ngram_rows=97), order)
    params, tokens_BT = drawn_params(model), np.arange(12, dtype=np.int32)[None] * 7 % 64
    params |= {name: jax.random.normal(jax.random.key(0), params[name].shape) for name in ("ngrams_2", "ngrams_3")}
    whole = model.forward(params, tokens_BT).logits_BTV
    weights, cache, step = model.prepare(params), model.init_cache(1, 24), jax.jit(model.__call__)
    for first, last in ((0, 6), (6, 12)):
        output = step(weights, tokens_BT[:, first:last], jnp.array([first]), cache)
        cache = output.cache
        np.testing.assert_allclose(output.logits_BTV, whole[:, first:last], atol=1e-5)
    alone = step(weights, tokens_BT[:, 6:], jnp.array([6]), dataclasses.replace(cache, tokens_BS=0 * cache.tokens_BS))
    assert np.abs(alone.logits_BTV - whole[:, 6:]).max() > 1e-2, "the control: tokens before the call are forgotten"


def test_an_ngram_adds_the_row_of_its_hash_alone():
    """Order, place and distance count; equal n-grams share a row wherever they stand."""
    context_BX = jnp.asarray([[-1, -1, 7, 8, 9, 8, 7, 8, 9]])
    bigrams, trigrams = (np.asarray(ngrams.rows_of(context_BX, order, 1 << 20)[0]) for order in (2, 3))
    assert len(bigrams) == 8 and len(trigrams) == 7
    assert bigrams[2] == bigrams[6] and bigrams[3] == bigrams[7]  # 7 8 and 8 9, twice each
    assert trigrams[2] == trigrams[6] and len(set(trigrams.tolist())) == 6
    assert bigrams[2] != bigrams[5]  # 7 8 is not 8 7
    assert not set(bigrams.tolist()) & set(trigrams.tolist())


def test_rows_spread_evenly():
    """A million bigrams over 1024 rows: the fullest has not twice its share, and all rows are used."""
    pairs = jnp.stack(jnp.meshgrid(jnp.arange(1000), jnp.arange(1000)), -1).reshape(-1, 2)
    counts = np.bincount(np.asarray(ngrams.rows_of(pairs, 2, 1024)[:, 0]), minlength=1024)
    assert counts.min() > 0.5 * 1e6 / 1024 and counts.max() < 2 * 1e6 / 1024
