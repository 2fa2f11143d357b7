"""What ``config.json`` says, as a `TransformerConfig`; one function per family of models.

Files of all ages are read: what a key meant when it was left out is what it means here. What would change the
model and is not known is refused, never passed over.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from specsamp.checkpoints import tensor_names
from specsamp.models.config import TransformerConfig
from specsamp.models.positions import RotaryScaling

# Theirs to ours; of several names the first is written.
ACTIVATIONS = {
    "gelu": "gelu_exact",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Models that share names and the meaning of config.json."""

    model_type: str  # what config.json calls it beside its architecture
    names: Mapping[str, str]  # see tensor_names.py
    read: Callable[[Fields], dict]  # to fields of a TransformerConfig
    prefix: str = ""  # of tensors, which some files leave out


class Fields:
    """The keys of a config.json; messages name the file."""

    def __init__(self, path: str, content: Mapping[str, Any]):
        self.path, self._content = path, content

    def __call__(self, key: str, *default: Any) -> Any:
        """Its value; ``default`` if it is absent or null, and an error without one."""
        value = self._content.get(key)
        if value is not None:
            return value
        if not default:
            raise ValueError(f"{self.path} does not say {key!r}")
        return default[0]

    def or_null(self, key: str, default: Any) -> Any:
        """Its value, null included: some keys mean one thing when they are absent and another as null."""
        return self._content.get(key, default)

    def count(self, key: str) -> int:
        """Returns the positive integer it holds."""
        value = self(key)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.path} says {key} = {value!r}; a positive integer is wanted")
        return value

    def object(self, key: str) -> Mapping[str, Any]:
        """The object it holds; empty if it is absent or null."""
        value = self(key, {})
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.path} says {key} = {value!r}; an object is wanted")
        return value

    def refuse(self, key: str, allowed: Any) -> None:
        """Raises unless a key that changes the model has the one value that is supported."""
        if self(key, allowed) != allowed:
            raise ValueError(f"{self.path} says {key} = {self(key)!r}; only {allowed!r} is supported")

    def activation(self, key: str, *default: str) -> str:
        name = self(key, *default)
        if name not in ACTIVATIONS:
            raise ValueError(f"{self.path} says {key} = {name!r}; known are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]


def config_of(path: str, content: Mapping[str, Any], dtype: str) -> tuple[Family, TransformerConfig]:
    """The family and the shape of a model.

    Raises:
      ValueError: an architecture or a value that is not supported, or a key is missing; with file and key.
    """
    architectures = content.get("architectures") or ["none"]
    architecture = str(architectures[0] if isinstance(architectures, list) else architectures)
    if architecture not in FAMILIES:
        why = " (text only: it also sees images)" if "ConditionalGeneration" in architecture else ""
        raise ValueError(f"{path} is of the architecture {architecture!r}{why}; known are {', '.join(FAMILIES)}")
    family, fields = FAMILIES[architecture], Fields(path, content)
    model_type = content.get("model_type")
    if model_type not in (None, family.model_type):  # transformers goes by the second, others by the first
        raise ValueError(
            f"{path} says architectures = {architecture!r}, whose model_type is {family.model_type!r}, and model_type = "
            f"{model_type!r}: correct the one that is wrong"
        )
    if content.get("quantization_config") is not None:
        raise ValueError(f"{path} has a quantization_config: give the checkpoint before it was quantised")
    try:
        return family, TransformerConfig(dtype=dtype, **family.read(fields))
    except (ArithmeticError, TypeError, ValueError) as error:
        if path in str(error):
            raise
        raise ValueError(f"{path} describes no model that can be read: {error}") from error


def _usual(fields: Fields) -> dict:
    """What all but GPT-2 call the same."""
    return dict(
        vocab_size=fields("vocab_size"),
        width=fields("hidden_size"),
        num_layers=fields("num_hidden_layers"),
        num_heads=fields("num_attention_heads"),
        num_kv_heads=fields("num_key_value_heads", None),
        head_size=fields("head_dim", None),
        feedforward_width=fields("intermediate_size"),
        max_positions=fields("max_position_embeddings"),
    )


def _llama(fields: Fields) -> dict:
    return _like_llama(fields) | _rotary(fields, _rope(fields), _usual(fields))


def _like_llama(fields: Fields) -> dict:
    """But for its positions."""
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
    return _llama(fields) | dict(
        gated=False, activation=fields.activation("hidden_act", "relu2"), norm_epsilon=fields("rms_norm_eps", 1e-5)
    )


def _mistral(fields: Fields) -> dict:
    return _llama(fields) | dict(
        window=fields.or_null("sliding_window", 4096), num_kv_heads=fields.or_null("num_key_value_heads", 8)
    )


def _qwen2(fields: Fields) -> dict:
    window = fields.or_null("sliding_window", 4096) if fields("use_sliding_window", False) else None
    first = fields("max_window_layers", 28)
    kinds = [
        "full_attention" if window is None or i < first else "sliding_attention"
        for i in range(fields.count("num_hidden_layers"))
    ]
    return (
        _llama(fields)
        | _windows(fields, window, kinds)
        | dict(attention_bias=True, output_bias=False, num_kv_heads=fields.or_null("num_key_value_heads", 32))
    )


def _qwen3(fields: Fields) -> dict:
    bias = fields("attention_bias", False)
    return _qwen2(fields) | dict(
        attention_bias=bias, output_bias=bias, query_key_norm=True, head_size=fields("head_dim", 128)
    )


def _gpt2(fields: Fields) -> dict:
    for key, allowed in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        fields.refuse(key, allowed)
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
    usual, bias = _usual(fields), fields("attention_bias", True)
    rotary = {"rope_theta": fields("rotary_emb_base", 10_000), "partial_rotary_factor": fields("rotary_pct", 0.25)}
    rotary |= _rope(fields)
    return (
        usual
        | _rotary(fields, rotary, usual, partial=True)
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
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(fields.count("num_hidden_layers"))]
    rotary = _rotary(fields, _rope(fields), _usual(fields))
    return (
        _like_gemma(fields)
        | rotary
        | _windows(fields, fields.or_null("sliding_window", 4096), kinds)
        | dict(
            attention_cap=fields.or_null("attn_logit_softcapping", 50.0),
            logit_cap=fields.or_null("final_logit_softcapping", 30.0),
        )
    )


def _gemma3(fields: Fields) -> dict:
    fields.refuse("attn_logit_softcapping", None)  # which transformers reads, but does not apply
    every, num_layers = fields("sliding_window_pattern", 6), fields.count("num_hidden_layers")
    kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    windows = _windows(fields, fields.or_null("sliding_window", 4096), kinds)
    given = Fields(f"{fields.path}, in rope_parameters,", fields.object("rope_parameters"))
    everywhere = {"rope_theta": fields("rope_theta", 1e6), **given.object("full_attention")}
    everywhere |= fields.object("rope_scaling")
    near = {"rope_theta": fields("rope_local_base_freq", 1e4), **given.object("sliding_attention")}
    if near.get("rope_type", "default") != "default":
        raise ValueError(f"{fields.path} scales the rotary positions of layers with a window, which is not supported")
    rotary = _rotary(fields, everywhere, _usual(fields))
    if windows:
        rotary["window_rotary_base"] = float(near["rope_theta"])
    return (
        _like_gemma(fields)
        | windows
        | rotary
        | dict(query_key_norm=True, logit_cap=fields.or_null("final_logit_softcapping", None))
    )


def _like_gemma(fields: Fields) -> dict:
    """What both have, but for their positions."""
    fields.refuse("use_bidirectional_attention", False)
    activation = fields.activation("hidden_activation", "gelu_pytorch_tanh")
    return _like_llama(fields) | dict(
        tied=fields("tie_word_embeddings", True),
        activation=activation,
        norm_offset=True,
        post_norms=True,
        embedding_scale=math.sqrt(fields("hidden_size")),
        head_size=fields("head_dim", 256),
        num_kv_heads=fields("num_key_value_heads", 4),
        attention_scale=fields("query_pre_attn_scalar", 256) ** -0.5,
    )


def _windows(fields: Fields, window: int | None, kinds: list[str]) -> dict:
    """Returns the window and the layers without it; ``kinds`` of layers count unless the file lists its own.

    Raises:
      ValueError: the list is no list of kinds, one for each layer; or layers have a window, but none is given.
    """
    kinds = fields("layer_types", kinds)
    known, num_layers = ("full_attention", "sliding_attention"), fields("num_hidden_layers")
    if not isinstance(kinds, list) or not all(kind in known for kind in kinds) or len(kinds) != num_layers:
        raise ValueError(
            f"{fields.path} says layer_types = {kinds!r}; a list of {' or '.join(known)} for each of the {num_layers} "
            "layers is wanted"
        )
    if "sliding_attention" not in kinds:
        return {}
    if window is None:
        raise ValueError(
            f"{fields.path} has layers of sliding_attention but no window for them: set sliding_window (and "
            "use_sliding_window, where the family has it), or layer_types to full_attention"
        )
    return dict(window=window, global_layers=tuple(i for i, kind in enumerate(kinds) if kind == "full_attention"))


def _rope(fields: Fields) -> Mapping[str, Any]:
    """Returns what the file says of rotary positions, with the preferences of transformers.

    Of files that have both, rope_scaling counts, not rope_parameters: people add it to lengthen what a model reads.
    The length of the original training counts where it stands beside them, as Phi 3 writes it, not within.
    """
    rope = fields.object("rope_scaling") or fields.object("rope_parameters")
    original = fields("original_max_position_embeddings", None)
    return rope if original is None else {**rope, "original_max_position_embeddings": original}


def _rotary(
    fields: Fields, given: Mapping[str, Any], usual: Mapping[str, Any], *, partial: bool = False
) -> dict[str, Any]:
    """Returns the fields of rotary positions.

    Args:
      given: rope_parameters, or rope_scaling in older files and where it was added; see `_rope`.
      usual: sizes of the model.
      partial: whether the family turns a part of each head. transformers knows one such family; for the others it
        ignores partial_rotary_factor unless positions are scaled as well, and then fails.
    """
    given = {key: value for key, value in given.items() if value is not None}
    if "full_attention" in given:  # by kind of layer, only where kinds differ
        raise ValueError(f"{fields.path} has rope_parameters for each kind of layer, which is known of Gemma 3 only")
    base = float(given.get("rope_theta", fields("rope_theta", 10_000.0)))
    share = given.get("partial_rotary_factor", fields("partial_rotary_factor", 1.0))
    head_size = usual["head_size"] or usual["width"] // usual["num_heads"]
    scaling = _scaling(fields, given, usual["max_positions"])
    if share != 1 and scaling is not None and not partial:
        raise ValueError(
            f"{fields.path} says partial_rotary_factor = {share!r} and scales its rotary positions; this family turns "
            "whole heads: remove one of the two"
        )
    return dict(
        positions="rotary",
        rotary_base=base,
        rotary_size=int(head_size * share) if partial and share != 1 else None,
        rotary_scaling=scaling,
    )


def _scaling(fields: Fields, given: Mapping[str, Any], max_positions: int) -> RotaryScaling | None:
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return None

    def number(key: str, *default: float) -> float:
        value = given.get(key, *default) if default else given[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(
                f"{fields.path} scales rotary positions with {key} = {value!r}; a positive number is wanted"
            )
        return value

    try:
        if kind == "linear":
            return RotaryScaling(kind=kind, factor=float(number("factor")))
        if kind == "llama3":
            return RotaryScaling(
                kind=kind,
                factor=float(number("factor")),
                original_positions=number("original_max_position_embeddings"),
                low=float(number("low_freq_factor")),
                high=float(number("high_freq_factor")),
            )
        if kind == "yarn" and "mscale" not in given and "mscale_all_dim" not in given:
            factor = float(number("factor"))
            return RotaryScaling(
                kind=kind,
                factor=factor,
                original_positions=number("original_max_position_embeddings", max_positions),
                low=float(number("beta_slow", 1)),
                high=float(number("beta_fast", 32)),
                amplitude=float(number("attention_factor", 0.1 * math.log(factor) + 1 if factor > 1 else 1)),
                whole_dimensions=given.get("truncate", True),
            )
    except KeyError as error:
        raise ValueError(f"{fields.path} has {kind} scaling of rotary positions without {error}") from error
    raise ValueError(
        f"{fields.path} scales its rotary positions by {dict(given)}; known are linear, llama3 and yarn (what depends "
        "on the length of the text would turn keys that are cached already)"
    )


FAMILIES = {
    "LlamaForCausalLM": Family(model_type="llama", names=tensor_names.LLAMA, read=_llama),
    "MistralForCausalLM": Family(model_type="mistral", names=tensor_names.LLAMA, read=_mistral),
    "Qwen2ForCausalLM": Family(model_type="qwen2", names=tensor_names.LLAMA, read=_qwen2),
    "Qwen3ForCausalLM": Family(model_type="qwen3", names=tensor_names.LLAMA, read=_qwen3),
    "GPT2LMHeadModel": Family(model_type="gpt2", names=tensor_names.GPT2, read=_gpt2, prefix="transformer."),
    "GPTNeoXForCausalLM": Family(model_type="gpt_neox", names=tensor_names.GPT_NEOX, read=_gpt_neox),
    "Gemma2ForCausalLM": Family(model_type="gemma2", names=tensor_names.GEMMA, read=_gemma2),
    "Gemma3ForCausalLM": Family(model_type="gemma3_text", names=tensor_names.GEMMA, read=_gemma3),
    "ArceeForCausalLM": Family(model_type="arcee", names=tensor_names.LLAMA, read=_arcee),
}
