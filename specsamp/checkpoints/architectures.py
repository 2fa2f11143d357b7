"""Reads ``config.json`` as a `TransformerConfig`, by tables of keys.

A line of architectures.json is a field of the config, of its experts or of a head.
``["rms_norm_eps", 1e-6]`` is a key of config.json and its default, which is that of transformers;
without a default the key is required. In ``{"num_key_value_heads": 8}``, a null in config.json is a
valid value. Any other entry is the value for all models of the family, and config.json is not read.

``gemma3_text``, ``mistral3_text`` and others are keys with the values of absent keys in a
text_config.

A family has several tables, of which later tables override earlier ones, and functions for
positions, windows and experts. A key that changes the model in an unsupported way is refused.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from specsamp import storage, validate
from specsamp.checkpoints.fields import Fields
from specsamp.checkpoints.rope import ORIGINAL, rope_parameters, rotary_fields
from specsamp.checkpoints.tensor_names import TABLES
from specsamp.models.config import ExpertsConfig, RecurrentConfig, TransformerConfig
from specsamp.models.positions import RotaryScaling

KEYS: dict[str, dict[str, Any]] = storage.read_json(pathlib.Path(__file__).with_suffix(".json"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Models with the same tensor names and the same keys of config.json."""

    model_type: str  # of config.json
    names: Mapping[str, str]  # of tensors, see tensor_names.py
    keys: tuple[str, ...]  # tables of architectures.json
    # Each returns further fields, from the file and the fields before.
    more: tuple[Callable[[Fields, dict], dict], ...]
    prefix: str = ""  # prefix of tensors; optional in files
    head_prefix: str | None = None  # of the tensors of a head in the same files, see head_config.py
    # The end of a tensor's name in files with another form of experts, and the table of that form.
    other_experts: tuple[str, str] = (".experts.gate_up_proj", "shared_tensors")
    quantised: str | None = None  # the quant_method that files may have
    # Of a model that also sees images: its text model is in text_config, with these values of
    # absent keys. None: keys are not nested.
    text: Mapping[str, Any] | None = None

    def read(self, fields: Fields) -> dict:
        """Returns the fields of a `TransformerConfig`."""
        shape = read_keys(fields, *self.keys)
        for function in self.more:
            shape |= function(fields, shape)
        return shape


def read_keys(fields: Fields, *tables: str) -> dict[str, Any]:
    """Returns the fields of tables of architectures.json, with the values of a file."""
    read = {}
    for name, rule in functools.reduce(dict.__or__, (KEYS[table] for table in tables)).items():
        if isinstance(rule, list):
            is_switch = isinstance(rule[-1], bool)
            take = (
                fields.activation
                if name == "activation"
                else fields.switch
                if is_switch
                else fields
            )
            read[name] = take(*rule)
        else:
            read[name] = (
                fields.or_null(*next(iter(rule.items()))) if isinstance(rule, dict) else rule
            )
    return read


def written_keys(config: Any, *tables: str) -> dict[str, Any]:
    """Returns the keys of a config.json for the fields of tables of architectures.json."""
    return {
        key: getattr(config, name) for table in tables for name, (key, *_) in KEYS[table].items()
    }


def parse_config(
    path: str, content: Mapping[str, Any], dtype: str
) -> tuple[Family, TransformerConfig]:
    """Returns the family and the shape of the model that a file describes.

    Args:
      dtype: of decode-time weights, activations and caches.

    Raises:
      ValueError: an architecture or a value is not supported, or a key is missing; names file and
        key.
    """
    architectures = content.get("architectures") or ["none"]
    architecture = str(architectures[0] if isinstance(architectures, list) else architectures)
    validate.choice(f"{path}: architectures", architecture, FAMILIES)
    family, fields = FAMILIES[architecture], Fields(path, content)
    model_type = content.get("model_type")
    # Transformers reads model_type, other programs architectures.
    if model_type not in (None, family.model_type):
        raise ValueError(
            f"{path} says architectures = {architecture!r}, whose model_type is "
            f"{family.model_type!r}, and model_type = {model_type!r}: correct the wrong key"
        )
    quantised = content.get("quantization_config")
    method = quantised.get("quant_method", "?") if isinstance(quantised, Mapping) else quantised
    if method not in (None, family.quantised):
        raise ValueError(
            f"{path} has a quantization_config ({method!r:.40}): give the checkpoint before it was "
            "quantised; it can be quantised to int8 while it is read"
        )
    if family.text is not None:
        fields = text_fields(path, content, family.text)
    fields.require("is_causal", True)
    try:
        config = TransformerConfig(dtype=dtype, **family.read(fields))
    except (ArithmeticError, TypeError, ValueError) as error:
        if path in str(error):
            raise
        raise ValueError(f"{path} does not describe a supported model: {error}") from error
    kinds = fields("layer_types", [])
    if (
        config.window is None
        and config.recurrent is None
        and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds))
    ):
        raise ValueError(
            f"{path} says layer_types = {kinds!r}; of this model only 'full_attention' is supported"
        )
    return family, config


def text_fields(path: str, content: Mapping[str, Any], usual: Mapping[str, Any]) -> Fields:
    """Returns the keys of the text model; of tied embeddings the outer key counts, if it is
    there.
    """
    given = {**usual, **Fields(path, content).object("text_config")}
    if content.get("tie_word_embeddings") is not None:
        given["tie_word_embeddings"] = content["tie_word_embeddings"]
    fields = Fields(f"{path}'s text_config", given)
    fields.require("model_type", usual["model_type"])
    return fields


def _rotary(fields: Fields, shape: dict, base: float = 10_000.0) -> dict:
    return rotary_fields(fields, rope_parameters(fields), shape, base=base)


def _smollm3_rotary(fields: Fields, shape: dict) -> dict:
    """Returns layers that rotate nothing as layers without a window; that of all others is the
    whole context.
    """
    count, every = shape["num_layers"], fields("no_rope_layer_interval", 4)
    fields.require("layer_types", count * ["full_attention"])
    fields.require("use_sliding_window", False)
    rotary = rotary_fields(fields, rope_parameters(fields), shape, base=2e6, kinds=())
    turns = fields("no_rope_layers", [(i + 1) % every for i in range(count)])
    return rotary | dict(
        window=shape["max_positions"],
        global_layers=tuple(i for i in range(count) if not turns[i]),
        window_rotary_base=rotary["rotary_base"],
        rotary_scaling=RotaryScaling(kind="proportional", factor=1.0, share=0.0),
    )


def _phi3_rotary(fields: Fields, shape: dict) -> dict:
    given = {ORIGINAL: 4096, **rope_parameters(fields)}
    return rotary_fields(fields, given, shape, partial=True, kinds=("longrope",))


def _gpt_neox_rotary(fields: Fields, shape: dict) -> dict:
    rotary = {
        "rope_theta": fields("rotary_emb_base", 10_000),
        "partial_rotary_factor": fields("rotary_pct", 0.25),
    }
    return rotary_fields(fields, {**rotary, **rope_parameters(fields)}, shape, partial=True)


def _gpt2_variants(fields: Fields, shape: dict) -> dict:
    fields.require("scale_attn_weights", True)
    fields.require("scale_attn_by_inverse_layer_idx", False)
    fields.require("add_cross_attention", False)
    return {}


def _gemma_embedding(fields: Fields, shape: dict) -> dict:
    fields.require("use_bidirectional_attention", False)
    return dict(embedding_scale=math.sqrt(shape["width"]))


def _gemma1_embedding(fields: Fields, shape: dict) -> dict:
    act = fields("hidden_act", "gelu")  # of old files, which mean the approximation
    validate.choice(f"{fields.path}: hidden_act", act, ("gelu", "gelu_pytorch_tanh"))
    return _gemma_embedding(fields, shape)


def _gemma_scales(fields: Fields, shape: dict) -> dict:
    scale = fields("query_pre_attn_scalar", 256) ** -0.5
    return _gemma_embedding(fields, shape) | dict(attention_scale=scale)


def _gemma3_positions(fields: Fields, shape: dict) -> dict:
    fields.require("attn_logit_softcapping", None)  # transformers reads it, but does not apply it
    every, near = fields("sliding_window_pattern", 6), fields("rope_local_base_freq", 1e4)
    return _positions_by_kind(fields, shape, every=every, base=1e6, near_base=near)


def _positions_by_kind(
    fields: Fields, shape: dict, *, every: int, base: float, near_base: float
) -> dict:
    """Returns windows and positions: layers with a window have different rotary positions."""
    windows = _windows(
        fields, fields.or_null("sliding_window", 4096), lambda i: bool((i + 1) % every)
    )
    by_kind = fields.object("rope_parameters")
    if by_kind and not by_kind.keys() & {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{fields.path} has one rope_parameters for all layers, which transformers ignores for "
            "this family: give them for full_attention and sliding_attention"
        )
    given = Fields(f"{fields.path}, in rope_parameters,", by_kind)
    everywhere = {"rope_theta": fields("rope_theta", base), **given.object("full_attention")}
    scaling = fields.object("rope_scaling")
    everywhere |= scaling
    if ("type" in scaling and "rope_type" not in scaling) or everywhere.get(
        "truncate", True
    ) is not True:
        raise ValueError(
            f"{fields.path} says {dict(everywhere)}; of this family transformers ignores the keys "
            "type and truncate: write rope_type for type, and remove truncate"
        )
    near = {"rope_theta": near_base, **given.object("sliding_attention")}
    return windows | _two_rotations(fields, shape, everywhere, near, windows)


def _two_rotations(
    fields: Fields, shape: dict, everywhere: Mapping, near: Mapping, windows: dict
) -> dict:
    """Returns the rotation of layers without a window, and the base of layers with one."""
    if near.get("rope_type", "default") != "default":
        raise ValueError(
            f"{fields.path} scales the rotary positions of layers with a window, which is not "
            "supported"
        )
    rotary = rotary_fields(fields, everywhere, shape)
    theta = validate.number(f"{fields.path}: rope_theta", near["rope_theta"], 0, above=True)
    return rotary | ({"window_rotary_base": theta} if windows else {})


def _gemma4_layers(fields: Fields, shape: dict) -> dict:
    """Returns windows, positions, and the heads of layers without a window."""
    for key, usual, part in (
        ("hidden_size_per_layer_input", 256, "embeddings per layer (E2B, E4B)"),
        ("num_kv_shared_layers", 0, "layers that share caches (E2B, E4B)"),
        ("enable_moe_block", False, "experts beside the dense layer (26B-A4B)"),
    ):
        if fields(key, usual):
            raise ValueError(
                f"{fields.path} says {key} = {fields(key, usual)!r}; of Gemma 4, {part} are not "
                "supported: choose the 12B or 31B model"
            )
    validate.choice(
        f"{fields.path}: use_bidirectional_attention",
        fields("use_bidirectional_attention", None),
        (None, "vision"),
    )
    last = shape["num_layers"] - 1
    windows = _windows(
        fields, fields("sliding_window", 512), lambda i: bool((i + 1) % 6) and i != last
    )
    near = [i for i in range(last + 1) if windows and i not in windows["global_layers"]]
    if last in near:
        raise ValueError(f"{fields.path} has a window in its last layer: make it full_attention")
    heads = {"head_dim": fields("global_head_dim", 512)}
    if shape["keys_as_values"]:
        heads["num_key_value_heads"] = fields("num_global_key_value_heads", None)
    each = fields.object("per_layer_config")  # as transformers 5 writes it
    if each:
        heads = next(iter(each.values()))
        if each != {str(i): heads for i in range(last + 1) if i not in near}:
            raise ValueError(
                f"{fields.path} says per_layer_config = {each!r:.200}; it must have the same "
                "head_dim and num_key_value_heads for all layers of full_attention, and no other"
            )
    size = heads["head_dim"]
    given = Fields(
        f"{fields.path}, in rope_parameters,",
        fields.object("rope_parameters") or KEYS["gemma4_rope"],
    )
    everywhere, near = given.object("full_attention"), given.object("sliding_attention")
    rotary = _two_rotations(fields, shape | {"head_size": size}, everywhere, near, windows)
    return {
        **windows,
        **rotary,
        "embedding_scale": math.sqrt(shape["width"]),
        "global_head_size": size,
        "global_kv_heads": heads.get("num_key_value_heads"),
    }


def _gemma2_windows(fields: Fields, shape: dict) -> dict:
    return _windows(fields, fields.or_null("sliding_window", 4096), lambda i: i % 2 == 0)


def _mistral_windows(
    fields: Fields, shape: dict, usual: int | None = 4096, alike: bool = False
) -> dict:
    window = fields.or_null("sliding_window", usual)
    return _windows(fields, window, lambda _: window is not None, alike=alike)


def _qwen_windows(fields: Fields, shape: dict, alike: bool = False) -> dict:
    """Returns windows of the layers from max_window_layers on; or of all layers, if they are
    ``alike``.
    """
    window = (
        fields.or_null("sliding_window", 4096)
        if fields.switch("use_sliding_window", False)
        else None
    )
    first = 0 if alike else fields("max_window_layers", 28)
    return _windows(fields, window, lambda i: window is not None and i >= first, alike=alike)


def _experts(fields: Fields, shape: dict, tables: tuple[str, ...], **more: Any) -> dict:
    """Returns the experts, by tables of architectures.json."""
    return dict(experts=ExpertsConfig(**read_keys(fields, *tables) | more))


def _some_experts(fields: Fields, shape: dict, tables: tuple[str, ...], **more: Any) -> dict:
    """Returns the experts of a family that may have dense layers; transformers does not read these
    keys of others.
    """
    every, listed = fields("decoder_sparse_step", 1), fields("mlp_only_layers", [])
    layers = range(fields.count("num_hidden_layers"))
    dense = tuple(i for i in layers if i in listed or (i + 1) % every)
    if len(dense) == len(layers):
        return dict(experts=None)
    return _experts(fields, shape, tables, dense_layers=dense, **more)


def _qwen3_experts(fields: Fields, shape: dict) -> dict:
    # Transformers 5 writes the second key.
    number = fields("num_experts", fields("num_local_experts", 128))
    return _some_experts(fields, shape, ("qwen3_experts",), num_experts=number)


def _hybrid_layers(fields: Fields, shape: dict) -> dict:
    """Returns the recurrent layers, and the rotation of a part of each head."""
    fields.require("hidden_act", "silu")  # also that of the convolution
    if shape["attention_bias"]:
        raise ValueError(f"{fields.path} says attention_bias = true; this family has none here")
    every, num_layers = fields("full_attention_interval", 4), shape["num_layers"]
    known = ("linear_attention", "full_attention")
    kinds = _layer_kinds(fields, known, lambda i: (i + 1) % every == 0)
    attention = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    recurrent = RecurrentConfig(attention_layers=attention, **read_keys(fields, "delta_rule"))
    given = {"partial_rotary_factor": fields("partial_rotary_factor", 0.25)}
    rotary = rotary_fields(fields, given | {**rope_parameters(fields)}, shape, partial=True)
    return dict(recurrent=recurrent if len(attention) < num_layers else None) | rotary


def _gpt_oss_layers(fields: Fields, shape: dict) -> dict:
    """Returns windows of every second layer, and positions."""
    fields.require("swiglu_alpha", 1.702)
    windows = _windows(fields, fields.or_null("sliding_window", 128), lambda i: i % 2 == 0)
    rotary = rope_parameters(fields) or KEYS["gpt_oss_yarn"]
    return windows | rotary_fields(fields, rotary, shape, base=150_000.0)


def _layer_kinds(
    fields: Fields, known: tuple[str, str], is_second: Callable[[int], bool], alike: bool = False
) -> list[str]:
    """Returns the kind of each layer.

    Args:
      known: the two kinds of the family.
      is_second: returns whether a layer is of the second kind; used if the file does not list the
        kinds.
      alike: whether transformers does not read the list of this family.
    """
    usual = [known[is_second(i)] for i in range(fields.count("num_hidden_layers"))]
    if alike:
        fields.require("layer_types", usual)
    kinds = fields("layer_types", usual)
    if (
        not isinstance(kinds, list)
        or not all(kind in known for kind in kinds)
        or len(kinds) != len(usual)
    ):
        raise ValueError(
            f"{fields.path} says layer_types = {kinds!r}; it must list {' or '.join(known)} for "
            f"each of {len(usual)} layers"
        )
    return kinds


def _windows(
    fields: Fields, window: int | None, has_window: Callable[[int], bool], *, alike: bool = False
) -> dict:
    """Returns the window and the layers without a window.

    Args:
      window: the size; None if the file does not have it.
      has_window: returns whether a layer has a window; used if the file does not list the kinds of
        its layers.
      alike: see `_layer_kinds`.
    """
    known = ("full_attention", "sliding_attention")
    kinds = _layer_kinds(fields, known, has_window, alike)
    if "sliding_attention" not in kinds:
        return {}
    if window is None:
        raise ValueError(
            f"{fields.path} has layers of sliding_attention, but no sliding_window: set it (and "
            "use_sliding_window, if the family has this key), or set layer_types to full_attention"
        )
    return dict(
        window=window,
        global_layers=tuple(i for i, kind in enumerate(kinds) if kind == "full_attention"),
    )


def _like(family: Family, model_type: str, *keys: str, **changes: Any) -> Family:
    """Returns a family that differs from another one by further tables of keys, and by fields."""
    return dataclasses.replace(family, model_type=model_type, keys=(*family.keys, *keys), **changes)


LLAMA = Family(model_type="llama", names=TABLES["llama"], keys=("sizes", "llama"), more=(_rotary,))
OLMO = _like(LLAMA, "olmo2", "olmo", names=TABLES["gemma"] | TABLES["olmo"])
MISTRAL = _like(LLAMA, "mistral", "mistral", more=(_rotary, _mistral_windows))
QWEN2 = _like(LLAMA, "qwen2", "qwen2", more=(_rotary, _qwen_windows))
QWEN3 = _like(QWEN2, "qwen3", "qwen3")
HYBRID = _like(QWEN3, "qwen3_5_text", "hybrid", more=(_hybrid_layers,), head_prefix="mtp.")
QWEN3_5 = _like(HYBRID, "qwen3_5_text", "qwen3_5", names=TABLES["qwen3_5"])
GEMMA = _like(LLAMA, "gemma", "gemma", names=TABLES["gemma"])
ALIKE_WINDOWS = functools.partial(_mistral_windows, usual=None, alike=True)
FAMILIES = {
    "LlamaForCausalLM": LLAMA,
    "SmolLM3ForCausalLM": _like(LLAMA, "smollm3", "smollm3", more=(_smollm3_rotary,)),
    "Phi3ForCausalLM": _like(
        LLAMA,
        "phi3",
        "phi3",
        names=TABLES["llama"] | TABLES["phi3"],
        more=(_phi3_rotary, ALIKE_WINDOWS),
    ),
    "GraniteForCausalLM": _like(LLAMA, "granite", "granite"),
    "Olmo2ForCausalLM": OLMO,
    "Olmo3ForCausalLM": _like(
        OLMO,
        "olmo3",
        # Of layers with a window, transformers ignores the file's rope_theta.
        more=(functools.partial(_positions_by_kind, every=4, base=5e5, near_base=5e5),),
    ),
    "ArceeForCausalLM": _like(LLAMA, "arcee", "arcee"),
    "MistralForCausalLM": MISTRAL,
    "MixtralForCausalLM": _like(
        MISTRAL,
        "mixtral",
        "mixtral",
        names=TABLES["mixtral"],
        more=(
            functools.partial(_rotary, base=1e6),
            ALIKE_WINDOWS,
            functools.partial(_experts, tables=("mixtral_experts",)),
        ),
    ),
    "Qwen2ForCausalLM": QWEN2,
    "MiMoForCausalLM": _like(QWEN2, "mimo", head_prefix="model.mtp_layers."),
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": _like(
        QWEN3,
        "qwen3_moe",
        "qwen3_moe",
        names=TABLES["qwen_experts"],
        more=(_rotary, functools.partial(_qwen_windows, alike=True), _qwen3_experts),
    ),
    "Qwen3NextForCausalLM": _like(
        HYBRID,
        "qwen3_next",
        "qwen3_next",
        names=TABLES["qwen3_next"],
        more=(_hybrid_layers, functools.partial(_some_experts, tables=("shared_experts",))),
    ),
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": _like(
        QWEN3_5,
        "qwen3_5_moe_text",
        "qwen3_5_moe",
        more=(
            _hybrid_layers,
            functools.partial(_experts, tables=("shared_experts", "qwen3_5_experts")),
        ),
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        names=TABLES["gpt_oss"],
        keys=("sizes", "gpt_oss"),
        more=(_gpt_oss_layers, functools.partial(_experts, tables=("gpt_oss_experts",))),
        other_experts=(".experts.gate_up_proj_blocks", "mxfp4"),
        quantised="mxfp4",
    ),
    "GPT2LMHeadModel": Family(
        model_type="gpt2",
        names=TABLES["gpt2"],
        keys=("gpt2",),
        more=(_gpt2_variants,),
        prefix="transformer.",
    ),
    "GPTNeoXForCausalLM": Family(
        model_type="gpt_neox",
        names=TABLES["gpt_neox"],
        keys=("sizes", "gpt_neox"),
        more=(_gpt_neox_rotary,),
    ),
    "GemmaForCausalLM": _like(
        GEMMA, "gemma", "gemma1", names=TABLES["llama"], more=(_rotary, _gemma1_embedding)
    ),
    "Gemma2ForCausalLM": _like(
        GEMMA, "gemma2", "gemma2", more=(_rotary, _gemma_scales, _gemma2_windows)
    ),
    "Gemma3ForCausalLM": _like(
        GEMMA, "gemma3_text", "gemma3", more=(_gemma_scales, _gemma3_positions)
    ),
    "Gemma4ForCausalLM": _like(GEMMA, "gemma4_text", "gemma4", more=(_gemma4_layers,)),
}
FAMILIES |= {
    name: dataclasses.replace(
        FAMILIES[of_text], model_type=model_type, text=KEYS[f"{model_type}_text"]
    )
    for name, of_text, model_type in (
        ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM", "gemma3"),
        ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM", "gemma4"),
        ("Gemma4UnifiedForConditionalGeneration", "Gemma4ForCausalLM", "gemma4_unified"),
        ("Mistral3ForConditionalGeneration", "MistralForCausalLM", "mistral3"),
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM", "qwen3_5"),
        ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM", "qwen3_5_moe"),
    )
}
