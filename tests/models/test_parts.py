"""A part of a model's layers; embeddings of n-grams. Parts together: mesh/test_sharded.py."""

import jax.numpy as jnp
import numpy as np

from specsamp import TransformerLM
from specsamp.models import ngrams
from specsamp.models.config import tiny
from support.refusals import refused_arguments
from support.weights import drawn_params

SLOTS = 16
MODEL = TransformerLM(tiny(num_layers=3, num_kv_heads=2, ngram_rows=32))
PARAMS = drawn_params(MODEL)


def run_layers(first, last, hidden_layers=()):
    """Returns the cache before these layers, and their results."""
    weights = MODEL.fit_slots(MODEL.prepare(PARAMS), SLOTS)
    start_B = jnp.array([3])
    x_BTD, cache = MODEL.embed(weights, jnp.array([[1, 2]]), start_B, MODEL.init_cache(1, SLOTS))
    options = dict(hidden_layers=hidden_layers)
    return cache, MODEL.layers(weights, x_BTD, start_B, cache, first, last, **options)


def test_part_of_layers_keeps_other_caches():
    cache, (_, after, hidden) = run_layers(1, 2)
    assert cache.tokens.tokens_BS.tolist() == [[0, 0, 0, 1, 2] + [0] * 11]
    written = [bool(np.any(layer.values_BMSH)) for layer in after.layers]
    assert written == [False, True, False] and hidden == ()


test_refused_layers = refused_arguments(
    run_layers,
    {
        r"names layer 2, but a call of layers below 2 has \(-1, 0, 1\); a call": dict(
            first=0, last=2, hidden_layers=(2,)
        ),
        r"layer 4, .* has \(-1, 0, 1, 2\)": dict(first=0, last=3, hidden_layers=(4,)),
    },
)


# N-grams.


def test_ngram_adds_only_its_hash_row():
    """Equal n-grams share a row at any position; a different order or length has its own."""
    context_BX = jnp.asarray([[-1, -1, 7, 8, 9, 8, 7, 8, 9]])
    bigrams, trigrams = (
        np.asarray(ngrams.rows_of(context_BX, order, 1 << 20)[0]) for order in (2, 3)
    )
    assert len(bigrams) == 8 and len(trigrams) == 7
    assert bigrams[2] == bigrams[6] and bigrams[3] == bigrams[7]  # 7 8 and 8 9, twice each
    assert trigrams[2] == trigrams[6] and len(set(trigrams.tolist())) == 6
    assert bigrams[2] != bigrams[5]  # 7 8 is not 8 7
    assert not set(bigrams.tolist()) & set(trigrams.tolist())
