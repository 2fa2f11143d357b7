"""Heads that are written are read again as they were; what no layout can say is refused before anything is written."""

import dataclasses

import jax
import numpy as np
import pytest

from specsamp.checkpoints.head_export import write_head
from specsamp.checkpoints.heads import open_head, read_head
from specsamp.models.eagle import Eagle1Config
from specsamp.models.heads import FeatureHead
from specsamp.models.medusa import MedusaConfig
from specsamp.models.mtp import MTPConfig
from support.heads import layer_config
from support.weights import drawn_params

LAYERS = 6
TARGET = layer_config(16, num_layers=LAYERS)
LAYER = layer_config(16, attention_bias=True, feedforward_width=20)
MEDUSA = MedusaConfig(layer=LAYER, target_layers=LAYERS, hidden_layers=(LAYERS,), num_heads=3, own_output=True)
MODULE = MTPConfig(layer=LAYER, target_layers=LAYERS, hidden_layers=(LAYERS - 1,), hidden_first=True, norm_output=True)


def numbered(config):
    """Parameters that all differ, so that one in the place of another is seen."""
    shapes = jax.eval_shape(FeatureHead(config).init, jax.random.key(0))
    leaves, tree = jax.tree.flatten(shapes)
    return tree.unflatten([np.sin(np.arange(x.size) + i).reshape(x.shape).astype("f4") for i, x in enumerate(leaves)])


@pytest.mark.parametrize(
    "config, file, tensor",
    [
        (MEDUSA, "medusa_lm_head.safetensors", "2.0.linear.bias"),
        (MODULE, "model.safetensors", "model.mtp_layers.0.input_proj.weight"),
    ],
    ids=["medusa", "mtp"],
)
def test_what_is_written_is_read_again(config, file, tensor, tmp_path):
    """Whatever other head was in the folder before."""
    params = numbered(config)
    (tmp_path / "pytorch_model.bin").write_bytes(b"of another head")
    write_head(tmp_path, FeatureHead(config), params, target_name="org/target", K=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", file]
    checkpoint = open_head(tmp_path, TARGET, dtype="float32")
    assert tensor in checkpoint.tensors and checkpoint.trained_for == "org/target"
    head = FeatureHead(checkpoint.config)
    assert head.config == dataclasses.replace(config, layer=head.config.layer)
    assert not config.has_layer or head.config.layer == config.layer
    jax.tree.map(np.testing.assert_array_equal, read_head(checkpoint, head), params)


@pytest.mark.parametrize(
    "config, message",
    [
        (Eagle1Config(layer=LAYER, target_layers=LAYERS, hidden_layers=(LAYERS,)), "got Eagle1Config"),
        (dataclasses.replace(MEDUSA, own_output=False), "Medusa's authors has no counterpart of own_output = False"),
        (dataclasses.replace(MODULE, own_output=True), "MiMo's module has no tensor for the parameter 'output'"),
        (dataclasses.replace(MODULE, hidden_first=False), "MiMo's module has no counterpart of hidden_first = False"),
        (dataclasses.replace(MEDUSA, bias=False), "bias = False: the code of Medusa has a bias"),
        (dataclasses.replace(MODULE, hidden_layers=(2,)), r"has no counterpart of hidden_layers = \(2,\)"),
    ],
)
def test_what_a_layout_cannot_say_is_refused(config, message, tmp_path):
    head = FeatureHead(config)
    with pytest.raises(ValueError, match=message):
        write_head(tmp_path / "head", head, drawn_params(head), target_name="org/target", K=3)
    assert not (tmp_path / "head").exists()
