"""Pairs in a folder: int8 is within half a step, nothing else changes, and all damage is named."""

import json
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax.traverse_util import flatten_dict

from specsamp import TransformerLM
from specsamp.checkpoints import trained_pair as pairs
from specsamp.checkpoints.hub import find_folder
from specsamp.checkpoints.int8_tensors import PAIR_SCALES, read_pair_tensors, write_pair_tensors
from specsamp.checkpoints.params import check_shapes, digest, digest_of_pair
from specsamp.checkpoints.trained_pair import load_pair, load_prompts, save_pair
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard_model
from specsamp.models.config import tiny
from specsamp.models.eagle import Eagle3Config
from specsamp.models.heads import FeatureHead
from specsamp.models.int8 import summed_axes
from specsamp.storage import place
from specsamp.training.data import train_tokenizer
from support.checkpoint_shapes import edit, random_params
from support.heads import layer_config
from support.refusals import refusal
from support.weights import drawn_params

SHAPE = {"vocab_size": 300, "width": 16, "num_heads": 2, "num_layers": 1}
TARGET = tiny(**SHAPE)
DRAFT = tiny(**SHAPE | {"width": 12, "positions": "rotary"})


@pytest.fixture(scope="module")
def params():
    return {"target": random_params(TARGET, 0), "draft": random_params(DRAFT, 1)}


@pytest.fixture(scope="module")
def original(params, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs") / "mine"
    tokenizer = train_tokenizer(["def f(x): return x  # é"] * 3, 300).to_str()
    sides = dict(target=(TARGET, params["target"]), draft=(DRAFT, params["draft"]))
    save_pair(folder, **sides, tokenizer_json=tokenizer, provenance={"of": "a test"})
    return folder


@pytest.fixture
def saved(original, tmp_path):
    return shutil.copytree(original, tmp_path / "pair")


def restored(params):
    """Returns the parameters after rounding to int8 and back."""
    return read_pair_tensors(write_pair_tensors(params), in_int8=False)


def test_int8_weights_move_half_a_step_at_most(params):
    """The largest weight of a channel becomes 127; a channel of zeros stays zero."""
    stored = write_pair_tensors(params["target"])
    weights = flatten_dict(params["target"], sep="/")
    assert {name for name in weights if stored[name].dtype == np.float32} == {
        name for name in weights if name.endswith(("bias", "scale"))
    }
    for name, after in restored(params["target"]).items():
        if stored[name].dtype == np.float32:
            np.testing.assert_array_equal(after, weights[name])
            continue
        before, axes = np.asarray(weights[name]), summed_axes(name)
        half_a_step = np.abs(before).max(axes, keepdims=True) / 127 / 2
        assert (np.abs(after - before) <= half_a_step * (1 + 1e-5)).all()
        assert (np.abs(after - before) > half_a_step / 2).any(axes).mean() > 0.9  # and no finer
        assert (np.abs(stored[name]).max(axes) == 127).all()  # every channel uses the range
    assert not restored({"embedding": params["target"]["embedding"].at[3].set(0)})["embedding"][
        3
    ].any()


def test_a_pair_is_its_dequantised_weights(original, params):
    pair = load_pair(original)
    for config, model, loaded, given in [
        (TARGET, pair.target, pair.target_params, params["target"]),
        (DRAFT, pair.draft, pair.draft_params, params["draft"]),
    ]:
        assert model.config == config
        assert jax.tree.structure(loaded) == jax.tree.structure(given)
        stored = restored(given)
        for name, value in flatten_dict(loaded, sep="/").items():
            assert value.dtype == jnp.float32
            np.testing.assert_array_equal(value, stored[name])
    assert pair.tokenizer.decode(pair.tokenizer.encode("def é")) == "def é"
    assert load_pair(original, dtype="bfloat16").target.config.dtype == "bfloat16"
    assert json.loads((original / "pair.json").read_text())["provenance"] == {"of": "a test"}


def test_half_a_pair_is_none(original, params, tmp_path, monkeypatch):
    """A save that is killed while it replaces a pair results in no pair, not in a mixture."""
    folder = shutil.copytree(original, tmp_path / "pair")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(pairs, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        save_pair(
            folder,
            target=(TARGET, params["target"]),
            draft=(DRAFT, params["draft"]),
            tokenizer_json="",
            provenance={},
        )
    with refusal("no pair", FileNotFoundError):
        load_pair(folder)


@pytest.mark.parametrize("name", ["final_norm/scale", "layer_0/mlp/up.scale_of_int8"])
def test_weights_that_are_no_numbers_are_named(saved, name):
    tensors = safetensors.numpy.load_file(saved / "target.safetensors")
    tensors[name] = np.full_like(tensors[name], np.nan)
    safetensors.numpy.save_file(tensors, saved / "target.safetensors")
    with refusal(f"target.safetensors: {name} holds numbers that are infinite or NaN"):
        load_pair(saved)


@pytest.mark.parametrize("name", ["target.safetensors", "draft.safetensors", "tokenizer.json"])
def test_missing_and_truncated_files_are_named(saved, name):
    content = (saved / name).read_bytes()
    for length in (len(content) - 3, 5):
        (saved / name).write_bytes(content[:length])
        with refusal(f"pair/{name} is (damaged|not a tokenizer.json)"):
            load_pair(saved)
    (saved / name).unlink()
    with refusal(name, FileNotFoundError):
        load_pair(saved)


def test_weights_of_another_pair_are_named(saved):
    """The error names both shapes, or the weight that lacks scales."""
    edit(
        saved / "pair.json",
        lambda content: content["draft"].update(feedforward_width=50, positions="relative"),
    )
    with refusal("draft.safetensors is of another model") as caught:
        load_pair(saved)
    message = str(caught.value)
    assert "layer_0/mlp/up: (12, 48) there, (12, 50) wanted" in message
    assert "layer_0/attention/relative: absent there, (2, 12, 6) wanted" in message
    assert "target" not in message
    tensors = safetensors.numpy.load_file(saved / "draft.safetensors")
    del tensors["embedding" + PAIR_SCALES]
    safetensors.numpy.save_file(tensors, saved / "draft.safetensors")
    with refusal("draft.safetensors is damaged .embedding has no scales"):
        load_pair(saved)


def test_a_tokenizer_of_another_model(saved):
    texts = ["".join(map(chr, range(300 + 40 * i, 340 + 40 * i))) for i in range(20)]
    larger = train_tokenizer(texts * 3, 400)
    assert larger.get_vocab_size() > 300
    (saved / "tokenizer.json").write_text(larger.to_str())
    with refusal(f"tokenizer.* {larger.get_vocab_size()} tokens .* 300"):
        load_pair(saved)


def test_the_end_of_text_is_the_pairs_own(saved):
    described = json.loads((saved / "pair.json").read_text())
    assert load_pair(saved).tokenizer.eos_id == load_pair(saved).tokenizer.token_id(
        described["eos"]
    )
    for content, message in (
        (described | {"eos": "<end>"}, "has no token '<end>'"),
        (described | {"eos": [7]}, r"says eos = \[7\]; it must be the text"),
        ({"target": {}}, "pair.json does not describe a pair"),
        ({"target": {"wdth": 3}, "draft": {}}, "pair.json does not describe a pair"),
    ):
        (saved / "pair.json").write_text(json.dumps(content))
        with refusal(message):
            load_pair(saved)


def test_unknown_names_list_what_is_shipped(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(pairs, "ASSETS", tmp_path)
    assert load_pair("pair").target.config == TARGET
    with refusal("no pair 'rust': give one of pair, or a folder", FileNotFoundError):
        load_pair("rust")
    monkeypatch.setattr(pairs, "ASSETS", tmp_path / "nothing")
    with refusal("give one of none", FileNotFoundError):
        load_pair("pair")


@pytest.mark.parametrize("name", [None, 5])
@pytest.mark.parametrize(
    "read, what", [(load_pair, "a pair"), (find_folder, "a checkpoint"), (place, "a file")]
)
def test_invalid_pair_name_is_refused(read, what, name):
    with refusal(f"{what} must be a path or a name; got {name}"):
        read(name)


def test_prompts_of_a_pair_are_read(saved):
    with refusal("has no prompts: .*prompts.json is missing", FileNotFoundError):
        load_prompts(saved)
    (saved / "prompts.json").write_text('{"prompts": [{"text": "é"}, {"text": "b"}]}')
    assert load_prompts(saved) == ["é", "b"]
    for content in ("{", "{}", '{"prompts": 3}', '{"prompts": [{"text": 3}]}'):
        (saved / "prompts.json").write_text(content)
        with refusal("prompts.json (is no JSON|holds prompts|holds no prompts)"):
            load_prompts(saved)


# Digests of parameters differ by values, and are equal on every mesh and with rows of padding.


MODEL = TransformerLM(tiny(num_layers=1))
PARAMS = drawn_params(MODEL)


def test_values_dtypes_places_names_and_signs_count():
    """A corrected conversion reorders heads or halves, transposes a matrix, or swaps a side."""
    x, y = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 64)).astype(np.float32))
    nearly = x.at[3, 5].set(np.nextafter(np.float32(x[3, 5]), np.float32(9)))
    others = [{"a": made} for made in (x, -x, x.T, x[::-1], jnp.roll(x, 32, 0), nearly)]
    others += [{"b": x}, {"a": x, "b": y}, {"a": y, "b": x}, ({"a": x}, {"b": y})]
    others += [{"a": x.astype(jnp.bfloat16)}, {"a": jnp.ones(3, bool)}, {"a": jnp.ones(3, int)}]
    assert len({digest(params) for params in others}) == len(others)


def test_heads_that_read_other_layers_have_another_digest():
    """The weights are equal; a vocabulary that is padded for a mesh belongs to the same head."""

    def of(**fields):
        layer = layer_config(fields.pop("vocab_size", 32))
        config = Eagle3Config(
            layer=layer, target_layers=6, **({"hidden_layers": (1, 2, 3)} | fields)
        )
        return digest_of_pair(
            types.SimpleNamespace(target_params=PARAMS, draft_params={}, head=FeatureHead(config))
        )

    assert of(vocab_size=40) == of()
    assert len({of(), of(hidden_layers=(1, 2, 4)), of(norm_output=True), digest((PARAMS, {}))}) == 4


def test_a_mesh_and_padding_do_not_change_it():
    split = shard_model(MODEL, Layout.tensor_parallel(make_mesh(2, 4)))
    placed = jax.device_put(PARAMS, split.param_shardings(PARAMS))
    padded = PARAMS | {"embedding": jnp.pad(PARAMS["embedding"], ((0, 8), (0, 0)))}
    assert digest(placed) == digest(padded) == digest(PARAMS)
    check_shapes("a checkpoint", PARAMS, padded, padded=True)
    with refusal("a checkpoint is of another model: gate: .4, 6, 3. there, .4, 3, 6. wanted"):
        check_shapes(
            "a checkpoint",
            {"gate": np.zeros((4, 6, 3))},
            {"gate": np.zeros((4, 3, 6))},
            padded=True,
        )
