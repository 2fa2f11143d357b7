"""Reads the ``config.json`` of a head, in the layouts of EAGLE, speculators, Medusa, MTP modules,
z-lab and DeepSpec.

Here ``hidden_layers`` are the layers whose outputs a head reads. Files of EAGLE do not name them:
these heads read the inputs of layers 2, L/2 and L-3, which are the outputs of the previous layers.
Files of speculators name inputs of layers, so id i is layer i - 1 here. Files of SpecForge name
outputs, in ``eagle_config``.

Medusa heads have the sizes of their target. Their number is counted from the tensors, since
published files with five heads say two. An MTP module is in the checkpoint of its target, and
config.json describes both. transformers leaves modules of Qwen out; their computation is that of
vLLM and SGLang.

Heads that draft blocks (DFlash, DSpark, DFlash 2): z-lab has the keys of a head in
``dflash_config`` or at the top level, DeepSpec at the level of the layers' keys; both name outputs
of layers, and -1 is the embedding. The tensors show which parts a head has in addition to DFlash.
Queries and keys always have norms, as in Qwen3.
"""

import dataclasses
import functools
import re
from collections.abc import Collection, Mapping
from typing import Any

from specsamp import validate
from specsamp.checkpoints.architectures import (
    FAMILIES,
    KEYS,
    Family,
    parse_config,
    read_keys,
    text_fields,
)
from specsamp.checkpoints.fields import Fields
from specsamp.checkpoints.safetensors_io import MEDUSA_SINGLE, SINGLE
from specsamp.checkpoints.tensor_names import TABLES
from specsamp.models.assistant import AssistantConfig
from specsamp.models.block_corrections import DFlash2Config, DSparkConfig
from specsamp.models.config import TransformerConfig
from specsamp.models.dflash import BlockConfig
from specsamp.models.eagle import Eagle1Config, Eagle3Config
from specsamp.models.heads import HeadConfig
from specsamp.models.medusa import MedusaConfig
from specsamp.models.mtp import MTPConfig

FAMILY_OF = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SPECULATORS = "speculators_model_type"  # a key that only files of speculators have
BLOCKS = {"dflash": BlockConfig, "dspark": DSparkConfig, "dflash2": DFlash2Config}
MARKOV = {"vanilla": "vanilla", "gated": "gated", "rnn": "recurrent"}
BLOCK_KEYS = ("dflash", "dflash_of_zlab")  # tables of architectures.json, of all block heads
PLAIN = ("none", *FAMILY_OF.values())  # architectures in files of EAGLE that do not name a head
MIMO = "MiMoForCausalLM"
ASSISTANTS = {  # by architecture, the values of absent keys in text_config
    "Gemma4AssistantForCausalLM": "gemma4_text",
    "Gemma4UnifiedAssistantForCausalLM": "gemma4_unified_text",
}
# Tensors of an assistant beside its own: clusters, and others that transformers does not read.
OF_ASSISTANT = re.compile(
    r"^lm_head\.weight$|token_ordering$|self_attn\.[kv]_(proj|norm)\.|rotary_emb\."
)
# Tensors beside a head's: maps of vocabularies, tensors of the target, and tables that are
# computed.
OF_SPECULATORS = re.compile(
    r"(d2t|t2d|verifier_norm\.weight|verifier_lm_head\.weight)$|rotary_emb\."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """The file format of a kind of heads."""

    file: str = SINGLE  # of the tensors, where it is written
    names: Mapping[str, str]  # see tensor_names.py
    others: re.Pattern = OF_SPECULATORS  # names of tensors that are no parameters of the head
    in_target: bool = False  # the head is in the checkpoint of its target


EAGLE = HeadLayout(names=TABLES["head"])
ASSISTANT = HeadLayout(names=TABLES["gemma"] | TABLES["assistant"], others=OF_ASSISTANT)
NOTHING = re.compile(r"(?!)")
MEDUSA = HeadLayout(file=MEDUSA_SINGLE, names=TABLES["medusa"], others=NOTHING)
MEDUSA_BLOCKS = HeadLayout(names=TABLES["medusa_blocks"], others=NOTHING)


def _module_layout(
    family: Family, layer: str, module: str, found: Collection[str] = ()
) -> HeadLayout:
    """Returns the layout of an MTP module, whose layer has the names of its target's layers.

    Args:
      layer: the prefix of the layer's tensors.
      module: the table of all other tensors.
    """
    of_target = dict(family.names)
    end, table = family.other_experts
    if any(name.startswith(family.head_prefix) and name.endswith(end) for name in found):
        of_target |= TABLES[table]
    names = {}
    for name, line in of_target.items():
        part = re.sub(r"^layer/(?=experts/|shared/)", "layer/mlp/", name)
        if part.startswith("layer/") and "/recurrence/" not in part:
            moved = line.replace("model.layers.{i}.", layer)
            names[part.replace("layer/", "module/", 1)] = moved
    return HeadLayout(
        names=names | TABLES[module],
        others=re.compile(rf"^(?!{re.escape(family.head_prefix)})"),
        in_target=True,
    )


MIMO_MTP = _module_layout(FAMILIES[MIMO], "model.mtp_layers.{i}.", "mimo_module")


def parse_head(
    path: str,
    content: Mapping[str, Any],
    target: TransformerConfig,
    dtype: str,
    found: Collection[str],
) -> tuple[HeadLayout, HeadConfig]:
    """Returns the layout and the shape of the head that a file describes.

    Args:
      target: the shape in the target's checkpoint, without padding of its vocabulary.
      found: the names of the tensors in its files. Only some heads have an embedding, an output or
        a bias.

    Raises:
      ValueError: another kind of head, a head for another target (width, vocabulary, layers), or an
        unsupported value; names file, key and value.
    """
    # No head takes these from its target; files of heads may state their own.
    plain = dict(
        recurrent=None,
        attention_gate=False,
        attention_sinks=False,
        window=None,
        global_layers=(),
        window_rotary_base=None,
        global_head_size=None,
        global_kv_heads=None,
        keys_as_values=False,
        value_norm=False,
        layer_scale=False,
        pre_norms=True,
        joint_norm=False,
        logit_divisor=None,
        residual_scale=None,
    )
    fields, of_target = Fields(path, content), dataclasses.replace(target, dtype=dtype)
    target = dataclasses.replace(of_target, **plain)
    kind = validate.choice(
        f"{path}: {SPECULATORS}", fields(SPECULATORS, None), (None, "eagle3", *BLOCKS)
    )
    try:
        beside = {"block_size", "target_layer_ids"} <= content.keys()
        if kind in BLOCKS or {"dflash_config", "dspark_config"} & content.keys() or beside:
            return _block(path, content, target, found)
        if kind == "eagle3":
            of_layer = Fields(
                f"{path}, in transformer_layer_config,", fields.object("transformer_layer_config")
            )
            return EAGLE, _eagle3(fields, of_layer, target, found)
        architecture = str(fields("architectures", ["none"])[0])
        if architecture in ASSISTANTS:
            return ASSISTANT, _assistant(path, content, KEYS[ASSISTANTS[architecture]], of_target)
        if (
            "Medusa" in architecture
            or fields("model_type", "") == "medusa"
            or "medusa_num_heads" in content
        ):
            return _medusa(fields, target, found)
        if architecture == MIMO:
            return MIMO_MTP, _mimo_module(fields, target)
        if architecture in FAMILIES and FAMILIES[architecture].head_prefix is not None:
            return _qwen_module(path, content, target, found)
        if "eagle" not in architecture.lower() and architecture not in PLAIN:
            raise ValueError(
                f"{path} says architectures = {architecture!r}; known are heads of EAGLE, EAGLE-3, "
                f"Medusa and DFlash, and the modules of MiMo, Qwen3-Next and Qwen3.5"
            )
        if "Eagle3" in architecture or fields("draft_vocab_size", None) is not None:
            return EAGLE, _eagle3(fields, fields, target, found)
        return EAGLE, _eagle1(fields, target, found)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        if path in str(error):
            raise
        raise ValueError(f"{path} does not describe a supported head: {error}") from error


def _medusa(
    fields: Fields, target: TransformerConfig, found: Collection[str]
) -> tuple[HeadLayout, MedusaConfig]:
    layout = MEDUSA_BLOCKS if any(name.startswith("blocks.") for name in found) else MEDUSA
    for key in ("medusa_num_layers", "num_hidden_layers"):
        fields.require(key, 1)
    _require(fields, "hidden_size", fields("hidden_size", target.width), "width", target.width)
    _require(
        fields,
        "vocab_size",
        fields("vocab_size", target.vocab_size),
        "vocabulary",
        target.vocab_size,
    )
    fields.require("truncated_vocab_size", target.vocab_size)
    numbers = {match[1] for name in found if (match := re.match(r"(?:blocks\.)?(\d+)\.", name))}
    return layout, MedusaConfig(
        layer=dataclasses.replace(
            target, num_layers=1, tied=False, num_real_tokens=None, experts=None
        ),
        target_layers=target.num_layers,
        hidden_layers=(target.num_layers,),
        own_output=True,
        num_heads=max(len(numbers), 1),
        bias=any(name.endswith("bias") for name in found),
    )


def _mimo_module(fields: Fields, target: TransformerConfig) -> MTPConfig:
    """Reads the MTP modules of MiMo: they read the target's stream before the final norm and
    normalise their output.
    """
    layer = TransformerConfig(dtype=target.dtype, **FAMILIES[MIMO].read(fields))
    return MTPConfig(
        hidden_layers=(target.num_layers - 1,),
        num_modules=fields("num_nextn_predict_layers", 1),
        hidden_first=True,
        **_module_shape(fields, layer, target),
    )


def _qwen_module(
    path: str, content: Mapping[str, Any], target: TransformerConfig, found: Collection[str]
) -> tuple[HeadLayout, MTPConfig]:
    """Reads the MTP module of Qwen3-Next or Qwen3.5: a layer of attention that reads the target's
    stream after the final norm.
    """
    family, layer = parse_config(path, content, target.dtype)
    fields = Fields(path, content if family.text is None else content.get("text_config", {}))
    for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        fields.require(key, 1)
    config = MTPConfig(hidden_layers=(target.num_layers,), **_module_shape(fields, layer, target))
    return _module_layout(family, "mtp.layers.{i}.", "qwen_module", found), config


def _module_shape(
    fields: Fields, layer: TransformerConfig, target: TransformerConfig
) -> dict[str, Any]:
    """Returns the fields that all modules share, from the shape of their own target."""
    _require(fields, "hidden_size", layer.width, "width", target.width)
    _require(fields, "vocab_size", layer.vocab_size, "vocabulary", target.vocab_size)
    _require(fields, "num_hidden_layers", layer.num_layers, "number of layers", target.num_layers)
    experts = layer.experts
    if experts is not None:  # as in layer 0
        is_sparse = layer.has_experts(0)
        experts = dataclasses.replace(experts, dense_layers=()) if is_sparse else None
    return dict(
        layer=dataclasses.replace(layer, num_layers=1, tied=False, recurrent=None, experts=experts),
        target_layers=target.num_layers,
        norm_output=True,
    )


def _assistant(
    path: str, content: Mapping[str, Any], usual: Mapping[str, Any], target: TransformerConfig
) -> AssistantConfig:
    """Reads an assistant of Gemma 4: each layer reads the last layer of its kind in the target."""
    fields = Fields(path, content)
    fields.require("tie_word_embeddings", True)
    width = fields("backbone_hidden_size", target.width)
    _require(fields, "backbone_hidden_size", width, "width", target.width)
    # All its layers share the target's caches, so this key says nothing.
    text = {**fields.object("text_config"), "num_kv_shared_layers": 0}
    usual = {**usual, "hidden_size_per_layer_input": 0}
    of_text = text_fields(path, {**content, "text_config": text}, usual)
    layer = TransformerConfig(dtype=target.dtype, **FAMILIES["Gemma4ForCausalLM"].read(of_text))
    _require(of_text, "vocab_size", layer.vocab_size, "vocabulary", target.vocab_size)
    read_layers = []
    for i in range(layer.num_layers):
        is_global, ours = layer.window_of(i) is None, layer.of_layer(i)
        alike = [j for j in range(target.num_layers) if (target.window_of(j) is None) == is_global]
        heads = [
            (config.num_kv_heads, config.head_size)
            for config in (ours, *map(target.of_layer, alike[-1:]))
        ]
        if heads != 2 * heads[:1]:
            raise ValueError(
                f"{fields.path}: layer {i} attends to kv heads of (number, size) {heads[0]}; such "
                f"layers of the target have {heads[1:]}: the head is for another target"
            )
        read_layers.append(alike[-1])
    return AssistantConfig(
        layer=layer,
        target_layers=target.num_layers,
        target_width=target.width,
        hidden_layers=(target.num_layers,),
        own_output=True,
        read_layers=tuple(read_layers),
        num_centroids=fields("num_centroids", 2048)
        if fields.switch("use_ordered_embeddings", False)
        else None,
        top_centroids=fields("centroid_intermediate_top_k", 32),
    )


def _eagle1(fields: Fields, target: TransformerConfig, found: Collection[str]) -> Eagle1Config:
    layer = _only_layer(fields, target)
    _require(fields, "hidden_size", layer.width, "width", target.width)
    bias = fields.switch("qkv_bias", layer.attention_bias)
    return Eagle1Config(
        layer=dataclasses.replace(layer, attention_bias=bias),
        target_layers=target.num_layers,
        hidden_layers=(target.num_layers,),
        own_embedding="embed_tokens.weight" in found,
        own_output="lm_head.weight" in found,
        **read_keys(fields, "eagle1"),
    )


def _eagle3(
    fields: Fields, of_layer: Fields, target: TransformerConfig, found: Collection[str]
) -> Eagle3Config:
    key = "eagle_aux_hidden_state_layer_ids"
    outputs = fields.object("eagle_config").get(key)
    ids = fields(key, None) if outputs is None else outputs
    shape = _of_target(fields, _only_layer(of_layer, target), target, found)
    if "d2t" in found and shape["draft_vocab_size"] is None:
        shape["draft_vocab_size"] = target.vocab_size
    return Eagle3Config(
        hidden_layers=_hidden_layers(
            fields, Eagle3Config, target.num_layers, key, ids, int(outputs is None)
        ),
        **shape,
        **read_keys(fields, "eagle3"),
    )


def _block(
    path: str, content: Mapping[str, Any], target: TransformerConfig, found: Collection[str]
) -> tuple[HeadLayout, BlockConfig]:
    """Reads a head that drafts blocks."""
    given = {key: value for key, value in content.items() if value is not None}
    places = [
        Fields(path, given).object("dspark_config"),
        Fields(path, given).object("dflash_config"),
        given,
    ]
    merged = functools.reduce(dict.__or__, map(dict, places))
    for key in ("block_size", "mask_token_id", "target_layer_ids"):
        if any(place.get(key, merged.get(key)) != merged.get(key) for place in places):
            raise ValueError(
                f"{path} says {key} twice, with different values: {merged[key]!r} at the top level"
            )
    fields, by_input = Fields(path, merged), SPECULATORS in content
    of_layer = dict(fields.object("transformer_layer_config")) if by_input else merged
    if fields("use_swa", False):
        of_layer |= {"use_sliding_window": True, "sliding_window": fields("swa_window_size")}
    layer = _layer(Fields(path, of_layer), target, "qwen3")
    layer = dataclasses.replace(
        layer, query_key_norm=True, logit_cap=fields("final_logit_softcapping", None)
    )
    signs = {"markov_head.": "dspark", "candidate_selector.": "dflash2"}
    kind = next(
        (kind for sign, kind in signs.items() if any(name.startswith(sign) for name in found)),
        "dflash",
    )
    shape = _of_target(fields, layer, target, found) | read_keys(fields, *BLOCK_KEYS, kind)
    num_layers = fields("num_target_layers", target.num_layers)
    _require(fields, "num_target_layers", num_layers, "number of layers", target.num_layers)
    key = "aux_hidden_state_layer_ids" if by_input else "target_layer_ids"
    if kind == "dspark":
        markov = validate.choice(
            f"{path}: markov_head_type", fields("markov_head_type", "vanilla"), MARKOV
        )
        reads = "markov" if fields.switch("confidence_head_with_markov", True) else "hidden"
        trusts = any(name.startswith("confidence_head.") for name in found)
        shape |= dict(markov=MARKOV[markov], confidence=reads if trusts else None)
    config = BLOCKS[kind](
        hidden_layers=_hidden_layers(
            fields, BlockConfig, num_layers, key, fields(key, None), int(by_input)
        ),
        from_anchor=fields("sample_from_anchor", fields("shift_label", kind == "dspark")),
        windows_both_ways=layer.window is not None
        and fields("sliding_window_non_causal", kind == "dflash2"),
        **shape,
    )
    _check_block_size(fields, config)
    return block_layout(config), config


def _check_block_size(fields: Fields, config: BlockConfig) -> None:
    """Raises ValueError if a file of speculators drafts another number of tokens than a block has.

    No tensor shows the size of a block, and with another size than in training a head drafts noise.
    """
    methods = fields.object("speculators_config").get("proposal_methods") or [{}]
    drafted = methods[0].get("speculative_tokens")
    if drafted not in (None, config.max_tokens):
        raise ValueError(
            f"{fields.path} says block_size = {config.block_size}, a block of {config.max_tokens} "
            f"drafted tokens, and speculative_tokens = {drafted!r}: correct the wrong key"
        )


def _of_target(
    fields: Fields, layer: TransformerConfig, target: TransformerConfig, found: Collection[str]
) -> dict[str, Any]:
    """Returns the fields that EAGLE-3 and block heads share: sizes from the target, and their own
    tensors.
    """
    width, size = (
        fields("target_hidden_size", layer.width),
        fields("draft_vocab_size", target.vocab_size),
    )
    _require(fields, "target_hidden_size or hidden_size", width, "width", target.width)
    return dict(
        layer=layer,
        target_layers=target.num_layers,
        target_width=width,
        draft_vocab_size=size if size != target.vocab_size else None,
        own_embedding="embed_tokens.weight" in found,
        own_output="lm_head.weight" in found or size != target.vocab_size,
    )


def block_layout(config: BlockConfig) -> HeadLayout:
    """Returns the layout in which heads that draft blocks are written, that of speculators."""
    table = (
        "block_selector"
        if isinstance(config, DFlash2Config)
        else f"block_{getattr(config, 'markov', None)}"
    )
    return HeadLayout(names=TABLES["block"] | TABLES.get(table, {}))


def _layer(fields: Fields, target: TransformerConfig, usual: str = "llama") -> TransformerConfig:
    """Returns the shape of a head's decoder layers, with the target's vocabulary; ``usual`` is
    their model_type.
    """
    model_type = validate.choice(
        f"{fields.path}: model_type", fields("model_type", usual), FAMILY_OF
    )
    layer = TransformerConfig(dtype=target.dtype, **FAMILIES[FAMILY_OF[model_type]].read(fields))
    _require(fields, "vocab_size", layer.vocab_size, "vocabulary", target.vocab_size)
    return dataclasses.replace(layer, tied=False)


def _only_layer(fields: Fields, target: TransformerConfig) -> TransformerConfig:
    """Returns the shape of the single layer of a head of EAGLE."""
    fields.require("num_hidden_layers", 1)
    layer = _layer(fields, target)
    if layer.window is not None:
        raise ValueError(
            f"{fields.path} says sliding_window = {layer.window}; heads with a window are not "
            "supported"
        )
    return layer


def _hidden_layers(
    fields: Fields, kind: type[HeadConfig], target_layers: int, key: str, ids: Any, first: int
) -> tuple[int, ...]:
    """Returns the layers whose outputs a head reads, from ids that begin at ``first``; None: the
    usual layers.
    """
    if ids is None:
        return kind.usual_layers(target_layers)
    name = f"{fields.path}, for a target of {target_layers} layers: {key}"
    # Such heads may read the embedding, which comes before the first layer.
    least = first - kind.drafts_blocks
    return tuple(i - first for i in validate.integers(name, ids, least, target_layers + first))


def _require(fields: Fields, key: str, value: int, what: str, wanted: int) -> None:
    if value != wanted:
        raise ValueError(
            f"{fields.path} says {key} = {value}, but the target's {what} is {wanted}: the head is "
            "for another target"
        )
