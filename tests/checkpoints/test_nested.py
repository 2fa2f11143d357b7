"""A text model inside a model that also sees images is read as the text model alone."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specsamp import TransformerLM
from specsamp.checkpoints.architectures import parse_config
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params
from support import golden
from support.refusals import refusal, refused_arguments

OUTER = {
    "gemma3": dict(architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3"),
    "gemma4": dict(architectures=["Gemma4ForConditionalGeneration"], model_type="gemma4"),
    "mistral": dict(architectures=["Mistral3ForConditionalGeneration"], model_type="mistral3"),
    "qwen3_5": dict(architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5"),
    "qwen3_5_moe": dict(
        architectures=["Qwen3_5MoeForConditionalGeneration"], model_type="qwen3_5_moe"
    ),
}
# Values of transformers 5.24 for absent keys of a text_config.
SIZES = ("vocab_size", "width", "feedforward_width", "num_layers", "num_heads", "num_kv_heads")
SIZES += ("head_size", "max_positions", "window", "tied")
USUAL = {
    "gemma3": (262208, 2304, 9216, 26, 8, 4, 256, 131072, 4096, True),
    "gemma4": (262144, 2304, 9216, 30, 8, 4, 256, 131072, 512, True),
    "mistral": (32000, 4096, 14336, 32, 32, 8, 128, 131072, 4096, False),
    "qwen3_5": (248320, 4096, 12288, 32, 16, 4, 256, 32768, None, False),
    "qwen3_5_moe": (248320, 2048, 512, 40, 16, 2, 256, 32768, None, False),
}


def older(name):
    return f"language_model.{name}"


def newer(name):
    return name.replace("model.", "model.language_model.", 1)


def config_of(name, outer=None, **text):
    flat = golden.read(name).config
    inner = {key: value for key, value in flat.items() if key != "architectures"}
    return OUTER[name] | dict(text_config=inner | text, vision_config={}) | (outer or {})


def write(name, folder, renamed, image):
    shapes = golden.read(name).shapes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(name)), encoding="utf-8")
    tensors = {renamed(one): golden.weights(one, shape) for one, shape in shapes.items()}
    save_file(tensors | {image: np.zeros((2, 2), np.float32)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", OUTER)
@pytest.mark.parametrize(
    "renamed, image",
    [(older, "vision_tower.a.weight"), (newer, "model.multi_modal_projector.a.weight")],
)
def test_a_nested_checkpoint_is_its_text_model(name, renamed, image, tmp_path):
    folders = golden.read(name).write_checkpoint(tmp_path / "flat"), tmp_path / "nested"
    write(name, folders[1], renamed, image)
    flat, nested = (open_checkpoint(folder, dtype="float32") for folder in folders)
    assert nested.config == flat.config
    model = TransformerLM(flat.config)
    expected = read_params(flat, model)
    jax.tree.map(np.testing.assert_array_equal, read_params(nested, model), expected)


def test_unknown_part_of_nested_checkpoint_is_refused(tmp_path):
    folder = write("gemma3", tmp_path / "nested", newer, "model.adapter.a.weight")
    with refusal("not part of the model: model.adapter.a.weight"):
        open_checkpoint(folder).tensors


@pytest.mark.parametrize("name", OUTER)
def test_absent_text_config_keys_have_transformers_defaults(name):
    given = {"hidden_size_per_layer_input": 0} if name == "gemma4" else {}  # otherwise refused
    config = parse_config("config.json", OUTER[name] | dict(text_config=given), "float32")[1]
    assert tuple(getattr(config, size) for size in SIZES) == USUAL[name]


def test_unified_gemma_4_is_read_as_text_model():
    outer = dict(
        architectures=["Gemma4UnifiedForConditionalGeneration"], model_type="gemma4_unified"
    )
    text = dict(model_type="gemma4_unified_text", use_bidirectional_attention="vision")
    found = config_of("gemma4", outer, **text)
    del found["text_config"]["hidden_size_per_layer_input"]
    flat = parse_config("config.json", golden.read("gemma4").config, "float32")[1]
    assert parse_config("config.json", found, "float32")[1] == flat
    del found["text_config"]["sliding_window"]
    assert parse_config("config.json", found, "float32")[1].window == 1024


def test_outer_key_decides_on_tied_embeddings():
    def tied(name, outer, **text):
        return parse_config("config.json", config_of(name, outer, **text), "float32")[1].tied

    key = "tie_word_embeddings"
    assert tied("mistral", {key: True}, **{key: False})
    assert not tied("gemma3", {key: False}, **{key: True})
    assert not tied("gemma3", {}, **{key: False})


def nested(**outer):
    return parse_config("config.json", config_of("gemma3", outer), "float32")


test_refused_text_configs = refused_arguments(
    nested,
    {
        "text_config says model_type = 'qwen2'; only": dict(text_config={"model_type": "qwen2"}),
        "text_config = 3; it must be an object": dict(text_config=3),
        "text_config says is_causal = False": dict(text_config={"is_causal": False}),
        "whose model_type is 'gemma3'": dict(model_type="gemma3_text"),
    },
)


def test_experts_in_shared_tensors_equal_separate_ones(tmp_path):
    """Public files of Qwen 3.5 have both forms; their modules of MTP are not read."""
    flat = golden.read("qwen3_5_moe").write_checkpoint(tmp_path / "flat")
    tensors = load_file(flat / "model.safetensors")
    joined = tmp_path / "joined"
    joined.mkdir()
    (joined / "config.json").write_bytes((flat / "config.json").read_bytes())
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for e in range(8)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{prefix}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{prefix}.down_proj"] = down
    tensors["mtp.fc.weight"] = np.zeros((32, 64), np.float32)
    save_file(tensors, joined / "model.safetensors")
    separate, shared = (open_checkpoint(folder, dtype="float32") for folder in (flat, joined))
    model = TransformerLM(separate.config)
    expected = read_params(separate, model)
    jax.tree.map(np.testing.assert_array_equal, read_params(shared, model), expected)
