"""Values of config.json that transformers reads in its own way, each found by differing logits."""

import copy
import json
import pathlib

import pytest

from specsamp.checkpoints.architectures import FAMILIES, parse_config
from specsamp.checkpoints.fields import Fields
from support import golden
from support.refusals import refusal, refused_calls

LLAMA3 = dict(
    rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0
)
SCALINGS = {"llama3": LLAMA3, "yarn": dict(rope_type="yarn", rope_theta=500.0, factor=4.0)}
ORIGINAL = "original_max_position_embeddings"
# Defaults of transformers' configuration classes, for the keys that are read here.
DEFAULTS = json.loads(pathlib.Path(__file__).with_name("defaults.json").read_text())
RELEASE = DEFAULTS.pop("transformers")
WHOLE_HEADS = ("llama2", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "arcee")


def read(name, **changes):
    return parse_config(
        "config.json", copy.deepcopy(golden.read(name).config | changes), "float32"
    )[1]


@pytest.mark.parametrize(
    "name, key", [(name, key) for name, keys in DEFAULTS.items() for key in keys]
)
def test_absent_key_has_the_default_of_transformers(name, key):
    """A wrong default is a silent error: once, a Mixtral without rope_theta had another base."""
    config = golden.read(name).config
    given = {
        other: value
        for other, value in config.items()
        if other not in (key, "rope_parameters", "layer_types")
    }
    if key in ("sliding_window", "max_window_layers") and "use_sliding_window" in DEFAULTS[name]:
        given |= {"use_sliding_window": True}
    if key == "num_experts":
        given.pop("num_local_experts", None)
    family = FAMILIES[config["architectures"][0]]
    expected = family.read(Fields("config.json", given | {key: DEFAULTS[name][key]}))
    assert family.read(Fields("config.json", given)) == expected


@pytest.mark.parametrize("name", ["llama2", "qwen3", "gpt_neox", "mixtral"])
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_outer_original_length_overrides_the_inner(name, key, kind):
    within = read(name, **{key: SCALINGS[kind] | {ORIGINAL: 16}})
    assert within.rotary_scaling.original_positions == 16
    assert read(name, **{key: SCALINGS[kind] | {ORIGINAL: 8}, ORIGINAL: 16}) == within
    assert read(name, **{key: SCALINGS[kind], ORIGINAL: 16}) == within
    assert read(name, **{key: SCALINGS[kind] | {ORIGINAL: 16}, ORIGINAL: None}) == within
    neither = read(name, **{key: SCALINGS[kind]})
    assert neither.rotary_scaling.original_positions == neither.max_positions


def test_gemma_3_keeps_original_lengths_per_layer_kind():
    rope = dict(
        golden.read("gemma3").config["rope_parameters"],
        full_attention=SCALINGS["yarn"] | {ORIGINAL: 8},
    )
    found = read("gemma3", rope_parameters=rope, **{ORIGINAL: 16})
    assert found == read("gemma3", rope_parameters=rope)
    assert found.rotary_scaling.original_positions == 8


def test_keys_that_transformers_ignores_are_refused():
    """For Gemma 3, transformers reads truncate outside the kind of layer, and next to a default
    rope_type alone.
    """
    yarn = SCALINGS["yarn"]
    assert not read(
        "llama2", rope_scaling=yarn | dict(truncate=False)
    ).rotary_scaling.whole_dimensions
    assert not read(
        "llama2", rope_scaling=yarn | dict(truncate=None)
    ).rotary_scaling.whole_dimensions
    assert read("gemma3", rope_scaling=yarn | dict(truncate=True)) == read(
        "gemma3", rope_scaling=yarn
    )
    for scaling in (yarn | dict(truncate=False), dict(type="linear", factor=2.0)):
        with refusal("transformers ignores the keys type and truncate"):
            read("gemma3", rope_scaling=scaling)
    for name in ("gemma3", "olmo3"):
        with refusal("one rope_parameters for all layers"):
            read(name, rope_parameters=yarn)


@pytest.mark.parametrize("name", golden.NAMES)
def test_bidirectional_models_are_refused(name):
    assert read(name, is_causal=True) == read(name)
    with refusal("is_causal = False; only True is supported"):
        read(name, is_causal=False)


@pytest.mark.parametrize("name", WHOLE_HEADS)
def test_families_that_turn_whole_heads_ignore_a_part(name):
    assert read(name, rope_parameters=None, partial_rotary_factor=0.5) == read(
        name, rope_parameters=None
    )
    if name != "gemma3":
        within = dict(rope_type="default", rope_theta=10_000.0, partial_rotary_factor=0.5)
        assert read(name, rope_parameters=within).rotary_size is None
    linear = dict(rope_type="linear", factor=2.0, rope_theta=10_000.0, partial_rotary_factor=0.5)
    # transformers fails in this case.
    with refusal("partial_rotary_factor = 0.5 and scales"):
        read(name, rope_scaling=linear, rope_parameters=None)


def test_old_and_new_config_files_say_the_same():
    """The forms of Llama 3's authors and of transformers 5 are equal; a rope_scaling, which users
    add to lengthen a model, counts first.
    """
    new = dict(rope_parameters=LLAMA3 | {"original_max_position_embeddings": 8})
    old = dict(rope_parameters=None, rope_theta=500.0, rope_scaling=new["rope_parameters"])
    assert read("llama2", **old) == read("llama2", **new) != read("llama2")
    assert (
        read("llama2", **new, rope_scaling={"type": "linear", "factor": 2.0}).rotary_scaling.factor
        == 2
    )


def test_gpt_neox_turns_a_part_of_each_head():
    assert read("gpt_neox").rotary_size == 2
    half = dict(rope_theta=10_000.0, partial_rotary_factor=0.5)
    assert read("gpt_neox", rope_parameters=half).rotary_size == 4
    assert read("gpt_neox", rope_parameters=None, rotary_pct=0.5).rotary_size == 4
    # The key counts only within rope_parameters.
    assert read("gpt_neox", partial_rotary_factor=0.5).rotary_size == 2
    linear = read("gpt_neox", rope_scaling=half | dict(rope_type="linear", factor=2.0))
    assert linear.rotary_size == 4 and linear.rotary_scaling.factor == 2


@pytest.mark.parametrize("name", golden.NAMES)
def test_architecture_and_model_type_are_one_family(name):
    architecture = golden.read(name).config["architectures"][0]
    assert read(name) == read(name, model_type=None)
    for other in {family.model_type for family in FAMILIES.values()} - {
        FAMILIES[architecture].model_type
    } | {3}:
        with refusal(f"architectures = '{architecture}'.* model_type = {other!r}: correct"):
            read(name, model_type=other)


def test_longrope_ends_with_the_original_positions():
    """Its amplitude is that of the longer context, which would change all keys in a cache."""
    found = read("phi3")
    assert found.max_positions == 48 and found.rotary_size == 4
    assert found.rotary_scaling.divisors == (1.0, 1.5)
    longer = read("phi3", max_position_embeddings=48**2)
    assert longer.max_positions == 48 and longer.rotary_scaling.amplitude == 2**0.5


def test_which_layers_have_a_window():
    mixed = ["full_attention", "sliding_attention"]
    found = read("qwen2", layer_types=mixed, use_sliding_window=True, sliding_window=5)
    assert found.window == 5 and found.global_layers == (0,)
    assert read("qwen2", layer_types=None, max_window_layers=0).window is None


def test_a_mistral_may_have_layers_without_a_window():
    """transformers reads a Mistral with a list of layers as Ministral: some have no window."""
    found = read("mistral", layer_types=["full_attention", "sliding_attention"])
    assert found.window == 5 and found.global_layers == (0,)
    assert read("mistral", layer_types=2 * ["full_attention"]).window is None
    assert read("mistral", layer_types=2 * ["sliding_attention"]) == read("mistral")
    assert read("mistral").window == 5
    assert read("mistral", attention_bias=True) == read("mistral")


@pytest.mark.parametrize(
    "name, others", [("mixtral", "full_attention"), ("qwen3_moe", "sliding_attention")]
)
def test_ignored_layer_list_is_refused(name, others):
    """In transformers, all layers of a Mixtral have the window or none has, despite any list."""
    usual = {"mixtral": "sliding_attention", "qwen3_moe": "full_attention"}[name]
    count = golden.read(name).config["num_hidden_layers"]
    assert read(name, layer_types=count * [usual]) == read(name)
    for kinds in (count * [others], [usual, *(count - 1) * [others]]):
        with refusal("layer_types = .*; only .* is supported"):
            read(name, layer_types=kinds, sliding_window=4)


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_families_without_biases_of_the_feedforward_ignore_them(name):
    assert read(name, mlp_bias=True) == read(name)
    assert read("llama2", mlp_bias=True).feedforward_bias


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen3_5_moe"])
def test_families_without_dense_layers_ignore_them(name):
    assert read(name, mlp_only_layers=[0]) == read(name, decoder_sparse_step=2) == read(name)
    assert read("qwen3_moe", mlp_only_layers=[0]).experts.dense_layers == (0,)


@pytest.mark.parametrize("name", ["llama2", "arcee", "gpt2", "gpt_neox"])
def test_families_without_windows_have_full_attention_only(name):
    assert read(name, layer_types=2 * ["full_attention"]) == read(name)
    for kinds in (["full_attention", "sliding_attention"], ["linear_attention"], "full"):
        with refusal("layer_types = .* only 'full_attention' is supported"):
            read(name, layer_types=kinds, sliding_window=4)


def test_which_layers_have_experts():
    def sparse(**changes):
        config = read("qwen3_moe", num_hidden_layers=4, **changes)
        return [layer for layer in range(4) if config.has_experts(layer)]

    assert sparse(mlp_only_layers=None) == [0, 1, 2, 3]
    assert sparse(mlp_only_layers=[2]) == [0, 1, 3]
    assert sparse(mlp_only_layers=[1], decoder_sparse_step=2) == [3]
    assert read("qwen3_moe", mlp_only_layers=[0, 1, 2]).experts is None


def test_names_and_windows_as_files_have_them():
    """Older files have num_experts; a window holds in every layer, unlike in dense models."""
    older = {
        key: value
        for key, value in golden.read("qwen3_moe").config.items()
        if key != "num_local_experts"
    } | dict(num_experts=8)
    assert parse_config("config.json", older, "float32")[1] == read("qwen3_moe")
    windowed = read("qwen3_moe", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert windowed.window == 4 and windowed.global_layers == ()
    assert read("mixtral").window == 5 and read("mixtral", sliding_window=None).window is None


MIXED = ["full_attention", "sliding_attention"]
LONG = dict(rope_type="longrope", original_max_position_embeddings=16)
FACTOR = dict(rope_type="linear", factor="2")
EMBEDDINGS = LLAMA3 | dict(original_max_position_embeddings="8")

test_refused_configs = refused_calls(
    {
        "config.json.*layer_types = 5": lambda: read("qwen2", layer_types=5),
        "layer_types = .*must list full_attention": lambda: read(
            "qwen2", layer_types=[["full_attention"], 3]
        ),
        "config.json.*num_hidden_layers must be an integer >= 1 .*; got '2'": lambda: read(
            "qwen2", num_hidden_layers="2"
        ),
        "config.json.*rope_theta must be a number above 0; got inf": lambda: read(
            "llama2", rope_theta=float("inf"), rope_parameters=None
        ),
        "config.json.*factor of linear scaling must be a number above 0; got '2'": lambda: read(
            "llama2", rope_scaling=FACTOR
        ),
        "embeddings of llama3 scaling must be a number above 0; got '8'": lambda: read(
            "llama2", rope_scaling=EMBEDDINGS
        ),
        "config.json does not describe a supported model": lambda: read(
            "qwen3_moe", num_hidden_layers=4, decoder_sparse_step=0
        ),
        "config.json.* 9 experts": lambda: read(
            "qwen3_moe", num_hidden_layers=4, num_experts_per_tok=9
        ),
        "sliding_attention.*sliding_window": lambda: read(
            "qwen2", layer_types=MIXED, use_sliding_window=None, sliding_window=5
        ),
        "config.json: short_factor must be a number above 0; got -1": lambda: read(
            "phi3", rope_scaling=LONG | dict(short_factor=[1.0, -1])
        ),
        "3 numbers in short_factor; it must have 4, half the": lambda: read(
            "llama2", rope_scaling=LONG | dict(short_factor=3 * [1.0])
        ),
        "'linear'.*; supported are default, longrope \\(": lambda: read(
            "phi3", rope_scaling=FACTOR
        ),
        "hidden_act must be one of gelu, .*; got 'silu'": lambda: read("gemma", hidden_act="silu"),
        "'yarn'.*; supported are default \\(": lambda: read(
            "smollm3", rope_scaling=SCALINGS["yarn"]
        ),
        "use_sliding_window = True; only False": lambda: read("smollm3", use_sliding_window=True),
        "but no sliding_window: set it": lambda: read("gemma2", sliding_window=None),
    }
)
