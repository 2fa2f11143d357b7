"""Assistants of Gemma 4 are read, score as in transformers, and fit their target."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specsamp import TransformerLM
from specsamp.checkpoints.head_config import parse_head
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params
from specsamp.checkpoints.public_heads import ORDER, open_head, read_head
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard_head, shard_model
from support import golden, golden_heads
from support.refusals import refusal

DESCRIBED, ARRAYS = golden_heads.read("gemma4", golden_heads.ASSISTANT.parent)
EXPECTED = ARRAYS["logits"]
LENGTHS, DRAFTED, SLOTS = (2, 5, 13, 24), (7, 11), 40  # of the golden file
CLOSE = 2e-5  # of the largest logit; measured: 1.2e-5 for the third token


def write(folder, **changes):
    tensors = {
        name: golden.weights(name, tuple(shape))
        for name, shape in DESCRIBED["shapes"].items()
        if changes.get("use_ordered_embeddings", True) or "centroids" not in name
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DESCRIBED["config"] | changes))
    save_file(tensors | {ORDER: ARRAYS["order"]}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = golden.read("gemma4").write_checkpoint(tmp_path_factory.mktemp("target"))
    return open_checkpoint(folder, dtype="float32")


def opened(checkpoint, folder, **changes):
    return open_head(write(folder / "head", **changes), checkpoint.config, dtype="float32")


def score(checkpoint, found, vocabulary=96, mesh=None):
    """Returns the logits of three tokens after each prefix, as in the golden file."""
    model = TransformerLM(dataclasses.replace(checkpoint.config, vocab_size=vocabulary))
    layer = dataclasses.replace(found.config.layer, vocab_size=vocabulary)
    head = dataclasses.replace(found.config, layer=layer).head()
    if mesh is not None:
        layout = Layout.tensor_parallel(mesh)
        model = shard_model(model, layout)
        head = shard_head(head, layout)
    weights = model.fit_slots(model.prepare(read_params(checkpoint, model)), SLOTS)
    draft = head.fit_slots(head.prepare(read_head(found, head)), SLOTS)
    tokens_BT, scored = golden.read("gemma4").tokens_BT, []
    start_B = jnp.zeros(2, jnp.int32)
    cache = model.init_cache(2, SLOTS)
    read = jax.jit(functools.partial(model, hidden_layers=head.hidden_layers))(
        weights, tokens_BT, start_B, cache
    )
    embed, run = jax.jit(model.embed), jax.jit(head)
    for length in LENGTHS:
        feature_B1W = read.hidden[0][:, length - 2 : length - 1]
        logits = []
        for k, token in enumerate((tokens_BT[:, length - 1 : length], *DRAFTED)):
            token_B1 = jnp.broadcast_to(jnp.asarray(token), (2, 1))
            embedded, _ = embed(weights, token_B1, start_B + length - 1 + k, read.cache)
            feature_B1W, logits_B1V = run(
                draft, embedded, feature_B1W, start_B + length, read.cache
            )
            logits.append(logits_B1V)
        scored.append(jnp.concatenate(logits, axis=1))
    return np.stack(scored)


def check(found, expected):
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    is_scored = np.isfinite(expected)
    difference = np.abs(found[is_scored] - expected[is_scored]).max()
    assert difference < CLOSE * np.abs(expected[is_scored]).max()


def test_logits_are_those_of_transformers(checkpoint, tmp_path):
    """Texts are shorter and longer than the window; five of twelve clusters are scored."""
    found = opened(checkpoint, tmp_path)
    assert found.config.read_layers == (2, 2, 3)
    check(score(checkpoint, found), EXPECTED)
    with pytest.raises(AssertionError):
        check(np.roll(EXPECTED, 1, axis=2), EXPECTED)


def test_without_centroids_all_tokens_are_scored(checkpoint, tmp_path):
    found = score(checkpoint, opened(checkpoint, tmp_path, use_ordered_embeddings=False))
    assert np.isfinite(found).all()
    check(np.where(np.isfinite(EXPECTED), found, -np.inf), EXPECTED)


def test_padded_vocabulary_on_a_mesh_scores_equal_logits(checkpoint, tmp_path):
    found = score(checkpoint, opened(checkpoint, tmp_path), 100, make_mesh(2, 4))
    check(found[..., :96], EXPECTED)
    assert np.isneginf(found[..., 96:]).all()


@pytest.mark.parametrize(
    "target, head, message",
    [
        ({"width": 16}, {}, "backbone_hidden_size = 32, but the target's width is 16"),
        ({"vocab_size": 95}, {}, "vocab_size = 96, but the target's vocabulary is 95"),
        ({"global_kv_heads": 2}, {}, r"layer 2 .* \(1, 16\); such .* \[\(2, 16\)\]: .* another"),
        ({"window": None, "global_layers": ()}, {}, r"layer 0 .* target have \[\]"),
        ({}, {"tie_word_embeddings": False}, "tie_word_embeddings = False; only True"),
        ({}, {"text_config": {"enable_moe_block": True}}, "text_config says enable_moe_block"),
        ({}, {"centroid_intermediate_top_k": 13}, "top_centroids"),
    ],
)
def test_an_assistant_of_another_target_is_refused(target, head, message, checkpoint):
    shape = dataclasses.replace(checkpoint.config, **{"window_rotary_base": None, **target})
    content = DESCRIBED["config"] | head
    with refusal(f"config.json.*{message}"):
        parse_head("config.json", content, shape, "float32", ())


def test_a_wrong_order_of_tokens_is_refused(checkpoint, tmp_path):
    folder = write(tmp_path / "head")
    tensors = load_file(folder / "model.safetensors") | {ORDER: np.zeros(96, np.int64)}
    save_file(tensors, folder / "model.safetensors")
    with refusal("does not have every token once"):
        open_head(folder, checkpoint.config, dtype="float32")
