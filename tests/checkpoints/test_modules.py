"""Modules for multi-token prediction, against a model of one layer with ends in NumPy.

A module's layer has the weights of an attention layer of its target. So it is a model of one layer,
whose family has golden logits, and whose embedding holds the projected pairs of hidden states and
tokens.
"""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specsamp import TransformerLM
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params
from specsamp.checkpoints.public_heads import open_head, read_head
from specsamp.models.heads import FeatureHead
from support import golden
from support.extras import slow_but
from support.refusals import refusal

T, CLOSE = 9, 2e-5
MIMO = dict(
    prefix="model.mtp_layers.0.",
    token="model.mtp_layers.0.token_layernorm.weight",
    hidden="model.mtp_layers.0.hidden_layernorm.weight",
    project="model.mtp_layers.0.input_proj.weight",
    final="model.mtp_layers.0.final_layernorm.weight",
)
QWEN = dict(
    prefix="mtp.layers.0.",
    token="mtp.pre_fc_norm_embedding.weight",
    hidden="mtp.pre_fc_norm_hidden.weight",
    project="mtp.fc.weight",
    final="mtp.norm.weight",
)
FAMILIES = {"mimo": MIMO, "qwen3_next": QWEN, "qwen3_5": QWEN, "qwen3_5_moe": QWEN}


@functools.cache
def write(name, folder):
    """Writes a checkpoint with a module in its files, and returns its folder."""
    content, names = golden.read(name), FAMILIES[name]
    folder = content.write_checkpoint(folder / name)
    if names is MIMO:  # its golden file has a module
        return folder
    tensors = load_file(folder / "model.safetensors")
    width = content.config["hidden_size"]
    attention = next(key for key in tensors if "self_attn.q_proj" in key)
    layer = attention.partition("self_attn")[0]
    first = "model.layers.0."
    shapes = {
        key.replace(layer, names["prefix"]).replace(first, names["prefix"]): x.shape
        for key, x in tensors.items()
        if (layer in key and ".mlp." not in key) or f"{first}mlp." in key
    }
    shapes |= {names[norm]: (width,) for norm in ("token", "hidden", "final")}
    shapes[names["project"]] = (width, 2 * width)
    tensors |= {key: golden.weights(key, shape) for key, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("modules")


def expected_logits(name, folder, place, tokens, hidden_TD):
    """Returns the module's logits after every pair of a hidden state and the next token."""
    names, content = FAMILIES[name], golden.read(name).config
    tensors = load_file(folder / "model.safetensors")
    offset = 0 if names is MIMO else 1  # norms of Qwen3-Next and Qwen3.5 multiply by 1 + scale

    def norm(x, scale):
        mean = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean + content["rms_norm_eps"]) * (offset + tensors[scale])

    embedded_TD = norm(tensors["model.embed_tokens.weight"][tokens[1:]], names["token"])
    pairs = [embedded_TD, norm(hidden_TD[:-1], names["hidden"])]
    if names is MIMO:
        pairs.reverse()
    embedding_VD = np.zeros_like(tensors["model.embed_tokens.weight"])
    embedding_VD[: T - 1] = np.concatenate(pairs, axis=1) @ tensors[names["project"]].T
    ends = [names[end] for end in ("token", "hidden", "project", "final")]
    model = {
        key.replace(names["prefix"], "model.layers.0."): x
        for key, x in tensors.items()
        if key.startswith(names["prefix"]) and key not in ends
    }
    output = "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
    model |= {
        "model.embed_tokens.weight": embedding_VD,
        "lm_head.weight": tensors[output],
        "model.norm.weight": tensors[names["final"]],
    }
    kinds = None if names is MIMO else ["full_attention"]
    change = dict(num_hidden_layers=1, layer_types=kinds, tie_word_embeddings=False)
    (place / "config.json").write_text(json.dumps(content | change))
    save_file(model, place / "model.safetensors")
    checkpoint = open_checkpoint(place, dtype="float32")
    model = TransformerLM(checkpoint.config)
    return model.forward(read_params(checkpoint, model), jnp.arange(T - 1)[None]).logits_BTV[0]


@pytest.mark.parametrize("name", slow_but(FAMILIES, "mimo", "qwen3_5"))
def test_module_of_a_checkpoint_has_expected_logits(name, folder, tmp_path):
    path = write(name, folder)
    tokens = golden.read(name).tokens_BT[0, :T]
    checkpoint = open_checkpoint(path, dtype="float32")
    model = TransformerLM(checkpoint.config)
    params = read_params(checkpoint, model)
    opened = open_head(path, checkpoint.config, dtype="float32")
    head = FeatureHead(opened.config)
    weights = head.prepare(read_head(opened, head))
    (hidden_BTD,) = model.forward(
        params, jnp.asarray(tokens)[None], hidden_layers=head.hidden_layers
    ).hidden
    expected_TV = expected_logits(name, path, tmp_path, tokens, np.asarray(hidden_BTD[0]))
    target_weights = model.prepare(params)
    zero_B = jnp.zeros(1, jnp.int32)
    embedded_BTD, _ = model.embed(target_weights, jnp.asarray(tokens)[None, 1:], zero_B, None)
    features_BTD = head.fuse(weights, (hidden_BTD[:, :-1],))
    returned_BTD, _ = head(weights, embedded_BTD, features_BTD, zero_B, None)
    logits_BTV = head.logits(
        weights, returned_BTD, lambda x_BTD: model.unembed_normed(target_weights, x_BTD)
    )
    error = np.abs(logits_BTV[0] - expected_TV).max()
    assert error < CLOSE * np.abs(expected_TV).max()


def test_unfitting_modules_of_mimo_are_refused(folder, tmp_path):
    other = golden.read("mimo").write_checkpoint(tmp_path)
    target = open_checkpoint(write("mimo", folder)).config
    for change, message in (
        ({"num_nextn_predict_layers": 2}, "16 tensors are missing: model.mtp_layers.1"),
        ({"num_hidden_layers": 3, "layer_types": None}, "num_hidden_layers = 3.* 2"),
    ):
        (other / "config.json").write_text(json.dumps(golden.read("mimo").config | change))
        with refusal(message):
            open_head(other, target)


@pytest.mark.parametrize("name", ("mimo", "qwen3_5"))
def test_checkpoint_without_module_is_a_target(name, folder, tmp_path):
    path = write(name, folder)
    prefix = FAMILIES[name]["prefix"].partition("layers")[0]
    tensors = load_file(path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    save_file(
        {key: x for key, x in tensors.items() if not key.startswith(prefix)},
        tmp_path / "model.safetensors",
    )
    checkpoint = open_checkpoint(tmp_path)
    assert "model.embed_tokens.weight" in checkpoint.tensors
    with refusal(rf"tensors are missing: {prefix}.*layers.0"):
        open_head(tmp_path, checkpoint.config)
    (tmp_path / "config.json").write_text(
        json.dumps(golden.read(name).config | {"mtp_num_hidden_layers": 2})
    )
    if name == "qwen3_5":
        with refusal("mtp_num_hidden_layers = 2"):
            open_head(tmp_path, checkpoint.config)
