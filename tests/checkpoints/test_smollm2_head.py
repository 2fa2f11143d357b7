"""The shipped head for SmolLM2-135M-Instruct; this target is not shipped."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
from safetensors import safe_open

from configs import hf
from launch.lib.fields import ExperimentConfig
from launch.lib.shapes import head_of
from specsamp import TransformerConfig
from specsamp.checkpoints.hub import ASSETS, find_folder
from specsamp.checkpoints.public_heads import open_head, read_head

FOLDER = ASSETS / "smollm2-head"
TARGET = TransformerConfig(
    vocab_size=49_152,
    width=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    feedforward_width=1536,
    max_positions=8192,
    positions="rotary",
    rotary_base=100_000.0,
    gated=True,
    activation="silu",
)


def read_tensors():
    with safe_open(FOLDER / "model.safetensors", framework="flax") as file:
        return {name: np.asarray(file.get_tensor(name), np.float64) for name in file.keys()}


def normed(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * scale


def rotated(x_TNH, base=100_000.0):
    """Rotates halves, as for Llama's files."""
    half = x_TNH.shape[-1] // 2
    angles_TH = np.arange(len(x_TNH))[:, None] * base ** (-np.arange(half) / half)
    cos = np.cos(angles_TH)[:, None]
    sin = np.sin(angles_TH)[:, None]
    first, second = x_TNH[..., :half], x_TNH[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def logits_by_numpy(embedded_TD, hidden):
    """Returns the logits of one text, computed from the file as the package speculators does."""
    w = read_tensors()
    layer = {name[9:]: tensor for name, tensor in w.items() if name.startswith("layers.0.")}
    features_TD = np.concatenate(hidden, axis=-1) @ w["fc.weight"].T
    residual_TD = normed(features_TD, layer["hidden_norm.weight"])
    tokens_TD = normed(embedded_TD, layer["input_layernorm.weight"])
    x_TX = np.concatenate([tokens_TD, residual_TD], axis=-1)
    q, k, v = (
        (x_TX @ layer[f"self_attn.{name}_proj.weight"].T).reshape(len(x_TX), -1, 64)
        for name in "qkv"
    )
    k, v = (np.repeat(x, 3, axis=1) for x in (rotated(k), v))
    scores_NTS = np.einsum("tnh,snh->nts", rotated(q), k) / 8
    scores_NTS += np.where(np.tri(len(x_TX)) > 0, 0, -np.inf)
    weights_NTS = np.exp(scores_NTS - scores_NTS.max(-1, keepdims=True))
    weights_NTS /= weights_NTS.sum(-1, keepdims=True)
    attended_TD = np.einsum("nts,snh->tnh", weights_NTS, v).reshape(len(x_TX), -1)
    x_TD = residual_TD + attended_TD @ layer["self_attn.o_proj.weight"].T
    y_TD = normed(x_TD, layer["post_attention_layernorm.weight"])
    gate_TF = y_TD @ layer["mlp.gate_proj.weight"].T
    up_TF = y_TD @ layer["mlp.up_proj.weight"].T
    x_TD = x_TD + (gate_TF / (1 + np.exp(-gate_TF)) * up_TF) @ layer["mlp.down_proj.weight"].T
    return normed(x_TD, w["norm.weight"]) @ w["lm_head.weight"].T


def test_smollm2_head_logits_equal_numpy():
    checkpoint = open_head("smollm2-head", TARGET, dtype="float32")
    head = checkpoint.config.head()
    assert head.hidden_layers == (1, 14, 26) and head.config.draft_vocab_size == 8192
    weights = head.prepare(read_head(checkpoint, head))
    keys = jax.random.split(jax.random.key(0), 4)
    embedded, *hidden = (jax.random.normal(key, (1, 6, 576)) for key in keys)
    features_BTD, _ = head(
        weights, embedded, head.fuse(weights, hidden), jnp.zeros(1, int), head.init_cache(1, 8)
    )
    theirs = logits_by_numpy(
        np.asarray(embedded[0], np.float64), [np.asarray(x[0], np.float64) for x in hidden]
    )
    ours = head.logits(weights, features_BTD, None)[0]
    assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
    assert_allclose(head.expand(weights, ours)[:, checkpoint.draft_ids], ours)


def test_smollm2_head_names_its_target():
    assert find_folder("smollm2-head") == (FOLDER, False)
    pair = hf.find("smollm2")
    verifier = json.loads((FOLDER / "config.json").read_text())["speculators_config"]["verifier"]
    assert (pair.draft, pair.target) == ("smollm2-head", verifier["name_or_path"])
    config = ExperimentConfig.from_config_dict(hf.get_config("smollm2"))
    assert head_of(config, TARGET) == open_head(FOLDER, TARGET, dtype="float32").config
