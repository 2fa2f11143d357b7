"""Training of heads: the training-time test sees what decoding sees, and what it learns is what decoding accepts."""

import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from specsamp.mesh.layout import make_mesh
from specsamp.models.config import tiny
from specsamp.models.eagle import Eagle3Config
from specsamp.models.heads import DRAFT_IDS, FeatureHead
from specsamp.models.mtp import MTPConfig
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.warp import chain, temperature, top_p
from specsamp.training.data import Windows
from specsamp.training.eagle import TrainHead, most_frequent
from specsamp.training.evaluate import evaluate
from specsamp.training.trainer import Intervals, TrainConfig, init_state, train, train_step

V, LENGTH, LAYERS, STEPS = 16, 12, 3, 3
TARGET = TransformerLM(tiny(vocab_size=V, width=16, num_layers=LAYERS, num_heads=2, positions="rotary"))
LAYER = dataclasses.replace(TARGET.config, num_layers=1, num_kv_heads=1, gated=True, activation="silu", tied=False)
SHAPE = dict(target_layers=LAYERS, layer=LAYER)
HEAD = FeatureHead(Eagle3Config(**SHAPE, hidden_layers=(0, 1, 2)))
REDUCED = FeatureHead(Eagle3Config(**SHAPE, hidden_layers=(0, 1, 2), draft_vocab_size=10, own_output=True))
MODULE = FeatureHead(MTPConfig(**SHAPE, hidden_layers=(LAYERS,)))
IDS = np.array([0, 1, 2, 4, 5, 7, 8, 11, 13, 15], np.int32)
TASK = TrainHead(head=HEAD, target=TARGET, test_steps=STEPS)
KEY = jax.random.key(0)


def noisy_cycle(rows=120):
    """A text whose next token follows from the last two, with some noise."""
    random, text = np.random.default_rng(0), [1, 2]
    for _ in range(rows * LENGTH):
        text.append((5 * text[-1] + text[-2] + 3) % V if random.random() < 0.9 else int(random.integers(V)))
    return np.array(text, np.int32)


DATA = Windows(noisy_cycle(), LENGTH)
HELD_OUT = DATA.in_order()[:16]
TOKENS = jnp.asarray(HELD_OUT[:2])


@pytest.fixture(scope="module")
def target_params():
    return TARGET.init(jax.random.key(5))


def decoded_logits(head, params, target_params, tokens_T, row, step):
    """Returns the head's logits after the true features of rows up to ``row`` and ``step`` features of its own."""
    weights, target_weights = head.prepare(params), TARGET.prepare(target_params)
    output = TARGET.forward(target_params, tokens_T[None, :-1], hidden_layers=head.hidden_layers)
    embedded = TARGET.embed(target_weights, tokens_T[None], jnp.zeros(1, jnp.int32), None)[0]
    features = head.fuse(weights, output.hidden)[:, : row + 1]
    cache = head.init_cache(1, 32)
    returned, cache = head(weights, embedded[:, 1 : row + 2], features, jnp.zeros(1, jnp.int32), cache)
    for i in range(1, step + 1):
        own = returned[:, -1:]
        returned, cache = head(weights, embedded[:, row + 1 + i : row + 2 + i], own, jnp.full(1, row + i), cache)

    def of_target(x):
        return TARGET.unembed_normed(target_weights, x)

    return head.expand(weights, head.logits(weights, returned[:, -1:], of_target))[0, 0]


@pytest.mark.parametrize("head", [HEAD, REDUCED, MODULE], ids=["eagle3", "reduced", "mtp"])
def test_a_step_sees_what_decoding_would_see(head, target_params, monkeypatch):
    """The logits of every step and row are those of the loop's calls, and are compared with the target's right row."""
    ids = IDS if head.config.draft_vocab_size else None
    params = head.init(jax.random.key(1))
    if ids is not None:
        params = params | {DRAFT_IDS: jnp.asarray(ids)}
    task = TrainHead(head=head, target=TARGET, test_steps=STEPS)
    trained = {name: leaf for name, leaf in params.items() if name != DRAFT_IDS}
    weights = head.training_weights(trained, None if ids is None else jnp.asarray(ids))
    stream, features = task._steps(weights, target_params, TOKENS)

    def of_target(x):
        return TARGET.unembed_normed({"params": target_params}, x)

    expected = TARGET.forward(target_params, TOKENS[:, :-1]).logits_BTV
    np.testing.assert_allclose(TARGET.read_out(target_params, stream), expected, atol=1e-5)
    for step, row in ((0, 0), (0, 7), (1, 0), (1, 5), (2, 3), (2, 8)):
        logits = head.expand(weights, head.logits(weights, features[step], of_target))[1, row + 1 + step]
        wanted = decoded_logits(head, params, target_params, TOKENS[1], row, step)
        np.testing.assert_allclose(logits, wanted, atol=1e-5)
