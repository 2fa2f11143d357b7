"""MiMo-7B's module for multi-token prediction, against a model of one layer, whose family has golden logits."""

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

T, EPSILON, CLOSE = 9, 1e-5, 2e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return golden.read("mimo").write_checkpoint(tmp_path_factory.mktemp("mimo"))


def norm(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * scale


def one_layer(folder, place, tokens, hidden_TD):
    """Returns the module's logits after every pair of a hidden state and the next token.

    Its layer is that of the target, so it is a model of one layer whose embedding holds what the module makes of the pairs.
    """
    tensors, module, layer = load_file(folder / "model.safetensors"), "model.mtp_layers.0.", "model.layers.0."
    model = {name.replace(module, layer): x for name, x in tensors.items() if module in name}
    hidden_norm, token_norm, project = (
        model.pop(f"{layer}{name}.weight") for name in ("hidden_layernorm", "token_layernorm", "input_proj")
    )
    pairs = norm(hidden_TD[:-1], hidden_norm), norm(tensors["model.embed_tokens.weight"][tokens[1:]], token_norm)
    embedding = np.zeros_like(tensors["model.embed_tokens.weight"])
    embedding[: T - 1] = np.concatenate(pairs, axis=1) @ project.T
    model |= {"model.embed_tokens.weight": embedding, "lm_head.weight": tensors["lm_head.weight"]}
    model["model.norm.weight"] = model.pop(f"{layer}final_layernorm.weight")
    content = golden.read("mimo").config | {"num_hidden_layers": 1, "layer_types": None}
    (place / "config.json").write_text(json.dumps(content))
    save_file(model, place / "model.safetensors")
    checkpoint = open_checkpoint(place, dtype="float32")
    model = TransformerLM(checkpoint.config)
    return model.forward(read_params(checkpoint, model), jnp.arange(T - 1)[None]).logits_BTV[0]


def test_the_module_is_a_layer_of_the_target_between_its_own_ends(folder, tmp_path):
    """Of the hidden states of the target, whose logits are a golden."""
    tokens = golden.read("mimo").tokens_BT[0, :T]
    checkpoint = open_checkpoint(folder, dtype="float32")
    model = TransformerLM(checkpoint.config)
    opened = open_head(folder, checkpoint.config, dtype="float32")
    head = FeatureHead(opened.config)
    weights = head.prepare(read_head(opened, head))
    params = read_params(checkpoint, model)
    (hidden_BTD,) = model.forward(params, jnp.asarray(tokens)[None], hidden_layers=head.hidden_layers).hidden
    expected_TV = one_layer(folder, tmp_path, tokens, np.asarray(hidden_BTD[0]))
    target_weights = model.prepare(params)
    embedded, _ = model.embed(target_weights, jnp.asarray(tokens)[None, 1:], jnp.zeros(1, jnp.int32), None)
    features = head.fuse(weights, (hidden_BTD[:, :-1],))
    returned, _ = head(weights, embedded, features, jnp.zeros(1, jnp.int32), None)
    logits = head.logits(weights, returned, lambda x_BTD: model.unembed_normed(target_weights, x_BTD))
    np.testing.assert_allclose(logits[0], expected_TV, atol=CLOSE * abs(expected_TV).max())


def test_modules_that_do_not_fit(folder, tmp_path):
    other, target = golden.read("mimo").write_checkpoint(tmp_path), open_checkpoint(folder).config
    for change, message in (
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2; only 1 is supported"),
        ({"num_hidden_layers": 3, "layer_types": None}, "num_hidden_layers = 3.* 2"),
    ):
        (other / "config.json").write_text(json.dumps(golden.read("mimo").config | change))
        with pytest.raises(ValueError, match=message):
            open_head(other, target)
    (other / "config.json").write_text(json.dumps(golden.read("mimo").config))
    tensors = load_file(other / "model.safetensors")
    save_file({k: x for k, x in tensors.items() if "mtp_layers" not in k}, other / "model.safetensors")
    assert "lm_head.weight" in open_checkpoint(other).tensors  # the target does without its module
    with pytest.raises(ValueError, match=r"tensors are missing: model.mtp_layers.0.*; .*model.mtp_layers.0"):
        open_head(other, target)
