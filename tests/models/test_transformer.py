"""All ways to call a model give the logits of one uncached pass, and that pass an oracle's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp.models import attention
from specsamp.models.config import tiny
from specsamp.models.positions import RotaryScaling
from specsamp.models.slots import MAX_UNROLLED_ROWS
from specsamp.models.transformer import WEIGHT_ORDERS, TransformerLM
from support.calls import call, forward, some_tokens, stale_cache
from support.extras import slow_but
from support.weights import drawn_params

LENGTH, SLOTS, CHUNK = 14, 20, 5  # of the sequences; of the cache, with headroom; of a round
CLOSE = 1e-5  # absolute, on logits of size one to five in float32

# Switches of the families of public checkpoints; tests/checkpoints compares each family with
# transformers.
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
    window=4,
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
    "grouped": tiny(num_kv_heads=2),
    "relative": tiny(window=4, num_kv_heads=1, num_real_tokens=60, tied=False, **BIASES),
}


@functools.cache
def model_and_params(scheme, kv_heads=4, **changes):
    """Returns a model whose parameters are all random, biases and norm scales too, so that none can
    be ignored unnoticed.
    """
    model = TransformerLM(tiny(positions=scheme, num_kv_heads=kv_heads, **changes))
    return model, drawn_params(model, seed=kv_heads, noise=0.15)


def at(*starts):
    return jnp.asarray(starts, jnp.int32)


def assert_close(actual, expected, atol=CLOSE):
    np.testing.assert_allclose(actual, expected, atol=atol, rtol=0)


# Sequences cut into calls.


@pytest.mark.parametrize("name", slow_but(MODELS, "gemma", "relative"))
def test_ragged_rounds_equal_the_uncached_pass(name):
    """As in speculative decoding, each row has its own start, and rejected tokens after the kept
    ones. N-gram embeddings read the tokens before a call from the cache.
    """
    order = WEIGHT_ORDERS[name in ("gemma", "neox")]
    model = TransformerLM(dataclasses.replace(MODELS[name], ngram_rows=32), order)
    params = drawn_params(model, noise=0.15)
    rng, rows = np.random.default_rng(44), np.arange(3)
    tokens = np.concatenate(
        [some_tokens(3, LENGTH), some_tokens(3, SLOTS - LENGTH, seed=1)], axis=1
    )
    whole = forward(model, params, tokens[:, :LENGTH])
    expected = np.asarray(whole.logits_BTV)
    assert whole.cache is None and expected.dtype == np.float32 and np.std(expected[..., :60]) > 0.5
    weights = model.fit_slots(model.prepare(params), SLOTS)
    cache = stale_cache(model, SLOTS)
    lengths, widths_seen, spreads = np.zeros(3, int), set(), set()
    while (lengths < LENGTH).any():
        width = int(rng.choice([1, CHUNK]))
        starts = np.minimum(np.maximum(lengths - rng.integers(0, 2, size=3), 0), LENGTH - 1)
        kept = np.minimum(rng.integers(1, width + 1, size=3), LENGTH - starts)
        fed = tokens[rows[:, None], starts[:, None] + np.arange(width)]
        fed = np.where(
            np.arange(width) < kept[:, None],
            fed,
            (fed + 1 + some_tokens(3, width, seed=7) % 63) % 64,
        )
        output = call(model, weights, fed, at(*starts), cache)
        cache = output.cache
        for b in rows:
            assert_close(
                output.logits_BTV[b, : kept[b]],
                expected[b, starts[b] : starts[b] + kept[b]],
                atol=5 * CLOSE,
            )
        lengths = np.maximum(lengths, starts + kept)
        widths_seen.add(width)
        spreads.add(int(np.ptp(starts)))
    assert widths_seen == {1, CHUNK} and max(spreads) >= 5


# Branches that depend on a size.


def test_more_rows_than_are_unrolled_equal_few_rows():
    """All rows together use a vmapped update and one product, the two halves neither."""
    model, params = model_and_params("rotary", 2)
    batch = MAX_UNROLLED_ROWS + 1
    length = attention.MAX_BATCHED_ROWS // batch + 1
    slots = length + batch
    weights = model.fit_slots(model.prepare(params), slots)
    tokens = some_tokens(batch, length)
    starts = jnp.arange(batch, dtype=jnp.int32)
    cache = stale_cache(model, slots, batch, size=1.0)
    together = call(model, weights, tokens, starts, cache)
    for rows in (slice(0, batch // 2 + 1), slice(batch // 2, batch)):
        part = call(
            model, weights, tokens[rows], starts[rows], jax.tree.map(lambda leaf: leaf[rows], cache)
        )
        assert_close(together.logits_BTV[rows], part.logits_BTV)
        jax.tree.map(
            lambda whole, leaf: assert_close(whole[rows], leaf), together.cache, part.cache
        )


# Logits of an oracle.


def oracle(config, params, tokens):
    """Returns the logits of one layer in NumPy float64, by a loop over heads, queries and keys."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    layer, attention = p["layer_0"], p["layer_0"]["attention"]
    length, size = len(tokens), config.head_size

    def norm(x, name):
        scale = (p if name == "final_norm" else layer)[name]["scale"]
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * scale

    def sinusoid(distance):
        angles = distance * 10_000.0 ** (-np.arange(0, config.width, 2) / config.width)
        return np.concatenate([np.sin(angles), np.cos(angles)])

    x = p["embedding"][tokens]
    normed, mixed = norm(x, "attention_norm"), np.zeros_like(x)
    for n in range(config.num_heads):
        m = n // (config.num_heads // config.num_kv_heads)
        for i in range(length):
            scores, values = [], []
            query = normed[i] @ attention["query"][n]
            for j in range(i + 1):
                key = normed[j] @ attention["key"][m]
                relative_key = sinusoid(i - j) @ attention["relative"][m]
                u = attention["content_bias"][n]
                v = attention["distance_bias"][n]
                scores.append((query + u) @ key + (query + v) @ relative_key)
                values.append(normed[j] @ attention["value"][m])
            probs = np.exp(np.array(scores) / np.sqrt(size))
            mixed[i] += probs / probs.sum() @ np.array(values) @ attention["output"][n]
    x = x + mixed
    inner = norm(x, "mlp_norm") @ layer["mlp"]["up"]
    inner = 0.5 * inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
    x = x + inner @ layer["mlp"]["down"]
    return norm(x, "final_norm") @ p["embedding"].T


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_relative_positions_equal_the_naive_loop(kv_heads):
    """checkpoints/test_golden.py compares rotary positions with transformers."""
    model, params = model_and_params("relative", kv_heads, num_layers=1)
    tokens = some_tokens(3, LENGTH)
    logits = forward(model, params, tokens).logits_BTV
    for b in range(2):
        assert_close(logits[b], oracle(model.config, params, tokens[b]))


@pytest.mark.parametrize("scheme, kv_heads", [("relative", 2), ("rotary", 1)])
def test_bfloat16_is_close_to_float32(scheme, kv_heads):
    """With 8 bits of mantissa, the root mean square error is below 2% of the logits' deviation."""
    model, params = model_and_params(scheme, kv_heads, num_layers=1)
    half, _ = model_and_params(scheme, kv_heads, num_layers=1, dtype="bfloat16")
    weights = half.fit_slots(half.prepare(params), SLOTS)
    tokens = some_tokens(3, LENGTH)
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype("bfloat16")}
    output = call(half, weights, tokens, at(0, 0, 0), stale_cache(half, SLOTS))
    assert output.logits_BTV.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(output.cache)} == {jnp.dtype("bfloat16")}
    expected = forward(model, params, tokens).logits_BTV
    for logits in (output.logits_BTV, forward(half, params, tokens).logits_BTV):
        assert np.sqrt(np.mean((logits - expected) ** 2)) < 0.02 * np.std(expected)
        assert np.abs(logits - expected).max() > 1e-4  # not computed in float32
