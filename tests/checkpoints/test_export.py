"""Trained models and heads are exported for other engines; a part without a counterpart is refused
before any write.
"""

import dataclasses
import pathlib
import shutil

import jax
import numpy as np
import pytest

from specsamp import TransformerLM
from specsamp.checkpoints.export import export
from specsamp.checkpoints.head_export import write_head
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params
from specsamp.checkpoints.params import WrongShapes
from specsamp.checkpoints.public_heads import open_head, read_head
from specsamp.checkpoints.safetensors_io import INDEX
from specsamp.models.config import tiny
from specsamp.models.eagle import Eagle1Config
from specsamp.models.heads import FeatureHead
from specsamp.models.medusa import MedusaConfig
from specsamp.models.mtp import MTPConfig
from support.checkpoint_shapes import CONFIG, random_params
from support.heads import layer_config
from support.refusals import refusal, refused_calls
from support.weights import drawn_params, shapes_of

UNGATED = tiny(vocab_size=304, positions="rotary", num_kv_heads=1, feedforward_width=40)


@pytest.mark.parametrize("config", [CONFIG, UNGATED], ids=["llama", "arcee"])
def test_exported_model_is_read_unchanged(config, tokenizer, tmp_path):
    params = random_params(config)
    export(tmp_path, config, params, tokenizer)
    checkpoint = open_checkpoint(tmp_path, dtype="float32")
    assert checkpoint.config == config and checkpoint.stop_ids == (tokenizer.eos_id,)
    jax.tree.map(
        np.testing.assert_array_equal, read_params(checkpoint, TransformerLM(config)), params
    )
    assert checkpoint.tokenizer.encode("def é") == tokenizer.encode("def é")
    assert not (tmp_path / INDEX).exists()


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(positions="relative"), "positions = 'relative'"),
        (dict(window=4, global_layers=(1,)), r"window = 4, global_layers = \(1,\)"),
        (dict(attention_bias=True), "output_bias = False"),
    ],
    ids=str,
)
def test_export_names_fields_without_counterpart(change, named, tmp_path):
    with refusal(f"LlamaForCausalLM has no counterpart of {named}"):
        export(tmp_path, dataclasses.replace(CONFIG, **change), {})
    with pytest.raises(WrongShapes, match="layer_0/mlp/gate: absent"):
        export(tmp_path, CONFIG, random_params(dataclasses.replace(CONFIG, gated=False)))
    assert not list(tmp_path.iterdir())


def test_half_an_export_is_none(original, params, tokenizer, tmp_path, monkeypatch):
    """An export that is killed while it replaces another results in no model, not in a mixture."""
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("specsamp.checkpoints.export.save", killed)
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path, CONFIG, params, tokenizer)
    with refusal("has no config.json", FileNotFoundError):
        open_checkpoint(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)
    }


# Heads.


LAYERS = 6
TARGET = layer_config(16, num_layers=LAYERS)
LAYER = layer_config(16, attention_bias=True, feedforward_width=20)
MEDUSA = MedusaConfig(
    layer=LAYER, target_layers=LAYERS, hidden_layers=(LAYERS,), num_heads=3, own_output=True
)
MODULE = MTPConfig(
    layer=LAYER,
    target_layers=LAYERS,
    hidden_layers=(LAYERS - 1,),
    hidden_first=True,
    norm_output=True,
)


def numbered(config):
    """Returns parameters that all differ, so that an exchange of two is detected."""
    shapes = shapes_of(config.head())
    leaves, tree = jax.tree.flatten(shapes)
    return tree.unflatten(
        [np.sin(np.arange(x.size) + i).reshape(x.shape).astype("f4") for i, x in enumerate(leaves)]
    )


@pytest.mark.parametrize(
    "config, file, tensor",
    [
        (MEDUSA, "medusa_lm_head.safetensors", "2.0.linear.bias"),
        (MODULE, "model.safetensors", "model.mtp_layers.0.input_proj.weight"),
        (
            dataclasses.replace(MODULE, num_modules=2),
            "model.safetensors",
            "model.mtp_layers.1.input_proj.weight",
        ),
    ],
    ids=["medusa", "mtp", "two modules"],
)
def test_exported_head_is_read_again(config, file, tensor, tmp_path):
    """An export replaces any other head in the folder."""
    params = numbered(config)
    (tmp_path / "pytorch_model.bin").write_bytes(b"of another head")
    write_head(tmp_path, config.head(), params, target_name="org/target", K=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", file]
    checkpoint = open_head(tmp_path, TARGET, dtype="float32")
    assert tensor in checkpoint.tensors and checkpoint.trained_for == "org/target"
    head = checkpoint.config.head()
    assert head.config == dataclasses.replace(config, layer=head.config.layer)
    assert not config.has_layer or head.config.layer == config.layer
    jax.tree.map(np.testing.assert_array_equal, read_head(checkpoint, head), params)


def write(config):
    head, folder = FeatureHead(config), pathlib.Path("head")
    try:
        write_head(folder, head, drawn_params(head), target_name="org/target", K=3)
    finally:
        assert not folder.exists()


def medusa(**change):
    write(dataclasses.replace(MEDUSA, **change))


def module(**change):
    write(dataclasses.replace(MODULE, **change))


test_refused_exports = refused_calls(
    {
        "got Eagle1Config": lambda: write(
            Eagle1Config(layer=LAYER, target_layers=LAYERS, hidden_layers=(LAYERS,))
        ),
        "Medusa heads have no counterpart of own_output = False": lambda: medusa(own_output=False),
        "bias = False: Medusa's own code has a bias": lambda: medusa(bias=False),
        "MTP heads have no tensor for the parameter 'output'": lambda: module(own_output=True),
        "MTP heads have no counterpart of hidden_first = False": lambda: module(hidden_first=False),
        r"have no counterpart of hidden_layers = \(2,\)": lambda: module(hidden_layers=(2,)),
    }
)
