"""A model in three calls equals one call; embeddings of n-grams."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import TransformerLM
from specsamp.models import ngrams
from specsamp.models.config import tiny
from support.enumeration import COMPILE_FAST
from support.weights import drawn_params

SLOTS = 16
MODELS = {
    "relative": tiny(num_layers=3, num_kv_heads=2, ngram_rows=32, logit_cap=5.0),
    "learned": tiny(
        num_layers=3,
        positions="learned",
        max_positions=SLOTS,
        norm="layer",
        tied=False,
        num_real_tokens=60,
    ),
    "rotary": tiny(
        num_layers=3, positions="rotary", embedding_scale=3.0, window=4, window_rotary_base=100.0
    ),
}


def make(config, order="default"):
    model = TransformerLM(config, order)
    params = drawn_params(model)
    return model, params, model.fit_slots(model.prepare(params), SLOTS)


@pytest.mark.parametrize(
    "name, order", [("relative", "default"), ("learned", "cpu"), ("rotary", "default")]
)
def test_three_calls_are_one(name, order):
    """Logits, caches and hidden states are bitwise equal, with the layers split into two calls."""
    model, _, weights = make(MODELS[name], order)
    assert (model.num_layers, model.width) == (3, 32)
    tokens_BT = jax.random.randint(jax.random.key(1), (2, 5), 0, 60)
    start_B = jnp.array([0, 4])
    cache = model.init_cache(2, SLOTS)

    def whole(weights, cache):
        return model(weights, tokens_BT, start_B, cache, hidden_layers=(3, 0, 2))

    def in_parts(weights, cache):
        x_BTD, cache = model.embed(weights, tokens_BT, start_B, cache)
        x_BTD, cache, first = model.layers(weights, x_BTD, start_B, cache, 0, 2, hidden_layers=(0,))
        x_BTD, cache, others = model.layers(
            weights, x_BTD, start_B, cache, 2, 3, hidden_layers=(2, 3)
        )
        return model.unembed(weights, x_BTD), cache, (others[1], first[0], others[0])

    one, parts = (
        jax.jit(f, compiler_options=COMPILE_FAST)(weights, cache) for f in (whole, in_parts)
    )
    jax.tree.map(np.testing.assert_array_equal, (one.logits_BTV, one.cache, one.hidden), parts)
    assert one.hidden[0].shape == (2, 5, 32)


def test_part_of_layers_keeps_other_caches():
    model, _, weights = make(MODELS["relative"])
    x_BTD, cache = model.embed(
        weights, jnp.array([[1, 2]]), jnp.array([3]), model.init_cache(1, SLOTS)
    )
    assert cache.tokens_BS.tolist() == [[0, 0, 0, 1, 2] + [0] * 11]
    _, after, hidden = model.layers(weights, x_BTD, jnp.array([3]), cache, 1, 2)
    written = [bool(np.any(layer.values_BMSH)) for layer in after.layers]
    assert written == [False, True, False] and hidden == ()


@pytest.mark.parametrize(
    "first, last, hidden_layers, message",
    [
        (
            0,
            2,
            (2,),
            r"hidden_layers names layer 2, but a call of layers below 2 has \(-1, 0, 1\); a call",
        ),
        (0, 3, (4,), r"layer 4, .* has \(-1, 0, 1, 2\)"),
    ],
)
def test_missing_layers_are_refused(first, last, hidden_layers, message):
    model, _, weights = make(MODELS["rotary"])
    x_BTD = jnp.zeros((1, 2, 32))
    start_B = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=message):
        model.layers(
            weights,
            x_BTD,
            start_B,
            model.init_cache(1, 4),
            first,
            last,
            hidden_layers=hidden_layers,
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
