"""What the families of public checkpoints do otherwise: every switch matters, costs no cache bug,
and can be split.

That a switch computes what its family means is tested against transformers, in tests/checkpoints.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp.models.config import tiny
from specsamp.models.positions import RotaryScaling
from specsamp.models.transformer import TransformerLM
from support.calls import call, forward, some_tokens, stale_cache
from support.extras import slow_but
from support.weights import drawn_params

LENGTH, CHUNK, SLOTS, WINDOW = 15, 5, 20, 4
CLOSE = 1e-5

SCALING = RotaryScaling(kind="llama3", factor=4.0, original_positions=16)
GEMMA = dict(
    gated=True,
    norm_offset=True,
    post_norms=True,
    embedding_scale=5.0,
    attention_cap=2.0,
    logit_cap=3.0,
    attention_scale=0.3,
    query_key_norm=True,
    window=WINDOW,
    global_layers=(1,),
    window_rotary_base=100.0,
    rotary_scaling=SCALING,
)
BIASES = dict(attention_bias=True, output_bias=True, feedforward_bias=True)
MODELS = {
    "gemma": tiny(positions="rotary", num_kv_heads=2, **GEMMA),
    "gpt2": tiny(positions="learned", norm="layer", max_positions=16, **BIASES),
    "neox": tiny(
        positions="rotary",
        norm="layer",
        parallel=True,
        rotary_size=4,
        tied=False,
        gated=True,
        **BIASES,
    ),
    "relative": tiny(window=WINDOW, num_kv_heads=1, num_real_tokens=60, tied=False, **BIASES),
}
every_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


def assert_close(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), atol=CLOSE * 5, rtol=0)


@pytest.mark.parametrize("name", slow_but(MODELS, "gemma", "gpt2"))
def test_taking_tokens_back_equals_never_having_gone_there(name):
    """Each row begins anew at another place, before, on and behind the window's edge; in both
    weight orders.

    Embeddings of n-grams are added, so that tokens before a call are read from the cache.
    """
    config = dataclasses.replace(MODELS[name], ngram_rows=32)
    params = drawn_params(TransformerLM(config), noise=0.3)
    first, other, starts = some_tokens(3, LENGTH), some_tokens(3, CHUNK, seed=5), (2, 5, 9)
    straight = first.copy()
    for b, start in enumerate(starts):
        straight[b, start : start + CHUNK] = other[b]
    expected = forward(TransformerLM(config), params, straight).logits_BTV
    for model in (TransformerLM(config), TransformerLM(config, weight_order="cpu")):
        weights, cache = model.fit_slots(model.prepare(params), SLOTS), stale_cache(model, SLOTS)
        for start in range(0, LENGTH, CHUNK):
            cache = call(
                model, weights, first[:, start : start + CHUNK], jnp.full(3, start), cache
            ).cache
        logits = call(model, weights, other, jnp.asarray(starts), cache).logits_BTV
        for b, start in enumerate(starts):
            assert_close(logits[b], expected[b, start : start + CHUNK])


@every_model
def test_a_window_is_exactly_that_wide(config):
    """The token just outside of it changes nothing, the last one inside does."""
    if config.window is None:
        config = dataclasses.replace(config, window=WINDOW)
    config = dataclasses.replace(config, num_layers=1, global_layers=())
    params = drawn_params(TransformerLM(config), noise=0.3)
    tokens = some_tokens(1, LENGTH)

    def score(tokens):
        return np.asarray(forward(TransformerLM(config), params, tokens).logits_BTV[0, :, :50])

    changed = tokens.copy()
    changed[0, 3] = (changed[0, 3] + 1) % 60
    differs = np.abs(score(changed) - score(tokens)).max(-1) > 1e-4
    np.testing.assert_array_equal(np.flatnonzero(differs), np.arange(3, 3 + WINDOW))


def test_scratch_slots_beyond_learned_positions_do_no_harm():
    config = MODELS["gpt2"]
    model, tokens = TransformerLM(config), some_tokens(1, 8)
    output = call(
        model,
        model.fit_slots(model.prepare(drawn_params(model, noise=0.3)), SLOTS),
        tokens,
        jnp.asarray([12]),
        stale_cache(model, SLOTS, 1),
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(output))
