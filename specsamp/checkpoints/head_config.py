"""Reads the ``config.json`` of a head, in the layouts of EAGLE, of the package speculators, of Medusa and of MTP modules.

Here ``hidden_layers`` are the layers whose outputs a head reads. Files of EAGLE do not name them: heads read the inputs of
layers 2, L/2 and L-3, which are the outputs of the layers before. Files of speculators name inputs of layers, so that id i
is layer i - 1 here. Files of SpecForge name outputs, in ``eagle_config``.

Medusa heads have the sizes of their target. Their number is counted from the tensors, since published files with five heads
say two. An MTP module lies in the checkpoint of its target, and config.json describes both.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from specsamp import validate
from specsamp.checkpoints.architectures import FAMILIES
from specsamp.checkpoints.block_config import KINDS, is_block, parse_block
from specsamp.checkpoints.fields import Fields
from specsamp.checkpoints.head_layout import FAMILY_OF, SPECULATORS, HeadLayout
from specsamp.checkpoints.safetensors_io import MEDUSA_SINGLE, SINGLE
from specsamp.checkpoints.tensor_names import TABLES
from specsamp.models.config import TransformerConfig
from specsamp.models.eagle import Eagle1Config, Eagle3Config
from specsamp.models.heads import HeadConfig
from specsamp.models.medusa import MedusaConfig
from specsamp.models.mtp import MTPConfig

SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
PLAIN = ("none", *FAMILY_OF.values())  # architectures in files of EAGLE that do not name a head
MIMO = "MiMoForCausalLM"


EAGLE = HeadLayout(names=TABLES["head"])
NOTHING = re.compile(r"(?!)")
MEDUSA = HeadLayout(whose="Medusa's authors", file=MEDUSA_SINGLE, names=TABLES["medusa"], others=NOTHING)
MEDUSA_BLOCKS = HeadLayout(whose="vLLM", file=SINGLE, names=TABLES["medusa_blocks"], others=NOTHING)
MIMO_MTP = HeadLayout(
    whose="MiMo's module",
    file=SINGLE,
    names=TABLES["mimo_mtp"],
    others=re.compile(rf"^(?!{re.escape(FAMILIES[MIMO].head_prefix)})"),
)


def parse_head(
    path: str, content: Mapping[str, Any], target: TransformerConfig, dtype: str, found: Collection[str]
) -> tuple[HeadLayout, HeadConfig]:
    """Returns the layout and the shape of the head that a file describes.

    Args:
      target: of the checkpoint, without padding of its vocabulary.
      found: the names of the tensors in its files. Only some heads have an embedding, an output or a bias.

    Raises:
      ValueError: another kind of head, a head for another target (width, vocabulary, layers), or a value that is not
        supported; with file, key and value.
    """
    fields = Fields(path, content)
    kind = validate.choice(f"{path}: {SPECULATORS}", fields(SPECULATORS, None), (None, "eagle3", *KINDS))
    try:
        if is_block(content):
            return parse_block(path, content, target, dtype, found)
        if kind == "eagle3":
            of_layer = Fields(f"{path}, in transformer_layer_config,", fields.object("transformer_layer_config"))
            return EAGLE, _eagle3(fields, of_layer, target, dtype, found)
        architecture = str(fields("architectures", ["none"])[0])
        if "Medusa" in architecture or fields("model_type", "") == "medusa" or "medusa_num_heads" in content:
            return _medusa(fields, target, dtype, found)
        if architecture == MIMO:
            return MIMO_MTP, _mtp(fields, target, dtype)
        if "eagle" not in architecture.lower() and architecture not in PLAIN:
            raise ValueError(
                f"{path} says architectures = {architecture!r}; known are heads of EAGLE, EAGLE-3, Medusa and DFlash, "
                f"and {MIMO}"
            )
        if "Eagle3" in architecture or fields("draft_vocab_size", None) is not None:
            return EAGLE, _eagle3(fields, fields, target, dtype, found)
        return EAGLE, _eagle1(fields, target, dtype, found)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        if path in str(error):
            raise
        raise ValueError(f"{path} describes no head that can be read: {error}") from error


def _medusa(
    fields: Fields, target: TransformerConfig, dtype: str, found: Collection[str]
) -> tuple[HeadLayout, MedusaConfig]:
    layout = MEDUSA_BLOCKS if any(name.startswith("blocks.") for name in found) else MEDUSA
    for key in ("medusa_num_layers", "num_hidden_layers"):
        fields.require(key, 1)
    _require(fields, "hidden_size", fields("hidden_size", target.width), "width", target.width)
    _require(fields, "vocab_size", fields("vocab_size", target.vocab_size), "vocabulary", target.vocab_size)
    fields.require("truncated_vocab_size", target.vocab_size)
    numbers = {match[1] for name in found if (match := re.match(r"(?:blocks\.)?(\d+)\.", name))}
    return layout, MedusaConfig(
        layer=dataclasses.replace(target, num_layers=1, tied=False, num_real_tokens=None, dtype=dtype, experts=None),
        target_layers=target.num_layers,
        hidden_layers=(target.num_layers,),
        own_output=True,
        num_heads=max(len(numbers), 1),
        bias=any(name.endswith("bias") for name in found),
    )


def _mtp(fields: Fields, target: TransformerConfig, dtype: str) -> MTPConfig:
    """Reads the module of MiMo: it reads the target's stream before the final norm, and has a norm for its output."""
    fields.require("num_nextn_predict_layers", 1)
    layer = TransformerConfig(dtype=dtype, **FAMILIES[MIMO].read(fields))
    _require(fields, "hidden_size", layer.width, "width", target.width)
    _require(fields, "vocab_size", layer.vocab_size, "vocabulary", target.vocab_size)
    _require(fields, "num_hidden_layers", layer.num_layers, "number of layers", target.num_layers)
    return MTPConfig(
        layer=dataclasses.replace(layer, num_layers=1, tied=False),
        target_layers=target.num_layers,
        hidden_layers=(target.num_layers - 1,),
        hidden_first=True,
        norm_output=True,
    )


def _eagle1(fields: Fields, target: TransformerConfig, dtype: str, found: Collection[str]) -> Eagle1Config:
    layer = _layer(fields, target, dtype)
    _require(fields, "hidden_size", layer.width, "width", target.width)
    bias = fields.switch("qkv_bias", layer.attention_bias)
    return Eagle1Config(
        layer=dataclasses.replace(layer, attention_bias=bias),
        target_layers=target.num_layers,
        hidden_layers=(target.num_layers,),
        own_embedding="embed_tokens.weight" in found,
        own_output="lm_head.weight" in found,
        fc_bias=fields.switch("bias", True),
    )


def _eagle3(
    fields: Fields, of_layer: Fields, target: TransformerConfig, dtype: str, found: Collection[str]
) -> Eagle3Config:
    layer = _layer(of_layer, target, dtype)
    width = fields("target_hidden_size", layer.width)
    _require(fields, "target_hidden_size or hidden_size", width, "width", target.width)
    size = fields("draft_vocab_size", target.vocab_size)
    return Eagle3Config(
        layer=layer,
        target_layers=target.num_layers,
        target_width=width,
        hidden_layers=_hidden_layers(fields, target.num_layers),
        draft_vocab_size=size if "d2t" in found or size != target.vocab_size else None,
        own_embedding="embed_tokens.weight" in found,
        own_output="lm_head.weight" in found or size != target.vocab_size,
        **{name: fields.switch(name, False) for name in SWITCHES},
    )


def _layer(fields: Fields, target: TransformerConfig, dtype: str) -> TransformerConfig:
    """Returns the shape of the head's only decoder layer, with the target's vocabulary."""
    model_type = fields("model_type", "llama")
    validate.choice(f"{fields.path}: model_type", model_type, FAMILY_OF)
    fields.require("num_hidden_layers", 1)
    layer = TransformerConfig(dtype=dtype, **FAMILIES[FAMILY_OF[model_type]].read(fields))
    _require(fields, "vocab_size", layer.vocab_size, "vocabulary", target.vocab_size)
    if layer.window is not None:
        raise ValueError(f"{fields.path} says sliding_window = {layer.window}; heads with a window are not supported")
    return dataclasses.replace(layer, tied=False)


def _hidden_layers(fields: Fields, target_layers: int) -> tuple[int, ...]:
    """Returns the layers of the target whose outputs the head reads."""
    key = "eagle_aux_hidden_state_layer_ids"
    inputs, outputs = fields(key, None), fields.object("eagle_config").get(key)
    if inputs is None and outputs is None:
        return Eagle3Config.usual_layers(target_layers)
    first, ids = (1, inputs) if outputs is None else (0, outputs)
    name = f"{fields.path}, for a target of {target_layers} layers: {key}"
    return tuple(i - first for i in validate.integers(name, ids, first, target_layers + first))


def _require(fields: Fields, key: str, value: int, what: str, wanted: int) -> None:
    if value != wanted:
        raise ValueError(
            f"{fields.path} says {key} = {value}, but the target's {what} is {wanted}: the head is of another target"
        )
