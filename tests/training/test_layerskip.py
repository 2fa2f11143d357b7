"""LayerSkip: the schedules and weights of the paper, dropped layers, and the loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from specsamp import TransformerLM
from specsamp.models.config import tiny
from specsamp.training.layerskip import LayerSkip, loss_weights, read_layers
from specsamp.training.training_task import TrainModel
from support.refusals import refused_arguments
from support.weights import drawn_params

V, LENGTH = 16, 12
MODEL = TransformerLM(tiny(vocab_size=V, width=16, num_layers=4, num_heads=2, positions="rotary"))
TASK = LayerSkip(model=MODEL, steps=150, rotation=2, exit_scale=1.0)
KEY = jax.random.key(0)
HELD_OUT = np.random.default_rng(0).integers(0, V, (16, LENGTH + 1))
TWO_DECIMALS = {"atol": 5.1e-5}  # of numbers given to four decimals


def test_weights_of_eight_layers():
    """Weights are checked for all layers, and for the layers that the loss reads."""
    expected = [0, 0.0089, 0.0268, 0.0536, 0.0893, 0.1339, 0.1875, 0.5]
    assert_allclose(loss_weights(0.2, jnp.ones(8, bool)), expected, **TWO_DECIMALS)
    is_read = jnp.zeros(8, bool).at[jnp.array([0, 4, 7])].set(True)
    assert_allclose(loss_weights(0.2, is_read) * 13.2, [0, 0, 0, 0, 2, 0, 0, 11.2], atol=1e-5)


def test_dropout_of_eight_layers():
    expected = np.array([0, 0.1041, 0.2190, 0.3459, 0.4860, 0.6407, 0.8114, 1])
    scratch = LayerSkip(model=TransformerLM(tiny(num_layers=8)), steps=101, dropout=0.2)
    tuned = dataclasses.replace(scratch, from_scratch=False)
    for step, scale in ((0, 0), (50, 2**0.5 - 1), (100, 1)):
        assert_allclose(scratch.dropout_at(step), 0.2 * scale * expected, **TWO_DECIMALS)
        assert_allclose(tuned.dropout_at(step), 0.2 * expected, **TWO_DECIMALS)


def test_layers_are_read_by_curriculum():
    """Eight layers, a rotation of four, a hundred steps."""
    for curriculum, step, expected in (
        ("rotational", 1, [1, 5, 7]),
        ("rotational", 7, [3, 7]),
        ("gradual", 0, [7]),
        ("gradual", 10, [6, 7]),
        ("gradual", 25, [4, 5, 6, 7]),
        ("gradual", 99, list(range(8))),
    ):
        assert (
            np.flatnonzero(read_layers(curriculum, 8, jnp.int32(step), 100, 4)).tolist() == expected
        )


@pytest.fixture(scope="module")
def params():
    return drawn_params(MODEL, 5)


# Compiled whole: operation by operation there would be dozens of programs.
forward = jax.jit(TransformerLM.forward, static_argnums=0, static_argnames="hidden_layers")
forward_streams = jax.jit(TransformerLM.forward_streams, static_argnums=(0, 3))


def test_a_dropped_layer_passes_its_input_on(params):
    """Each row drops its own layers without scaling; later layers compute as in a smaller model."""
    tokens = jnp.asarray(HELD_OUT[:3, :-1])
    kept = jnp.array([[True] * 4, [True, False, True, False], [False] * 4])
    whole = forward(MODEL, params, tokens, hidden_layers=(0, 1, 2, 3)).hidden
    streams = forward_streams(MODEL, params, tokens, (0, 1, 2, 3), kept_BL=kept)
    for made, expected in zip(streams, whole, strict=True):
        assert_allclose(made[0], expected[0], atol=1e-6)
    assert_array_equal(streams[1][1], streams[0][1])
    assert_array_equal(streams[3][1], streams[2][1])
    two_layers = TransformerLM(dataclasses.replace(MODEL.config, num_layers=2))
    without = {**params, "layer_1": params["layer_2"]}
    left = {k: v for k, v in without.items() if k not in ("layer_2", "layer_3")}
    (last,) = forward_streams(two_layers, left, tokens, (1,))
    assert_allclose(streams[3][1], last[1], atol=1e-6)
    assert_array_equal(streams[3][2], streams[0][2])


def test_every_row_drops_layers_of_its_own(params, monkeypatch):
    """Layers are dropped at their rates, the first never, and anew in the next microbatch."""
    seen = []

    def forward_streams(self, params, tokens_BT, layers, *, kept_BL):
        seen.append(kept_BL)
        return (jnp.zeros((*tokens_BT.shape, 16)),) * len(layers)

    monkeypatch.setattr(TransformerLM, "forward_streams", forward_streams)
    task = dataclasses.replace(TASK, dropout=0.6, from_scratch=False)
    rows = np.zeros((4000, 3), np.int32)
    for seed in range(2):
        task.loss(params, None, rows, jax.random.key(seed))
    dropped = 1 - np.asarray(seen[0]).mean(0)
    assert_allclose(dropped, task.dropout_at(0), atol=0.04)
    assert dropped[0] == 0 and np.any(seen[0] != seen[1])
    together = (~seen[0][:, 2] & ~seen[0][:, 3]).mean()
    assert abs(together - dropped[2] * dropped[3]) < 0.03  # layers are dropped independently


def test_the_loss_is_the_weighted_sum(params):
    """So is its gradient; training from scratch drops no layer at the first step."""
    rows = jnp.asarray(HELD_OUT[:4])

    def by_hand(params):
        streams = MODEL.forward(params, rows[:, :-1], hidden_layers=(0, 1, 2, 3)).hidden
        total = 0.0
        for layer, weight in ((2, 3.0), (3, 6.0)):  # s = 1: l (l+1) / 2, and 3 + 2 * 3 / 2
            log_probs = jax.nn.log_softmax(MODEL.read_out(params, streams[layer]))
            total -= weight / 9 * jnp.take_along_axis(log_probs, rows[:, 1:, None], axis=-1).mean()
        return total

    (loss, metrics), grads = jax.jit(jax.value_and_grad(TASK.loss, has_aux=True))(
        params, None, rows, KEY, 2
    )
    expected, expected_grads = jax.jit(jax.value_and_grad(by_hand))(params)
    assert_allclose(loss, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=1e-5), grads, expected_grads)
    assert_allclose(
        metrics["text_loss"], jax.jit(TrainModel(MODEL).loss)(params, None, rows, KEY)[0], rtol=1e-5
    )


FLAT = TransformerLM(tiny(num_layers=1))
make = functools.partial(
    LayerSkip, model=TransformerLM(tiny(num_layers=4)), steps=150, rotation=2, exit_scale=1.0
)

test_refused_layer_skips = refused_arguments(
    make,
    {
        "curriculum must be one of rotational, gradual; got 'random'": dict(curriculum="random"),
        "dropout must be a number from 0 to 1; got 1.5": dict(dropout=1.5),
        "rotation must be an integer >= 1 .*; got 0": dict(rotation=0),
        "a model of one layer has no earlier exit": dict(model=FLAT),
    },
)
