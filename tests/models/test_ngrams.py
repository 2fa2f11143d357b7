"""Embeddings of n-grams: the same in one call, in pieces, and against a sum written out token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp.models import ngrams
from specsamp.models.config import TransformerConfig
from specsamp.models.transformer import WEIGHT_ORDERS, TransformerLM
from support.extras import slow_but
from support.weights import drawn_params

ROWS, SLOTS = 97, 24


def make(order=3, **changes):
    shape = dict(vocab_size=40, width=16, num_layers=1, num_heads=2, positions="rotary")
    return TransformerLM(TransformerConfig(**shape, ngram_rows=ROWS, ngram_order=order), **changes)


@pytest.mark.parametrize("order", WEIGHT_ORDERS)
@pytest.mark.parametrize("batch", slow_but([1, 3], 3))
def test_pieces_give_the_logits_of_the_whole(batch, order):
    """The tokens before a call come from the cache, at each row's own offset; taken-back ones are overwritten."""
    model = make(weight_order=order)
    params = drawn_params(model)
    tables = [name for name in params if name.startswith("ngrams")]
    params |= {name: jax.random.normal(jax.random.key(i), params[name].shape) for i, name in enumerate(tables)}
    tokens_BT = jax.random.randint(jax.random.key(1), (batch, 12 + batch), 0, 40)
    whole = model.forward(params, tokens_BT).logits_BTV
    weights, cache = model.fit_slots(model.prepare(params), SLOTS), model.init_cache(batch, SLOTS)
    step = jax.jit(model.__call__)
    wrong_BT = (tokens_BT + 1) % 40
    for tokens, first, last in [(tokens_BT, 0, 5), (wrong_BT, 5, 9), (tokens_BT, 5, 6), (tokens_BT, 6, 12)]:
        # Row b is b tokens ahead of row 0, except at the beginning.
        start_B = first + (jnp.arange(batch, dtype=jnp.int32) if first else jnp.zeros((batch,), jnp.int32))
        end = last - first + (0 if first else batch)
        rows = [slice(int(start), int(start) + end) for start in start_B]

        def cut(x):
            return jnp.stack([x[b, row] for b, row in enumerate(rows)])

        output = step(weights, cut(tokens), start_B, cache)
        cache = output.cache
        if tokens is tokens_BT:
            np.testing.assert_allclose(output.logits_BTV, cut(whole), atol=1e-5)
        else:
            assert np.abs(output.logits_BTV - cut(whole)).max() > 1e-2


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
