"""Reads ``config.json`` as a `TransformerConfig`; each family of models has a function.

A key that is left out has the default of transformers, also in old files. A key that changes the model in a way that is not
supported is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from specsamp import validate
from specsamp.checkpoints.fields import OPTIONAL_SIZES, SIZES, Fields
from specsamp.checkpoints.rope import rope_parameters, rotary_fields
from specsamp.checkpoints.tensor_names import TABLES
from specsamp.models.config import ExpertsConfig, TransformerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Models with the same names of tensors and the same meaning of config.json."""

    model_type: str  # of config.json
    names: Mapping[str, str]  # see tensor_names.py
    read: Callable[[Fields], dict]  # returns the fields of a TransformerConfig
    prefix: str = ""  # of tensors; some files leave it out
    head_prefix: str | None = None  # of the tensors of a head in the same files, see head_config.py


def parse_config(path: str, content: Mapping[str, Any], dtype: str) -> tuple[Family, TransformerConfig]:
    """Returns the family and the shape of the model that a file describes.

    Args:
      dtype: of decode-time weights, activations and caches.

    Raises:
      ValueError: an architecture or a value is not supported, or a key is missing; with file and key.
    """
    architectures = content.get("architectures") or ["none"]
    architecture = str(architectures[0] if isinstance(architectures, list) else architectures)
    validate.choice(f"{path}: architectures", architecture, FAMILIES)
    family, fields = FAMILIES[architecture], Fields(path, content)
    model_type = content.get("model_type")
    if model_type not in (None, family.model_type):  # transformers reads model_type, other programs architectures
        raise ValueError(
            f"{path} says architectures = {architecture!r}, whose model_type is {family.model_type!r}, and model_type = "
            f"{model_type!r}: correct the one that is wrong"
        )
    if (quantised := content.get("quantization_config")) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise ValueError(
            f"{path} has a quantization_config ({method!r:.40}): give the checkpoint before it was quantised; it can be "
            "quantised to int8 while it is read"
        )
    try:
        config = TransformerConfig(dtype=dtype, **family.read(fields))
    except (ArithmeticError, TypeError, ValueError) as error:
        if path in str(error):
            raise
        raise ValueError(f"{path} describes no model that can be read: {error}") from error
    kinds = fields("layer_types", [])
    if config.window is None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise ValueError(f"{path} says layer_types = {kinds!r}; of this model only 'full_attention' is supported")
    return family, config


def _usual(fields: Fields) -> dict:
    """Returns the sizes of a model by the names of `TransformerConfig`."""
    return {ours: fields(key, None) if ours in OPTIONAL_SIZES else fields(key) for ours, key in SIZES.items()}


def _llama(fields: Fields) -> dict:
    """Reads a LlamaForCausalLM."""
    return _like_llama(fields) | rotary_fields(fields, rope_parameters(fields), _usual(fields))


def _like_llama(fields: Fields) -> dict:
    """Reads all fields of Llama and the families that follow it, except the positional ones."""
    return _usual(fields) | dict(
        tied=fields("tie_word_embeddings", False),
        norm_epsilon=fields("rms_norm_eps", 1e-6),
        gated=True,
        activation=fields.activation("hidden_act", "silu"),
        attention_bias=fields("attention_bias", False),
        output_bias=fields("attention_bias", False),
        feedforward_bias=fields("mlp_bias", False),
    )


def _arcee(fields: Fields) -> dict:
    """Reads an ArceeForCausalLM: Llama without a gate."""
    return _llama(fields) | dict(
        gated=False, activation=fields.activation("hidden_act", "relu2"), norm_epsilon=fields("rms_norm_eps", 1e-5)
    )


def _mistral(fields: Fields, window: int | None = 4096) -> dict:
    """Reads a MistralForCausalLM; ``window`` is the default of its sliding_window."""
    window = fields.or_null("sliding_window", window)
    return (
        _llama(fields)
        | _windows(fields, window, lambda _: window is not None)
        | dict(attention_bias=False, output_bias=False, feedforward_bias=False)  # the file may say otherwise
        | dict(num_kv_heads=fields.or_null("num_key_value_heads", 8))
    )


def _qwen2(fields: Fields, first: int | None = None) -> dict:
    """Reads a Qwen2ForCausalLM. Layers from ``first`` on have the window; None reads ``first`` from the file."""
    window = fields.or_null("sliding_window", 4096) if fields.switch("use_sliding_window", False) else None
    first = fields("max_window_layers", 28) if first is None else first
    return (
        _llama(fields)
        | _windows(fields, window, lambda i: window is not None and i >= first)
        | dict(attention_bias=True, output_bias=False, feedforward_bias=False)
        | dict(num_kv_heads=fields.or_null("num_key_value_heads", 32))
    )


def _qwen3(fields: Fields, first: int | None = None) -> dict:
    """Reads a Qwen3ForCausalLM; see `_qwen2` for ``first``."""
    bias = fields("attention_bias", False)
    return _qwen2(fields, first) | dict(
        attention_bias=bias, output_bias=bias, query_key_norm=True, head_size=fields("head_dim", 128)
    )


def _qwen3_moe(fields: Fields) -> dict:
    """Reads a Qwen3MoeForCausalLM, whose layers choose experts unless the file says that they are dense."""
    every, listed = fields("decoder_sparse_step", 1), fields("mlp_only_layers", [])
    dense = tuple(i for i in range(fields.count("num_hidden_layers")) if i in listed or (i + 1) % every)
    return _qwen3(fields, first=0) | dict(
        head_size=fields("head_dim", None),
        num_kv_heads=fields.or_null("num_key_value_heads", 4),
        experts=_experts(
            fields,
            num_experts=fields("num_experts", fields("num_local_experts", 128)),  # as transformers 5 writes it
            width=fields("moe_intermediate_size", 768),
            experts_per_token=fields("num_experts_per_tok", 8),
            normalised=fields("norm_topk_prob", False),
            dense_layers=dense,
        ),
    )


def _mixtral(fields: Fields) -> dict:
    """Reads a MixtralForCausalLM: intermediate_size is the width of its experts."""
    experts = _experts(
        fields,
        num_experts=fields("num_local_experts", 8),
        width=fields("intermediate_size"),
        experts_per_token=fields("num_experts_per_tok", 2),
    )
    return _mistral(fields, window=None) | dict(norm_epsilon=fields("rms_norm_eps", 1e-5), experts=experts)


def _experts(fields: Fields, **shape: Any) -> ExpertsConfig | None:
    """Returns the experts of a model, or None if all of its layers are dense."""
    experts = ExpertsConfig(**shape)
    return experts if set(range(fields.count("num_hidden_layers"))) - set(experts.dense_layers) else None


def _gpt2(fields: Fields) -> dict:
    """Reads a GPT2LMHeadModel."""
    fields.require("scale_attn_weights", True)
    fields.require("scale_attn_by_inverse_layer_idx", False)
    fields.require("add_cross_attention", False)
    return dict(
        vocab_size=fields("vocab_size"),
        width=fields("n_embd"),
        num_layers=fields("n_layer"),
        num_heads=fields("n_head"),
        feedforward_width=fields("n_inner", None),
        max_positions=fields("n_positions", 1024),
        positions="learned",
        tied=fields("tie_word_embeddings", True),
        norm="layer",
        norm_epsilon=fields("layer_norm_epsilon", 1e-5),
        activation=fields.activation("activation_function", "gelu_new"),
        attention_bias=True,
        output_bias=True,
        feedforward_bias=True,
    )


def _gpt_neox(fields: Fields) -> dict:
    """Reads a GPTNeoXForCausalLM."""
    usual, bias = _usual(fields), fields("attention_bias", True)
    rotary = {"rope_theta": fields("rotary_emb_base", 10_000), "partial_rotary_factor": fields("rotary_pct", 0.25)}
    rotary |= rope_parameters(fields)
    return (
        usual
        | rotary_fields(fields, rotary, usual, partial=True)
        | dict(
            tied=fields("tie_word_embeddings", False),
            norm="layer",
            norm_epsilon=fields("layer_norm_eps", 1e-5),
            activation=fields.activation("hidden_act", "gelu"),
            parallel=fields("use_parallel_residual", True),
            attention_bias=bias,
            output_bias=bias,
            feedforward_bias=True,
        )
    )


def _gemma2(fields: Fields) -> dict:
    """Reads a Gemma2ForCausalLM, in which every other layer has a window."""
    return (
        _like_gemma(fields)
        | rotary_fields(fields, rope_parameters(fields), _usual(fields))
        | _windows(fields, fields.or_null("sliding_window", 4096), lambda i: i % 2 == 0)
        | dict(
            attention_cap=fields.or_null("attn_logit_softcapping", 50.0),
            logit_cap=fields.or_null("final_logit_softcapping", 30.0),
        )
    )


def _gemma3(fields: Fields) -> dict:
    """Reads a Gemma3ForCausalLM, whose layers with a window have other rotary positions."""
    fields.require("attn_logit_softcapping", None)  # transformers reads it, but does not apply it
    every = fields("sliding_window_pattern", 6)
    windows = _windows(fields, fields.or_null("sliding_window", 4096), lambda i: bool((i + 1) % every))
    given = Fields(f"{fields.path}, in rope_parameters,", fields.object("rope_parameters"))
    everywhere = {"rope_theta": fields("rope_theta", 1e6), **given.object("full_attention")}
    everywhere |= fields.object("rope_scaling")
    near = {"rope_theta": fields("rope_local_base_freq", 1e4), **given.object("sliding_attention")}
    if near.get("rope_type", "default") != "default":
        raise ValueError(f"{fields.path} scales the rotary positions of layers with a window, which is not supported")
    rotary = rotary_fields(fields, everywhere, _usual(fields))
    if windows:
        rotary["window_rotary_base"] = float(near["rope_theta"])
    return (
        _like_gemma(fields)
        | windows
        | rotary
        | dict(query_key_norm=True, logit_cap=fields.or_null("final_logit_softcapping", None))
    )


def _like_gemma(fields: Fields) -> dict:
    """Reads the fields that Gemma 2 and Gemma 3 share, except the positional ones."""
    fields.require("use_bidirectional_attention", False)
    activation = fields.activation("hidden_activation", "gelu_pytorch_tanh")
    return _like_llama(fields) | dict(
        tied=fields("tie_word_embeddings", True),
        activation=activation,
        feedforward_bias=False,
        norm_offset=True,
        post_norms=True,
        embedding_scale=math.sqrt(fields("hidden_size")),
        head_size=fields("head_dim", 256),
        num_kv_heads=fields("num_key_value_heads", 4),
        attention_scale=fields("query_pre_attn_scalar", 256) ** -0.5,
    )


def _windows(fields: Fields, window: int | None, has_window: Callable[[int], bool]) -> dict:
    """Returns the window and the layers without it.

    Args:
      window: the size, None if the file has none.
      has_window: returns whether a layer has a window; used where the file does not list the kinds of its layers.
    """
    known, num_layers = ("full_attention", "sliding_attention"), fields.count("num_hidden_layers")
    kinds = fields("layer_types", [known[has_window(i)] for i in range(num_layers)])
    if not isinstance(kinds, list) or not all(kind in known for kind in kinds) or len(kinds) != num_layers:
        raise ValueError(
            f"{fields.path} says layer_types = {kinds!r}; it must list {' or '.join(known)} for each of {num_layers} layers"
        )
    if "sliding_attention" not in kinds:
        return {}
    if window is None:
        raise ValueError(
            f"{fields.path} has layers of sliding_attention, but no window for them: set sliding_window (and "
            "use_sliding_window, if the family has it), or set layer_types to full_attention"
        )
    return dict(window=window, global_layers=tuple(i for i, kind in enumerate(kinds) if kind == "full_attention"))


FAMILIES = {
    "LlamaForCausalLM": Family(model_type="llama", names=TABLES["llama"], read=_llama),
    "MistralForCausalLM": Family(model_type="mistral", names=TABLES["llama"], read=_mistral),
    "Qwen2ForCausalLM": Family(model_type="qwen2", names=TABLES["llama"], read=_qwen2),
    "Qwen3ForCausalLM": Family(model_type="qwen3", names=TABLES["llama"], read=_qwen3),
    "Qwen3MoeForCausalLM": Family(model_type="qwen3_moe", names=TABLES["qwen_experts"], read=_qwen3_moe),
    "MixtralForCausalLM": Family(model_type="mixtral", names=TABLES["mixtral"], read=_mixtral),
    "MiMoForCausalLM": Family(model_type="mimo", names=TABLES["llama"], read=_qwen2, head_prefix="model.mtp_layers."),
    "GPT2LMHeadModel": Family(model_type="gpt2", names=TABLES["gpt2"], read=_gpt2, prefix="transformer."),
    "GPTNeoXForCausalLM": Family(model_type="gpt_neox", names=TABLES["gpt_neox"], read=_gpt_neox),
    "Gemma2ForCausalLM": Family(model_type="gemma2", names=TABLES["gemma"], read=_gemma2),
    "Gemma3ForCausalLM": Family(model_type="gemma3_text", names=TABLES["gemma"], read=_gemma3),
    "ArceeForCausalLM": Family(model_type="arcee", names=TABLES["llama"], read=_arcee),
}
