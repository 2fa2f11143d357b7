"""Errors in a checkpoint are named before any tensor is read."""

import json
import os

import jax
import numpy as np
import pytest
import safetensors.numpy
from etils import epath

from specsamp import TransformerLM
from specsamp.checkpoints import safetensors_io
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params
from specsamp.checkpoints.safetensors_io import INDEX, find_tensors, read_header
from support import golden
from support.checkpoint_shapes import edit, open_all
from support.refusals import refusal


def tensor_change(folder, name, change):
    """Rewrites the file that holds a tensor; ``change`` gets its tensors."""
    file = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file)


UP = "model.layers.1.mlp.up_proj.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 52168\n"


def shard(folder):
    return sorted(folder.glob("*.safetensors"))[1]


def cut(keep):
    return lambda folder: shard(folder).write_bytes(shard(folder).read_bytes()[:keep])


def as_pipe(name):
    def change(folder):
        place = folder / name if name else shard(folder)
        place.unlink()
        os.mkfifo(place)

    return change


def index_is(content):
    return lambda folder: (folder / INDEX).write_bytes(content)


def index_names(name):
    """Gives the file of `UP` another name in the index."""

    def change(index, folder):
        file = index["weight_map"][UP]
        other = name.format(file=file, folder=folder) if isinstance(name, str) else name
        index["weight_map"] = {t: other if f == file else f for t, f in index["weight_map"].items()}

    return lambda folder: edit(folder / INDEX, lambda index: change(index, folder))


def config_says(**fields):
    def change(folder):
        (folder / "generation_config.json").unlink()
        edit(folder / "config.json", lambda config: config.update(fields))

    return change


def only_a_pickle(folder):
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


DAMAGES = [
    (
        "no shard",
        lambda folder: shard(folder).unlink(),
        f"{INDEX} names files that are missing: model-00002",
    ),
    (
        "no tensor",
        lambda folder: tensor_change(folder, UP, lambda tensors: tensors.pop(UP)),
        rf"1 tensors are missing: {UP} \(128, 32\)",
    ),
    ("cut in its length", cut(3), "model-00002.* is damaged .truncated"),
    ("cut in its header", cut(20), "model-00002.* is damaged .truncated"),
    ("cut in its data", cut(-1), "model-00002.* is damaged .truncated"),
    (
        "git without its extension",
        lambda folder: shard(folder).write_bytes(LFS),
        "model-00002.*git lfs pull",
    ),
    ("pipe: config", as_pipe("config.json"), "config.json is no regular file"),
    ("pipe: tokenizer", as_pipe("tokenizer.json"), "no tokenizer at .*tokenizer.json"),
    ("pipe: shard", as_pipe(None), "model-00002.* is no regular file"),
    ("index: no JSON", index_is(b'{"a": ' + 50_000 * b"["), f"{INDEX} is no JSON"),
    (
        "index: empty",
        index_is(b"{}"),
        f"{INDEX} is not an index .* weight_map must be an object; got None",
    ),
    *(
        (
            f"index: {name}",
            index_names(name),
            f"{INDEX} is not an index.* must be the name",
        )  # only names within the folder are valid
        for name in (3, "", "..", "../model/{file}", "{folder}/{file}", "*")
    ),
    ("pickle", only_a_pickle, "neither model.safetensors nor .*pickle.*save_pretrained"),
    (
        "a tensor too many",
        lambda folder: tensor_change(
            folder, UP, lambda tensors: tensors.update({BIAS: np.zeros(32, np.float32)})
        ),
        rf"1 tensors are not part of the model: {BIAS} \(32,\) in model-",
    ),
    (
        "architecture",
        config_says(architectures=["BertModel"]),
        "config.json: architectures must be one of Llama.*, Mistral.*; got 'BertModel'",
    ),
    ("no width", config_says(hidden_size=None), "config.json lacks the key 'hidden_size'"),
    (
        "activation",
        config_says(hidden_act="softplus"),
        "hidden_act must be one of gelu.*; got 'softplus'",
    ),
    (
        "quantised",
        config_says(quantization_config={"bits": 4}),
        "give the checkpoint before it was quantised",
    ),
    (
        "rope",
        config_says(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        "rotary positions by .*dynamic",
    ),
    (
        "llama 3",
        config_says(rope_parameters={"rope_type": "llama3", "factor": 2.0}),
        "config.json: low_freq_factor of llama3 .*; got None",
    ),
    (
        "scaling",
        config_says(rope_scaling="linear"),
        "config.json says rope_scaling = 'linear'; it must be an object",
    ),
    (
        "epsilon",
        config_says(rms_norm_eps="1e-5"),
        "config.json does not describe .* norm_epsilon must be a number above 0; got '1e-5'",
    ),
    (
        "tied",
        config_says(tie_word_embeddings="false"),
        "config.json: tie_word_embeddings must be True or False; got",
    ),
    ("stop", config_says(eos_token_id=[1, 304]), "eos_token_id must be .* below 304; got 304"),
]


@pytest.mark.parametrize(
    "change, message", [case[1:] for case in DAMAGES], ids=[case[0] for case in DAMAGES]
)
def test_damage_is_named(saved, change, message):
    change(saved)
    with refusal(message, (ValueError, FileNotFoundError)):
        open_all(saved)


def test_damaged_headers_are_refused(tmp_path):
    def with_header(header):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
        return epath.Path(tmp_path / "x")

    good = {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    assert read_header(with_header(good))["a"].shape == (2, 2)
    for header, message in (
        (b"{", "its header cannot be read"),
        (
            b'{"a": ' + 50_000 * b"[" + 50_000 * b"]" + b"}",
            "its header cannot be read: RecursionError",
        ),
        (
            good | {"a": good["a"] | {"shape": [-2, -2]}},
            r"its header cannot be read: ValueError: shape\[0\] must be an integer >= 0 .*; got -2",
        ),
        ([], "its header cannot be read"),
        ({"a": {}}, "its header cannot be read"),
        (good | {"a": good["a"] | {"shape": [2, 3]}}, "a .2, 3. of F32 takes bytes 0 to 16"),
        (
            good | {"a": good["a"] | {"data_offsets": [0, 8, 16]}},
            "x is damaged .its header cannot be read",
        ),
        (
            good | {"a": good["a"] | {"shape": [3], "data_offsets": [0, 12]}},
            "too long: .* bytes; its header says",
        ),
        (good | {"b": good["a"]}, "b .2, 2. of F32 takes bytes 0 to 16, behind byte 16"),
    ):
        with refusal(message):
            read_header(with_header(header))


def test_config_contradicting_the_tensors_is_refused(saved):
    edit(
        saved / "config.json",
        lambda config: config.update(intermediate_size=96, num_key_value_heads=4),
    )
    with refusal("does not contain the model of its config.json") as caught:
        open_all(saved)
    assert "8 tensors" not in str(caught.value)
    assert "10 tensors are of another shape" in str(caught.value)
    assert "k_proj.weight (16, 32) in model-0000" in str(caught.value)
    assert "(32, 32) wanted" in str(caught.value)


def test_unsupported_dtypes_matter_only_where_they_are_read(saved):
    """Buffers that transformers computes are never read."""
    mask = "model.layers.0.self_attn.masked_attn.bias"
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    buffers = {mask: np.ones((2, 2), bool), buffer: np.zeros(4, np.float32)}
    tensor_change(saved, UP, lambda tensors: tensors.update(buffers))
    open_all(saved)
    tensor_change(saved, UP, lambda tensors: tensors.update({UP: tensors[UP].astype(np.int8)}))
    with refusal(rf"1 tensors are of a dtype .*BF16.: {UP} \(128, 32\) in model-.*: I8"):
        open_all(saved)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tensor", [UP, "lm_head.weight", "model.norm.weight"])
def test_weights_of_nan_are_named_while_reading(saved, tensor, number):
    """They are named in float, and in int8, where they enter the scales."""

    def damage(tensors):
        tensors[tensor] = tensors[tensor].copy()
        tensors[tensor].flat[-1] = number

    tensor_change(saved, tensor, damage)
    for int8 in ({}, {"weight_dtype": "int8"}):
        checkpoint = open_checkpoint(saved, **int8)
        with refusal(rf"model-.*safetensors: {tensor} holds numbers that are infinite or NaN"):
            read_params(checkpoint, TransformerLM(checkpoint.config))


def test_numbers_too_large_for_the_dtype_are_named(saved):
    largest = np.full((128, 32), np.finfo(np.float32).max)
    tensor_change(saved, UP, lambda tensors: tensors.update({UP: largest}))
    with refusal(f"{UP} holds numbers .* or bfloat16 is too narrow for them"):
        read_params((checkpoint := open_checkpoint(saved)), TransformerLM(checkpoint.config))


def test_names_without_their_prefix(tmp_path):
    """The first GPT-2 files have these names, and also contain masks."""
    gpt2 = golden.read("gpt2")

    def read(folder):
        return read_params((c := open_checkpoint(folder, dtype="float32")), TransformerLM(c.config))

    expected = read(gpt2.write_checkpoint(tmp_path / "with"))
    bare = {
        name.removeprefix("transformer."): golden.weights(name, shape)
        for name, shape in gpt2.shapes.items()
    }
    folder = gpt2.write_checkpoint(tmp_path / "without")
    safetensors.numpy.save_file(
        bare | {"h.0.attn.bias": np.ones((4, 4), np.float32)}, folder / "model.safetensors"
    )
    jax.tree.map(np.testing.assert_array_equal, read(folder), expected)


@pytest.mark.parametrize("block", [64 * 2**20, 3 * 32 * 4], ids=["whole", "in blocks"])
def test_a_tied_model_may_repeat_its_embedding_only(saved, block, monkeypatch):
    monkeypatch.setattr(safetensors_io, "BLOCK_BYTES", block)
    edit(saved / "config.json", lambda config: config.update(tie_word_embeddings=True))
    with refusal("says tie_word_embeddings = true, but its output embedding differs"):
        open_all(saved)
    embedding = find_tensors(epath.Path(saved))["model.embed_tokens.weight"].read(
        (slice(None), slice(None))
    )
    tensor_change(
        saved,
        "lm_head.weight",
        lambda tensors: tensors.update({"lm_head.weight": np.array(embedding)}),
    )
    assert open_all(saved)[0].config.tied
    tensor_change(
        saved, UP, lambda tensors: tensors.update({"lm_head.bias": np.zeros(4, np.float32)})
    )
    with refusal("not part of the model: lm_head.bias"):
        open_all(saved)


def test_a_tokenizer_with_more_entries_than_the_embedding(saved, tokenizer):
    edit(saved / "config.json", lambda config: config.update(vocab_size=250))
    with refusal(f"tokenizer.* {tokenizer.vocab_size} tokens.* 250 rows"):
        open_checkpoint(saved)
