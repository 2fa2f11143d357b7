"""Public heads: golden forward passes, files that other packages write, and files that do
not fit.
"""

import dataclasses
import io
import json
import pathlib
import pickle
import shutil
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.numpy import save_file

from specsamp import TransformerConfig
from specsamp.checkpoints.head_config import parse_head
from specsamp.checkpoints.pickles import read_pickle
from specsamp.checkpoints.public_heads import check_embedding, open_head, read_head
from specsamp.checkpoints.published import published_config
from specsamp.models.eagle import Eagle1Config
from specsamp.models.heads import FeatureHead
from specsamp.models.medusa import MedusaConfig
from support import golden_heads
from support.extras import slow_but
from support.refusals import refusal, refused_calls

TOY_TARGET = TransformerConfig(
    vocab_size=16, width=8, num_layers=9, num_heads=2, positions="rotary"
)
TARGET = TransformerConfig(vocab_size=64, width=32, num_layers=12, num_heads=4, positions="rotary")
OFFSETS = np.array([0, 1, 1, 4, 5, 5])  # ids 0, 2, 3, 7, 9, 10
TOKENS = jnp.asarray([[3, 1, 4, 15]])


def toy_eagle3(folder, tensors=(), **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(golden_heads.EAGLE3 | config))
    tensors = golden_heads.recipe(golden_heads.EAGLE3_SHAPES) | {"d2t": OFFSETS} | dict(tensors)
    save_file(
        {name: x for name, x in tensors.items() if x is not None}, folder / "model.safetensors"
    )
    return folder


def toy_eagle1(folder, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(golden_heads.EAGLE1 | config))
    shutil.copy(golden_heads.FOLDER / "eagle1.bin", folder / "pytorch_model.bin")
    return folder


def load(folder, target=TOY_TARGET, **options):
    checkpoint = open_head(folder, target, dtype="float32", **options)
    head = FeatureHead(checkpoint.config)
    return head, head.prepare(read_head(checkpoint, head))


def two_calls(head, weights, hidden, tokens=TOKENS):
    """Returns the features of all pairs, and of one more pair: the last feature and token 5."""
    start_B, length = jnp.zeros(1, jnp.int32), tokens.shape[1]
    cache = head.init_cache(1, length + 2)
    features, cache = head(
        weights, head.embed(weights, tokens), head.fuse(weights, hidden), start_B, cache
    )
    more, _ = head(
        weights, head.embed(weights, jnp.asarray([[5]])), features[:, -1:], start_B + length, cache
    )
    return features[0], more[0, 0]


GOLDEN_3 = [
    [0.052108, 0.093196, -0.156671, 0.082584, 0.064014, -0.154406],
    [0.316965, -0.018370, -0.296354, 0.350870, -0.097311, -0.241690],
]
GOLDEN_1 = [
    [-0.270049, 0.749794, -0.071999, -0.753309, 0.222480, 0.448516, -0.003630, -0.376160],
    [0.956510, 0.530843, -1.139690, 0.265795, 0.504024, -0.723871, 0.517863, 0.467373],
]


def test_eagle_3_in_eagles_layout(tmp_path):
    head, weights = load(toy_eagle3(tmp_path))
    assert head.hidden_layers == (1, 3, 5)
    hidden = tuple(jnp.split(jnp.sin(0.7 * jnp.arange(96)).reshape(1, 4, 24), 3, axis=-1))
    features, more = two_calls(head, weights, hidden)
    rows = jnp.stack([features[0], more])[None]
    logits = head.logits(weights, rows, None)
    assert_allclose(logits[0], GOLDEN_3, atol=1e-5)
    whole = head.expand(weights, logits)
    assert_array_equal(np.flatnonzero(np.isfinite(whole[0, 0])), [0, 2, 3, 7, 9, 10])
    assert_array_equal(whole[..., jnp.asarray([0, 2, 3, 7, 9, 10])], logits)


def test_eagle_1_from_a_pickle(tmp_path):
    head, weights = load(toy_eagle1(tmp_path))
    assert head.hidden_layers == (9,)
    features, more = two_calls(head, weights, (jnp.sin(0.7 * jnp.arange(32)).reshape(1, 4, 8),))
    assert_allclose([features[3], more], GOLDEN_1, atol=1e-5)


@pytest.mark.parametrize("name", slow_but(golden_heads.NAMES, golden_heads.NAMES[0]))
def test_heads_of_speculators(tmp_path, name):
    """Covers all switches of EAGLE-3 and 3.1; written heads are read back unchanged."""
    golden = golden_heads.write_head(name, tmp_path / "theirs")
    head, weights = load(tmp_path / "theirs", TARGET)
    assert head.hidden_layers == (1, 5, 8), "its ids 2, 6, 9 name what enters layers"
    hidden = tuple(jnp.split(golden["hidden"], 3, axis=-1))
    features, _ = two_calls(head, weights, hidden, golden["tokens"])
    assert_allclose(head.logits(weights, features[None], None), golden["logits"], atol=1e-5)
    params = read_head(open_head(tmp_path / "theirs", TARGET, dtype="float32"), head)
    again = golden_heads.write_again(tmp_path, head, params, TARGET)
    assert again.notes("org/target") == []
    assert "was trained for org/target" in again.notes("org/other")[0]


MEDUSA_SHAPES = {"{}.0.linear.weight": (8, 8), "{}.0.linear.bias": (8,), "{}.1.weight": (16, 8)}
BLOCKS = {
    "{}.0.linear.weight": "blocks.{}.layers.0.weight",
    "{}.0.linear.bias": "blocks.{}.layers.0.bias",
}
BLOCKS["{}.1.weight"] = "lm_heads.{}.weight"


def toy_medusa(folder, names=(), num_heads=3, **config):
    """Writes a config and returns tensors, in the authors' layout or with other ``names``. The
    authors' configs state too few heads.
    """
    tensors = {
        dict(names).get(name, name).format(k): np.cos(np.arange(np.prod(shape)) + k)
        .reshape(shape)
        .astype(np.float32)
        for name, shape in MEDUSA_SHAPES.items()
        for k in range(num_heads)
    }
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def medusa_logits(folder):
    head, weights = load(folder)
    assert head.config.num_heads == 3 and head.hidden_layers == (9,)
    hidden = jnp.sin(jnp.arange(8.0))[None, None]
    # The number of a head may be an array on the device.
    logits = jax.jit(lambda k: head.logits(weights, head.fuse(weights, (hidden,)), None, k)[0, 0])
    assert_allclose(head.logits(weights, hidden, None, 1)[0, 0], logits(1), atol=1e-5)
    return [logits(k) for k in range(3)]


def test_medusa_in_both_layouts(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    tensors = toy_medusa(
        folder, medusa_num_heads=2, medusa_num_layers=1, base_model_name_or_path="org/vicuna"
    )
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    assert "was trained for org/vicuna" in open_head(folder, TOY_TARGET).notes("org/other")[0]
    logits, h = medusa_logits(folder), np.sin(np.arange(8.0))
    for k in range(3):
        y = tensors[f"{k}.0.linear.weight"] @ h + tensors[f"{k}.0.linear.bias"]
        assert_allclose(logits[k], tensors[f"{k}.1.weight"] @ (h + y / (1 + np.exp(-y))), atol=1e-5)

    other = tmp_path / "vllm"
    other.mkdir()
    renamed = toy_medusa(
        other,
        BLOCKS,
        architectures=["MedusaModel"],
        model_type="medusa",
        num_heads=3,
        num_hidden_layers=1,
    )
    assert "lm_heads.2.weight" in renamed
    save_file(renamed, other / "model.safetensors")
    assert_array_equal(medusa_logits(other), logits)


@pytest.mark.parametrize("name", ["openai/gpt-oss-20b", "google/gemma-3-27b-it"])
def test_medusa_head_has_no_windows_or_sinks(name):
    target = published_config(name, "float32")
    _, head = parse_head("config.json", {"medusa_num_heads": 2}, target, "float32", ())
    assert head.layer.window is None
    assert not head.layer.attention_sinks


def test_hidden_layers_are_named_as_outputs(tmp_path):
    """Layers are counted as in SpecForge."""
    folder = toy_eagle3(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 4, 8]})
    assert open_head(folder, TOY_TARGET).config.hidden_layers == (0, 4, 8)


def test_embedding_of_the_target_is_not_read(tmp_path):
    folder = toy_eagle3(tmp_path)
    same = open_head(folder, TOY_TARGET).tensors["embed_tokens.weight"]
    assert not open_head(folder, TOY_TARGET, target_embedding=same).config.own_embedding
    other = open_head(folder, TOY_TARGET).tensors["lm_head.weight"]
    assert open_head(folder, TOY_TARGET, target_embedding=other).config.own_embedding


# Pickles: tensors and plain containers, and nothing else.


def archive(path, description, **entries):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", description)
        for name, content in entries.items():
            file.writestr(f"archive/data/{name}", content)
    return epath.Path(path)


class Calls:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
    b"X\x01\0\0\x000X\x03\0\0\0cpuK\x02tQ"
)
PLAIN = b"\x80\x02}X\x01\0\0\0w" + TENSOR + b"K\0K\x02\x85K\x01\x85\x89}tRs."


def test_scaled_embeddings_refuse_heads_that_share_them():
    scaled = dataclasses.replace(TARGET, embedding_scale=12.0)
    sizes = dict(layer=TARGET, target_layers=TARGET.num_layers, hidden_layers=(TARGET.num_layers,))
    shares = Eagle1Config(**sizes)
    with refusal("a shares the embedding .*own_embedding=True"):
        check_embedding(scaled, shares, "a")
    check_embedding(dataclasses.replace(scaled, embedding_scale=1.0), shares, "a")
    check_embedding(scaled, dataclasses.replace(shares, own_embedding=True), "a")
    check_embedding(scaled, MedusaConfig(**sizes, num_heads=2), "a")  # it reads no tokens


def test_tensors_of_a_pickle(tmp_path):
    file = archive(tmp_path / "x.bin", PLAIN, **{"0": np.array([1, 2], np.float32).tobytes()})
    assert_array_equal(read_pickle(file)["w"].read([slice(1, 2)]), [2])


def hostile(tmp_path):
    """Yields pickles by their attack: on files, on memory, or on objects of the program."""
    mark = str(tmp_path / "mark")
    yield "a call", pickle.dumps({"w": Calls(open, mark, "w")}, 2)
    yield "evaluation", pickle.dumps(Calls(eval, f"open({mark!r}, 'w')"), 2)
    yield "an old call", b"(S'" + mark.encode() + b"'\nS'w'\nibuiltins\nopen\n."
    yield "a method of an allowed class", b"\x80\x02ccollections\nOrderedDict.fromkeys\n."
    yield "a place in memory", b"\x80\x02}r\xff\xff\xff\xff."
    yield "a buffer", b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\x00\x00."
    yield (
        "a change of ours",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x01\0\0\0aK\x01s\x86b.",
    )
    yield "a call of a dictionary", b"\x80\x02ccollections\nOrderedDict\n)R)R."
    yield "a view", PLAIN.replace(b"K\x01\x85\x89", b"K\x02\x85\x89")
    yield "more than there is", PLAIN.replace(b"K\x02\x85K\x01", b"K\x63\x85K\x01")
    yield "no tensor", b"\x80\x02}X\x01\0\0\0wK\x01s."
    yield "no names", b"\x80\x02]."
    yield "half of it", PLAIN[:40]


def test_hostile_pickles_are_refused_and_nothing_runs(tmp_path):
    cases = dict(hostile(tmp_path))
    for what, description in cases.items():
        file = archive(tmp_path / "x.bin", description, **{"0": bytes(8)})
        with refusal("x.bin"):
            read_pickle(file)
            pytest.fail(f"{what} was read")
    assert not (tmp_path / "mark").exists()
    assert len(cases) == 13


def test_files_other_than_torch_archives_are_refused(tmp_path):
    (tmp_path / "x.bin").write_bytes(pickle.dumps({"w": 1}))
    with refusal("older than PyTorch 1.6 .*zip"):
        read_pickle(epath.Path(tmp_path / "x.bin"))
    compressed = io.BytesIO()
    with zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", PLAIN)
        file.writestr("archive/data/0", bytes(8))
    (tmp_path / "x.bin").write_bytes(compressed.getvalue())
    with refusal("is compressed"):
        read_pickle(epath.Path(tmp_path / "x.bin"))


HERE = pathlib.Path()  # an empty folder


def eagle3(tensors=(), **config):
    return load(toy_eagle3(HERE, dict(tensors), **config))


def d2t(*offsets, dtype=int):
    return eagle3({"d2t": np.array(offsets, dtype)})


def eagle1(**config):
    return open_head(toy_eagle1(HERE, **config), TOY_TARGET)


def medusa(left_out="", **config):
    tensors = toy_medusa(HERE, medusa_num_heads=2, **config)
    tensors = {name: x for name, x in tensors.items() if name[0] != left_out}
    save_file(tensors, "medusa_lm_head.safetensors")
    return open_head(HERE, TOY_TARGET)


test_refused_heads = refused_calls(
    {
        "hidden_size = 16, but the target's width is 8": lambda: eagle3(hidden_size=16),
        r"of 9 layers: eagle_aux_.*\[2\] must be .* below 10; got 11": lambda: eagle3(
            eagle_aux_hidden_state_layer_ids=[2, 5, 11]
        ),
        "names a layer twice": lambda: eagle3(eagle_aux_hidden_state_layer_ids=[2, 2, 6]),
        "num_hidden_layers = 2; only 1 is supported": lambda: eagle3(num_hidden_layers=2),
        r"1 tensors are missing: input_norm.weight \(24,\)": lambda: eagle3(norm_before_fc=True),
        "speculators_model_type must be one of .*eagle3, .*; got 'peagle'": lambda: eagle3(
            speculators_model_type="peagle"
        ),
        "one of llama, qwen3; got 'gpt2'": lambda: eagle3(model_type="gpt2"),
        "norm_before_residual must be True or False; got 'false'": lambda: eagle3(
            norm_before_residual="false"
        ),
        "architectures = 'DFlashDraftModel'; known": lambda: eagle3(
            architectures=["DFlashDraftModel"]
        ),
        "config.json does not describe a supported head": lambda: eagle3(architectures=[]),
        "a reduced vocabulary of 6 tokens, but no tensor d2t": lambda: eagle3({"d2t": None}),
        r"model.safetensors: d2t\[5\] makes token 16 of 5; .* below 16": lambda: d2t(
            0, 1, 1, 4, 5, 11
        ),
        r"d2t\[2\] makes token 3 of 2": lambda: d2t(0, 2, 1, 4, 5, 5),
        r"d2t \(6,\) of F32; it must be integers \(6,\)": lambda: d2t(
            0, 1, 1, 4, 5, 5, dtype=np.float32
        ),
        "t2d and d2t name different tokens": lambda: eagle3({"t2d": np.arange(16) < 6}),
        r"not part of the model: extra.weight \(3,\) in model": lambda: eagle3(
            {"extra.weight": np.zeros(3, np.float32)}
        ),
        "model.safetensors: norm.weight.*NaN": lambda: eagle3(
            {"norm.weight": np.full(8, np.nan, np.float32)}
        ),
        "bias must be True or False; got 'false'": lambda: eagle1(bias="false"),
        "qkv_bias must be True or False; got 'false'": lambda: eagle1(qkv_bias="false"),
        "medusa_num_layers = 2; only 1 is supported": lambda: medusa(medusa_num_layers=2),
        "hidden_size = 32, but the target's width is 8": lambda: medusa(hidden_size=32),
        "truncated_vocab_size = 6; only 16 is supported": lambda: medusa(truncated_vocab_size=6),
        r"3 tensors are missing: 1.0.linear.bias \(8,\); 1.0.linear.weight": lambda: medusa("1"),
    }
)
