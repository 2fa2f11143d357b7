"""MiMo-7B's module for multi-token prediction, against a forward pass in NumPy and float64."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specsamp.checkpoints.heads import open_head, read_head
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params
from specsamp.models.heads import FeatureHead
from specsamp.models.transformer import TransformerLM
from support import golden

T, HEADS, KV_HEADS, SIZE, EPSILON, BASE = 9, 4, 2, 8, 1e-5, 640_000.0
CLOSE = 2e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return golden.read("mimo").write_checkpoint(tmp_path_factory.mktemp("mimo"))


def norm(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * scale


def rotate(x_TNH):
    angles = np.arange(len(x_TNH))[:, None] * BASE ** (-np.arange(SIZE // 2) / (SIZE // 2))[None]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = np.split(x_TNH, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def layer(tensors, prefix, x_TD):
    """A layer of Qwen 2: biases of queries, keys and values; heads share keys in groups."""

    def linear(name, y):
        return y @ tensors[f"{prefix}.{name}.weight"].T + tensors.get(f"{prefix}.{name}.bias", 0)

    a = norm(x_TD, tensors[f"{prefix}.input_layernorm.weight"])
    q, k, v = (linear(f"self_attn.{name}_proj", a).reshape(len(a), -1, SIZE) for name in "qkv")
    q, k = rotate(q), rotate(k)
    mixed = np.zeros_like(q)
    for n in range(HEADS):
        of = n // (HEADS // KV_HEADS)
        scores = np.where(np.tri(len(a), dtype=bool), q[:, n] @ k[:, of].T / np.sqrt(SIZE), -np.inf)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        mixed[:, n] = weights / weights.sum(1, keepdims=True) @ v[:, of]
    x_TD = x_TD + linear("self_attn.o_proj", mixed.reshape(len(a), -1))
    m = norm(x_TD, tensors[f"{prefix}.post_attention_layernorm.weight"])
    gate = linear("mlp.gate_proj", m)
    return x_TD + linear("mlp.down_proj", gate / (1 + np.exp(-gate)) * linear("mlp.up_proj", m))


def module_by_numpy(folder, tokens, hidden_TD):
    """Returns the module's logits after every pair of a hidden state and the next token."""
    tensors = {name: x.astype(np.float64) for name, x in load_file(folder / "model.safetensors").items()}
    module = "model.mtp_layers.0"
    hidden = norm(hidden_TD[:-1].astype(np.float64), tensors[f"{module}.hidden_layernorm.weight"])
    token = norm(tensors["model.embed_tokens.weight"][tokens[1:]], tensors[f"{module}.token_layernorm.weight"])
    y_TD = layer(tensors, module, np.concatenate([hidden, token], axis=1) @ tensors[f"{module}.input_proj.weight"].T)
    return norm(y_TD, tensors[f"{module}.final_layernorm.weight"]) @ tensors["lm_head.weight"].T


def test_the_module_is_that_of_numpy(folder):
    """Of the hidden states of the target, whose logits are a golden."""
    tokens = golden.read("mimo").tokens_BT[0, :T]
    checkpoint = open_checkpoint(folder, dtype="float32")
    model = TransformerLM(checkpoint.config)
    opened = open_head(folder, checkpoint.config, dtype="float32")
    head = FeatureHead(opened.config)
    weights = head.prepare(read_head(opened, head))
    params = read_params(checkpoint, model)
    (hidden_BTD,) = model.forward(params, jnp.asarray(tokens)[None], hidden_layers=head.hidden_layers).hidden
    module_TV = module_by_numpy(folder, tokens, np.asarray(hidden_BTD[0]))
    target_weights = model.prepare(params)
    embedded, _ = model.embed(target_weights, jnp.asarray(tokens)[None, 1:], jnp.zeros(1, jnp.int32), None)
    features = head.fuse(weights, (hidden_BTD[:, :-1],))
    returned, _ = head(weights, embedded, features, jnp.zeros(1, jnp.int32), None)
    logits = head.logits(weights, returned, lambda x_BTD: model.unembed_normed(target_weights, x_BTD))
    np.testing.assert_allclose(logits[0], module_TV, atol=CLOSE * abs(module_TV).max())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2; only 1 is supported"),
        ({"num_hidden_layers": 3, "layer_types": None}, "num_hidden_layers = 3.* 2"),
    ],
)
def test_modules_that_do_not_fit(folder, tmp_path, change, message):
    target = open_checkpoint(folder).config
    other = golden.read("mimo").write_checkpoint(tmp_path / "other")
    content = json.loads((other / "config.json").read_text()) | change
    (other / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        open_head(other, target)


def test_a_checkpoint_without_its_module(folder, tmp_path):
    other = golden.read("mimo").write_checkpoint(tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    save_file({k: x for k, x in tensors.items() if "mtp_layers" not in k}, other / "model.safetensors")
    target = open_checkpoint(other)
    assert "lm_head.weight" in target.tensors
    with pytest.raises(ValueError, match=r"tensors are missing: model.mtp_layers.0.*; .*model.mtp_layers.0"):
        open_head(other, target.config)
