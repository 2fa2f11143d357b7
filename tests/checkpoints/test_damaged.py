"""Reading a checkpoint: what is wrong is named before a tensor is touched."""

import json
import os

import jax
import numpy as np
import pytest
import safetensors.numpy
from etils import epath

from specsamp.checkpoints import safetensors_io
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params
from specsamp.checkpoints.safetensors_io import INDEX, find_tensors, read_header
from specsamp.models.transformer import TransformerLM
from support import golden
from support.checkpoint_shapes import edit, open_all


def tensor_change(folder, name, change):
    """Rewrites the file that holds a tensor; ``change`` gets its tensors."""
    file = folder / json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"][name]
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file)


UP = "model.layers.1.mlp.up_proj.weight"


def test_a_shard_missing_from_the_folder(saved):
    file = next(saved.glob("model-00002*"))
    file.unlink()
    with pytest.raises(FileNotFoundError, match=f"{INDEX}.*{file.name}, with . tensors"):
        open_all(saved)


def test_a_tensor_missing_from_its_shard(saved):
    tensor_change(saved, UP, lambda tensors: tensors.pop(UP))
    with pytest.raises(ValueError, match=f"{INDEX} says that {UP} is in model-0000.*, which is not so"):
        open_all(saved)


@pytest.mark.parametrize("keep", [3, 20, -1])
def test_a_truncated_file(saved, keep):
    file = sorted(saved.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{file.name} is damaged .truncated"):
        open_all(saved)


def test_damaged_headers(tmp_path):
    def with_header(header):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
        return epath.Path(tmp_path / "x")

    good = {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    assert read_header(with_header(good))["a"].shape == (2, 2)
    for header, message in (
        (b"{", "its header cannot be read"),
        (b'{"a": ' + 50_000 * b"[" + 50_000 * b"]" + b"}", "its header cannot be read: RecursionError"),
        (good | {"a": good["a"] | {"shape": [-2, -2]}}, "its header cannot be read: ValueError: .-2, -2. are no sizes"),
        ([], "its header cannot be read"),
        ({"a": {}}, "its header cannot be read"),
        (good | {"a": good["a"] | {"shape": [2, 3]}}, "a .2, 3. of F32 takes bytes 0 to 16"),
        (good | {"a": good["a"] | {"data_offsets": [0, 8, 16]}}, "x is damaged .its header cannot be read"),
        (good | {"a": good["a"] | {"shape": [3], "data_offsets": [0, 12]}}, "too long: .* bytes; its header says"),
        (good | {"b": good["a"]}, "b .2, 2. of F32 takes bytes 0 to 16, behind byte 16"),
    ):
        with pytest.raises(ValueError, match=message):
            read_header(with_header(header))


def test_what_git_leaves_of_a_file_without_its_extension(saved):
    file = sorted(saved.glob("*.safetensors"))[1]
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 52168\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"{file.name}.*git lfs pull"):
        open_all(saved)


@pytest.mark.parametrize("name", [3, "", "..", "../model/{file}", "{folder}/{file}", "*"])
def test_an_index_names_files_beside_it_only(saved, name):
    """What else this user can read is no part of a checkpoint that somebody else wrote."""

    def lead_astray(index):
        file = index["weight_map"][UP]
        other = name.format(file=file, folder=saved) if isinstance(name, str) else name
        index["weight_map"] = {t: other if f == file else f for t, f in index["weight_map"].items()}

    edit(saved / INDEX, lead_astray)
    with pytest.raises(ValueError, match=f"{INDEX} is no index.* plain name"):
        open_all(saved)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "a shard"])
def test_a_pipe_is_not_waited_for(saved, file):
    place = saved / file if (saved / file).exists() else sorted(saved.glob("*.safetensors"))[1]
    place.unlink()
    os.mkfifo(place)
    with pytest.raises((ValueError, FileNotFoundError), match=f"{place.name} is no regular file|no tokenizer at"):
        open_all(saved)


def test_json_that_cannot_be_read_is_named(saved):
    for content, message in ((b'{"a": ' + 50_000 * b"[", "is no JSON"), (b"{}", "is no index .* weight_map = None")):
        (saved / INDEX).write_bytes(content)
        with pytest.raises(ValueError, match=f"{INDEX} {message}"):
            open_all(saved)


def test_a_config_that_contradicts_the_tensors(saved):
    edit(saved / "config.json", lambda config: config.update(intermediate_size=96, num_key_value_heads=4))
    with pytest.raises(ValueError, match="does not hold the model of its config.json") as caught:
        open_all(saved)
    assert "8 tensors" not in str(caught.value) and "10 tensors are of another shape" in str(caught.value)
    assert "k_proj.weight (16, 32) in model-0000" in str(caught.value) and "(32, 32) wanted" in str(caught.value)


def test_tensors_that_nothing_reads_and_buffers_that_nobody_needs(saved):
    extra = "model.layers.0.self_attn.q_proj.bias"
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensor_change(
        saved, UP, lambda tensors: tensors.update({extra: np.zeros(32, np.float32), buffer: np.zeros(4, np.float32)})
    )
    with pytest.raises(ValueError, match=rf"1 tensors are not part of the model: {extra} \(32,\) in model-"):
        open_all(saved)
    tensor_change(saved, UP, lambda tensors: tensors.pop(extra))
    open_all(saved)


def test_unsupported_dtypes_matter_only_where_they_are_read(saved):
    mask = "model.layers.0.self_attn.masked_attn.bias"
    tensor_change(saved, UP, lambda tensors: tensors.update({mask: np.ones((2, 2), bool)}))
    open_all(saved)
    tensor_change(saved, UP, lambda tensors: tensors.update({UP: tensors[UP].astype(np.int8)}))
    with pytest.raises(ValueError, match=rf"1 tensors are of a dtype .*BF16.: {UP} \(128, 32\) in model-.*: I8"):
        open_all(saved)


def test_names_without_their_prefix(tmp_path):
    """As the first GPT-2 files have them, masks included."""
    gpt2 = golden.read("gpt2")

    def read(folder):
        return read_params((c := open_checkpoint(folder, dtype="float32")), TransformerLM(c.config))

    expected = read(gpt2.write_checkpoint(tmp_path / "with"))
    bare = {name.removeprefix("transformer."): golden.weights(name, shape) for name, shape in gpt2.shapes.items()}
    folder = gpt2.write_checkpoint(tmp_path / "without")
    safetensors.numpy.save_file(bare | {"h.0.attn.bias": np.ones((4, 4), np.float32)}, folder / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, read(folder), expected)


@pytest.mark.parametrize("block", [64 * 2**20, 3 * 32 * 4], ids=["whole", "in blocks"])
def test_a_tied_model_may_repeat_its_embedding_only(saved, block, monkeypatch):
    monkeypatch.setattr(safetensors_io, "BLOCK_BYTES", block)
    edit(saved / "config.json", lambda config: config.update(tie_word_embeddings=True))
    with pytest.raises(ValueError, match="says tie_word_embeddings = true, but its output embedding differs"):
        open_all(saved)
    embedding = find_tensors(epath.Path(saved))["model.embed_tokens.weight"].read((slice(None), slice(None)))
    tensor_change(saved, "lm_head.weight", lambda tensors: tensors.update({"lm_head.weight": np.array(embedding)}))
    assert open_all(saved)[0].config.tied
    tensor_change(saved, UP, lambda tensors: tensors.update({"lm_head.bias": np.zeros(4, np.float32)}))
    with pytest.raises(ValueError, match="not part of the model: lm_head.bias"):
        open_all(saved)


def test_pickles_are_refused_with_the_way_to_convert_them(saved):
    for file in [*saved.glob("*.safetensors"), saved / INDEX]:
        file.unlink()
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        find_tensors(epath.Path(saved))
    (saved / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ValueError, match="pytorch_model.bin.*save_pretrained"):
        open_all(saved)


def test_a_tokenizer_with_more_entries_than_the_embedding(saved, tokenizer):
    edit(saved / "config.json", lambda config: config.update(vocab_size=250))
    with pytest.raises(ValueError, match=f"tokenizer.* {tokenizer.vocab_size} tokens.* 250 rows"):
        open_checkpoint(saved)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(architectures=["BertModel"]), "architecture 'BertModel'; known are LlamaForCausalLM, Mistral"),
        (dict(hidden_size=None), "config.json does not say 'hidden_size'"),
        (dict(hidden_act="softplus"), "hidden_act = 'softplus'; known are gelu"),
        (dict(quantization_config={"bits": 4}), "give the checkpoint before it was quantised"),
        (dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "scales its rotary positions by .*dynamic"),
        (
            dict(rope_parameters={"rope_type": "llama3", "factor": 2.0}),
            "llama3 scaling .* original_max_position_embeddings = None",
        ),
        (dict(rope_scaling="linear"), "config.json says rope_scaling = 'linear'; an object is wanted"),
        (dict(rms_norm_eps="1e-5"), "config.json describes no model .* norm_epsilon must be above 0; got '1e-5'"),
        (dict(tie_word_embeddings="false"), "config.json describes no model .* tied must be True or False; got"),
        (dict(eos_token_id=[1, 304]), "ends texts with token 304, but has 304 tokens"),
    ],
    ids=str,
)
def test_configs_that_cannot_be_read_are_named(saved, change, message):
    (saved / "generation_config.json").unlink()
    edit(saved / "config.json", lambda config: config.update(change))
    with pytest.raises(ValueError, match=message):
        open_checkpoint(saved)
