"""Checkpoints of models with experts: a tensor for each expert, read once, by the devices that hold it."""

import math

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specsamp.checkpoints import int8_tensors
from specsamp.checkpoints.architectures import parse_config
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params
from specsamp.checkpoints.safetensors_io import Tensor
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard_model
from specsamp.models.int8 import decode_weights
from specsamp.models.transformer import TransformerLM
from support import golden

QWEN = golden.read("qwen3_moe")
FIRST = "model.layers.0.mlp.experts.3.up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    return QWEN.write_checkpoint(tmp_path / "model")


def opened(folder, **changes):
    checkpoint = open_checkpoint(folder, dtype="float32", **changes)
    return checkpoint, TransformerLM(checkpoint.config)


def same(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("model", [4, 2])
def test_each_device_reads_its_own_experts_and_none_twice(folder, model, monkeypatch):
    asked = []
    read = Tensor.read
    monkeypatch.setattr(Tensor, "read", lambda self, index: asked.append((self, index)) or read(self, index))
    checkpoint, alone = opened(folder)
    whole = read_params(checkpoint, alone)
    np.testing.assert_array_equal(whole["layer_0"]["experts"]["up"][3], golden.weights(FIRST, (20, 32)).T)
    assert "experts" not in whole["layer_1"] and whole["layer_1"]["mlp"]["up"].shape == (32, 48)
    asked.clear()
    placed = read_params(checkpoint, shard_model(alone, Layout.tensor_parallel(make_mesh(8 // model, model))))
    same(placed, whole)
    assert placed["layer_0"]["experts"]["up"].addressable_shards[0].data.shape == (8 // model, 32, 20)

    def taken(tensor, index):
        return math.prod(len(range(*part.indices(n))) for part, n in zip(index, tensor.shape))

    assert sum(taken(*one) for one in asked) == checkpoint.config.num_parameters


def test_experts_are_quantised_while_they_are_read(folder, monkeypatch):
    """Blocks of a kilobyte: no more is ever in float."""
    most = []
    monkeypatch.setattr(int8_tensors, "BLOCK_BYTES", 1024)
    quantise = int8_tensors.quantise
    monkeypatch.setattr(int8_tensors, "quantise", lambda x, axes: most.append(x.nbytes) or quantise(x, axes))
    whole = read_params(*opened(folder))
    read = read_params(*opened(folder, weight_dtype="int8"))
    same(read, decode_weights(whole, np.float32, "int8"))
    assert max(most) <= 1024


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tensors: tensors.pop(FIRST), f"1 tensors are missing: {FIRST} \\(20, 32\\)"),
        (lambda tensors: tensors.update({FIRST.replace("3", "8"): tensors[FIRST]}), "1 tensors are not part of"),
    ],
    ids=["an expert is missing", "an expert too many"],
)
def test_damaged_experts_are_named_in_one_line(folder, change, message):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(ValueError, match=message) as error:
        opened(folder)[0].tensors
    assert "\n" not in str(error.value)


def read(name="qwen3_moe", **changes):
    return parse_config("config.json", golden.read(name).config | changes, "float32")[1]


def test_which_layers_have_experts():
    def sparse(**changes):
        config = read(num_hidden_layers=4, **changes)
        return [layer for layer in range(4) if config.has_experts(layer)]

    assert sparse(mlp_only_layers=None) == [0, 1, 2, 3]
    assert sparse(mlp_only_layers=[2]) == [0, 1, 3]
    assert sparse(mlp_only_layers=[1], decoder_sparse_step=2) == [3]
    assert read(mlp_only_layers=[0, 1, 2]).experts is None
    with pytest.raises(ValueError, match="config.json describes no model"):
        sparse(decoder_sparse_step=0)
    with pytest.raises(ValueError, match="config.json.* 9 experts"):
        sparse(num_experts_per_tok=9)


def test_names_and_windows_as_files_have_them():
    """Older files write num_experts; a window holds in every layer, unlike that of dense models."""
    older = {key: value for key, value in QWEN.config.items() if key != "num_local_experts"} | dict(num_experts=8)
    assert parse_config("config.json", older, "float32")[1] == read()
    windowed = read(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert windowed.window == 4 and windowed.global_layers == ()
    assert read("mixtral").window == 5 and read("mixtral", sliding_window=None).window is None
