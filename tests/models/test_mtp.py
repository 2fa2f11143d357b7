"""Modules for multi-token prediction against the formula, in NumPy and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.heads import mtp

T, D, HEADS = 5, 8, 2


def norm(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def turn(x_TH):
    angles = np.arange(T)[:, None] * 10_000.0 ** (-np.arange(2) / 2)[None]
    first, second = x_TH[:, :2], x_TH[:, 2:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)


def by_formula(params, embedded, hidden, hidden_first):
    """The stream that leaves the layer."""
    parts = [norm(embedded, params["token_norm"]["scale"]), norm(hidden, params["hidden_norm"]["scale"])]
    x = np.concatenate(parts[::-1] if hidden_first else parts, axis=1) @ params["fc"]
    attention, a = params["attention"], norm(x, params["attention_norm"]["scale"])
    keys, values = turn(a @ attention["key"][0]), a @ attention["value"][0]
    mixed = np.zeros_like(x)
    for n in range(HEADS):
        scores = turn(a @ attention["query"][n]) @ keys.T / 2
        weights = np.exp(np.where(np.tri(T, dtype=bool), scores, -np.inf))
        mixed += weights / weights.sum(1, keepdims=True) @ values @ attention["output"][n]
    y = x + mixed
    m, mlp = norm(y, params["mlp_norm"]["scale"]), params["mlp"]
    gate = m @ mlp["gate"]
    return y + (gate / (1 + np.exp(-gate)) * (m @ mlp["up"])) @ mlp["down"]


@pytest.mark.parametrize("hidden_first", [False, True])
@pytest.mark.parametrize("norm_output", [False, True])
def test_the_formula(hidden_first, norm_output):
    head = mtp(16, hidden_first=hidden_first, norm_output=norm_output)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(head.init, jax.random.key(0))
    params = jax.tree.map(lambda x: rng.normal(size=x.shape) * 0.5 + (x.ndim == 1), shapes)
    embedded, hidden = rng.normal(size=(2, T, D))
    weights = head.prepare(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params))
    rows = (jnp.asarray(x, jnp.float32)[None] for x in (embedded, hidden))
    returned, _ = head(weights, *rows, jnp.zeros(1, jnp.int32), None)
    expected = by_formula(params, embedded, hidden, hidden_first)
    normed = norm(expected, params["final_norm"]["scale"])
    np.testing.assert_allclose(returned[0], normed if norm_output else expected, atol=1e-5, rtol=1e-5)
    logits = head.logits(weights, returned, lambda x_BTD: x_BTD)  # what the target's output multiplies by
    np.testing.assert_allclose(logits[0], normed, atol=1e-5, rtol=1e-5)


def test_more_than_one_hidden_state_is_refused():
    with pytest.raises(ValueError, match=r"reads one hidden state; got hidden_layers \(0, 1\)"):
        mtp(16, hidden_layers=(0, 1))
