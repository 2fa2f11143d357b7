"""A sound checkpoint is read completely, from any place and onto any mesh."""

import dataclasses
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from etils import epath
from numpy.testing import assert_array_equal

from specsamp import TransformerLM
from specsamp.checkpoints import safetensors_io
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params
from specsamp.checkpoints.safetensors_io import Tensor, find_tensors
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard_model
from support import golden
from support.checkpoint_shapes import open_all
from support.refusals import refusal


def test_a_checkpoint_of_many_files_is_read_whole(original, params, tokenizer):
    checkpoint, tensors = open_all(original)
    files = {tensor.file.name for tensor in tensors.values()}
    assert len(files) > 2 and not (original / "model.safetensors").exists()
    num_parameters = TransformerLM(checkpoint.config).num_parameters
    assert num_parameters == sum(map(jnp.size, jax.tree.leaves(params)))
    assert checkpoint.stop_ids == (tokenizer.eos_id,) == (checkpoint.tokenizer.eos_id,)
    seen = []
    read = read_params(
        checkpoint, TransformerLM(checkpoint.config), lambda *told: seen.append(told)
    )
    jax.tree.map(assert_array_equal, read, params)
    assert len(seen) == len(tensors)
    assert seen[-1][1] == seen[-1][2] == 4 * num_parameters


@pytest.mark.parametrize("name, model", [(None, 4), ("gpt2", 4), ("gpt_neox", 2), ("qwen3_moe", 4)])
def test_mesh_reads_every_part_once(original, name, model, tmp_path, monkeypatch):
    """Each device reads its own slices, also of joined queries, keys and values, and of experts."""
    asked = []
    read = Tensor.read
    checkpoint, _ = open_all(golden.read(name).write_checkpoint(tmp_path) if name else original)
    alone = TransformerLM(checkpoint.config)
    whole = read_params(checkpoint, alone)
    monkeypatch.setattr(
        Tensor, "read", lambda self, index: asked.append((self, index)) or read(self, index)
    )
    placed = read_params(
        checkpoint, shard_model(alone, Layout.tensor_parallel(make_mesh(8 // model, model)))
    )
    jax.tree.map(assert_array_equal, placed, whole)
    layer = placed["layer_0"]
    up = layer["experts"]["up"] if "experts" in layer else layer["mlp"]["up"].T
    assert up.sharding.shard_shape(up.shape)[0] == up.shape[0] // model

    def taken(tensor, index):
        return np.prod([len(range(*s.indices(n))) for s, n in zip(index, tensor.shape)])

    # Joined tensors are read three times: for queries, keys and values.
    if name not in ("gpt2", "gpt_neox"):
        num_parameters = TransformerLM(checkpoint.config).num_parameters
        assert sum(taken(tensor, index) for tensor, index in asked) == num_parameters


def test_files_in_a_bucket_are_read_by_seeking(original, monkeypatch):
    """Files that cannot be memory-mapped give the same slices."""
    tensor = find_tensors(epath.Path(original))["model.layers.0.mlp.down_proj.weight"]
    expected = np.array(tensor.read((slice(3, 30), slice(5, 9))))
    monkeypatch.setattr(safetensors_io.storage, "BUCKETS", (str(original),))
    monkeypatch.setattr(np, "memmap", None)
    assert_array_equal(tensor.read((slice(3, 30), slice(5, 9))), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_any_float_is_read_into_any_float(saved, params, dtype):
    for file in saved.glob("*.safetensors"):
        tensors = {
            name: np.asarray(jnp.asarray(x, dtype))
            for name, x in safetensors.numpy.load_file(file).items()
        }
        safetensors.numpy.save_file(tensors, file)
    checkpoint = open_checkpoint(saved)
    assert checkpoint.config.dtype == "bfloat16"
    read = read_params(checkpoint, TransformerLM(checkpoint.config))
    rounded = jax.tree.map(lambda x: np.asarray(x.astype(dtype).astype(jnp.bfloat16)), params)
    jax.tree.map(assert_array_equal, read, rounded)


def test_rows_of_padding_are_zero(original, params):
    checkpoint, _ = open_all(original)
    wide = dataclasses.replace(checkpoint.config, vocab_size=312, num_real_tokens=300)
    read = read_params(
        checkpoint, shard_model(TransformerLM(wide), Layout.tensor_parallel(make_mesh(2, 4)))
    )
    for name in ("embedding", "output_embedding"):
        assert_array_equal(read[name], np.pad(params[name], ((0, 8), (0, 0))))
    with refusal("num_layers is 2 there, 3 in the model"):
        read_params(checkpoint, TransformerLM(dataclasses.replace(wide, num_layers=3)))


def test_stop_tokens_of_the_generation_config_come_first(saved, tokenizer):
    (saved / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert open_checkpoint(saved).stop_ids == (5, 7, tokenizer.eos_id)
    (saved / "generation_config.json").write_text("[]")
    with refusal("generation_config.json is no JSON object"):
        open_checkpoint(saved)


def test_stop_tokens_are_of_tokenizer_and_template(saved):
    """Some instruction-tuned models have only the end of a document in generation_config.json."""
    names = ("<|im_end|>", "<|eot_id|>", "</s>", "<|end|>", "<|return|>")
    whole = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    whole.add_special_tokens(list(names))
    whole.save(str(saved / "tokenizer.json"))
    turn, eot, end, of_message, returned = map(whole.token_to_id, names)
    (saved / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')

    def stops(**content):
        (saved / "tokenizer_config.json").write_text(json.dumps(content))
        return open_checkpoint(saved).stop_ids

    assert stops() == (5, 7)
    assert stops(eos_token="</s>") == stops(eos_token={"content": "</s>"}) == (5, 7, end)
    assert stops(eos_token="<no such token>") == (5, 7)
    assert stops(eos_token="</s>", chat_template="{{ messages[0].content }}<|im_end|>") == (
        5,
        7,
        end,
        turn,
    )
    assert stops(eos_token="<|im_end|>", chat_template="<|im_end|>") == (5, 7, turn)
    both = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "a<|im_end|>"}]
    assert stops(chat_template=both) == (5, 7, turn)
    assert stops(chat_template="{{ x }}<|end|>") == (5, 7, of_message)
    assert stops(chat_template="<|end|> <|return|>") == (5, 7, returned), (
        "there <|end|> ends a message of a turn"
    )
    (saved / "special_tokens_map.json").write_text('{"eos_token": "<|eot_id|>"}')
    assert stops() == (5, 7, eot) and stops(eos_token="</s>") == (5, 7, end)
    (saved / "generation_config.json").unlink()
    assert stops()[1:] == (eot,), "after that of config.json"


def test_names_without_checkpoint_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with refusal("pip install huggingface_hub"):
        open_checkpoint("someone/model")


def test_hub_model_is_downloaded_weights_last(original, params, monkeypatch, tmp_path):
    """The small files come first: their faults cost no download of gigabytes."""
    asked = []

    def snapshot_download(name, allow_patterns, ignore_patterns):
        asked.append(any(file.endswith(".safetensors") for file in allow_patterns))
        # The repository may hold the same weights twice.
        assert not any("*" in file for file in allow_patterns)
        if name != "someone/model":
            raise OSError("404")
        for file in original.iterdir():
            if file.name in allow_patterns:
                (tmp_path / file.name).write_bytes(file.read_bytes())
        return str(tmp_path)

    monkeypatch.setitem(
        sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download)
    )
    checkpoint = open_checkpoint("someone/model", dtype="float32")
    assert asked == [False]
    jax.tree.map(
        assert_array_equal, read_params(checkpoint, TransformerLM(checkpoint.config)), params
    )
    assert asked == [False, False, True]
    with refusal("the hub did not give it .OSError: 404", FileNotFoundError):
        open_checkpoint("someone/else")
