"""Checkpoints of models with experts: which tensors and layers they have."""

import pytest
from safetensors.numpy import load_file, save_file

from specsamp.checkpoints.architectures import parse_config
from specsamp.checkpoints.hugging_face import open_checkpoint
from support import golden

QWEN = golden.read("qwen3_moe")
FIRST = "model.layers.0.mlp.experts.3.up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    return QWEN.write_checkpoint(tmp_path / "model")


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
        open_checkpoint(folder).tensors
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
