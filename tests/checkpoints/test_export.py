"""Models trained here, as other engines read them."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from specsamp.checkpoints.export import describe_model, export
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params
from specsamp.checkpoints.pair import load_pair
from specsamp.checkpoints.params import WrongShapes
from specsamp.checkpoints.safetensors_io import INDEX
from specsamp.models.config import tiny
from specsamp.models.transformer import TransformerLM
from support.checkpoint_shapes import CONFIG, random_params

UNGATED = tiny(vocab_size=304, positions="rotary", num_kv_heads=1, feedforward_width=40)


@pytest.mark.parametrize("config", [CONFIG, UNGATED], ids=["llama", "arcee"])
def test_what_is_written_is_read_again_unchanged(config, tokenizer, tmp_path):
    params = random_params(config)
    export(tmp_path, config, params, tokenizer)
    checkpoint = open_checkpoint(tmp_path, dtype="float32")
    assert checkpoint.config == config and checkpoint.stop_ids == (tokenizer.eos_id,)
    jax.tree.map(np.testing.assert_array_equal, read_params(checkpoint, TransformerLM(config)), params)
    assert checkpoint.tokenizer.encode("def é") == tokenizer.encode("def é")
    assert not (tmp_path / INDEX).exists()


def test_the_shipped_target_has_a_counterpart():
    """Ungated, tied, rotary, one kv head: Arcee."""
    pair = load_pair("python")
    content = describe_model(pair.target.config, pair.tokenizer.eos_id)
    assert content["architectures"] == ["ArceeForCausalLM"] and content["hidden_act"] == "gelu_pytorch_tanh"
    with pytest.raises(ValueError, match="ArceeForCausalLM has no counterpart of ngram_rows = 32768"):
        describe_model(pair.draft.config, None)


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(positions="relative"), "positions = 'relative'"),
        (dict(window=4, global_layers=(1,)), r"window = 4, global_layers = \(1,\)"),
        (dict(attention_bias=True), "output_bias = False"),
    ],
    ids=str,
)
def test_what_has_no_counterpart_is_named(change, named, tmp_path):
    with pytest.raises(ValueError, match=f"LlamaForCausalLM has no counterpart of {named}"):
        export(tmp_path, dataclasses.replace(CONFIG, **change), {})
    with pytest.raises(WrongShapes, match="layer_0/mlp/gate: absent"):
        export(tmp_path, CONFIG, random_params(dataclasses.replace(CONFIG, gated=False)))
    assert not list(tmp_path.iterdir())


def test_half_an_export_is_none(original, params, tokenizer, tmp_path, monkeypatch):
    """Killed while an older one was being replaced: better none than a mixture."""
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("specsamp.checkpoints.export.save", killed)
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path, CONFIG, params, tokenizer)
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        open_checkpoint(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)}
