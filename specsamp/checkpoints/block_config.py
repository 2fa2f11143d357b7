"""Reads and describes heads that draft blocks: files of z-lab (DFlash, DFlash 2), of DeepSpec and of speculators.

z-lab has the keys of a head in ``dflash_config`` or beside it, DeepSpec beside the keys of the layers; both count outputs
of layers from 0, and -1 is the embedding's. speculators counts inputs, so that its ids are higher by one. What a head has
beyond DFlash is seen from its tensors. Queries and keys always have norms, as in Qwen3. Heads are written for speculators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from specsamp import validate
from specsamp.checkpoints.architectures import FAMILIES
from specsamp.checkpoints.fields import Fields
from specsamp.checkpoints.head_layout import FAMILY_OF, SPECULATORS, HeadLayout
from specsamp.checkpoints.safetensors_io import Tensor
from specsamp.checkpoints.tensor_names import TABLES
from specsamp.models.block import BlockConfig
from specsamp.models.block_corrections import DFlash2Config, DSparkConfig
from specsamp.models.config import TransformerConfig

KINDS = {"dflash": BlockConfig, "dspark": DSparkConfig, "dflash2": DFlash2Config}
MARKOV = {"vanilla": "vanilla", "gated": "gated", "rnn": "recurrent"}


def layout_of(config: BlockConfig) -> HeadLayout:
    """Returns the layout of the files of a head."""
    table = "block_selector" if isinstance(config, DFlash2Config) else f"block_{getattr(config, 'markov', None)}"
    return HeadLayout(names=TABLES["block"] | TABLES.get(table, {}))


def is_block(content: Mapping[str, Any]) -> bool:
    """Returns whether a config.json describes a head that drafts blocks."""
    keys = {"dflash_config", "dspark_config"}
    beside = {"block_size", "target_layer_ids"} <= content.keys()
    return content.get(SPECULATORS) in KINDS or bool(keys & content.keys()) or beside


def parse_block(
    path: str, content: Mapping[str, Any], target: TransformerConfig, dtype: str, found: Collection[str]
) -> tuple[HeadLayout, BlockConfig]:
    """Returns the layout and the shape of a head; see `specsamp.checkpoints.head_config.parse_head`."""
    given = {key: value for key, value in content.items() if value is not None}
    merged = {**Fields(path, given).object("dspark_config"), **Fields(path, given).object("dflash_config"), **given}
    fields, by_input = Fields(path, merged), SPECULATORS in content
    of_layer = dict(fields.object("transformer_layer_config")) if by_input else merged
    if fields("use_swa", False):
        of_layer |= {"use_sliding_window": True, "sliding_window": fields("swa_window_size")}
    layer = _layer(Fields(path, of_layer), target, dtype)
    cap = fields("final_logit_softcapping", None)
    width = fields("target_hidden_size", layer.width)
    for key, value, wanted in (
        ("target_hidden_size or hidden_size", width, target.width),
        ("vocab_size", layer.vocab_size, target.vocab_size),
        ("num_target_layers", fields("num_target_layers", target.num_layers), target.num_layers),
    ):
        if value != wanted:
            raise ValueError(
                f"{path} says {key} = {value}, but the target's is {wanted}: the head is of another target"
            )
    signs = {"markov_head.": "dspark", "candidate_selector.": "dflash2"}
    kind = next((kind for sign, kind in signs.items() if any(name.startswith(sign) for name in found)), "dflash")
    size = fields("draft_vocab_size", target.vocab_size)
    config = KINDS[kind](
        layer=dataclasses.replace(layer, logit_cap=cap),
        target_layers=target.num_layers,
        target_width=width,
        hidden_layers=_hidden_layers(fields, by_input, target.num_layers),
        draft_vocab_size=size if size != target.vocab_size else None,
        own_embedding="embed_tokens.weight" in found,
        own_output="lm_head.weight" in found or size != target.vocab_size,
        block_size=fields("block_size"),
        mask_id=fields("mask_token_id"),
        from_anchor=fields("sample_from_anchor", fields("shift_label", kind == "dspark")),
        causal=fields.switch("causal", False),
        windows_both_ways=layer.window is not None and fields("sliding_window_non_causal", kind == "dflash2"),
        embedding_scale=fields("input_embedding_scale", 1.0),
        output_scale=fields("output_multiplier", 1.0),
        **_corrections(kind, fields, found),
    )
    return layout_of(config), config


def check_features(name: str, found: Mapping[str, Tensor], config: BlockConfig) -> None:
    """Raises ValueError if a head reads one layer more than its config.json names."""
    fc, read = found.get("fc.weight"), len(config.hidden_layers)
    if fc is not None and fc.shape[1] == (read + 1) * config.target_width:
        raise ValueError(
            f"{name}: fc.weight reads {read + 1} layers of the target, config.json names {read}: the converter of "
            "speculators drops the id of the target's last layer. Put it back in aux_hidden_state_layer_ids, or give the "
            "original checkpoint"
        )


def describe_block(config: BlockConfig, target_name: str, K: int, layer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ``config.json`` of a head for speculators.

    Args:
      layer: the keys of its layers' sizes.
    """
    kind = next(kind for kind, cls in KINDS.items() if cls is type(config))
    of = config.layer
    kinds = ["full_attention" if of.window_of(i) is None else "sliding_attention" for i in range(of.num_layers)]
    content = {
        SPECULATORS: kind,
        "architectures": [{"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}.get(kind, "DFlash2DraftModel")],
        "speculators_version": "0.9.0",
        "transformer_layer_config": {
            "model_type": "qwen3",
            "num_hidden_layers": of.num_layers,
            "attention_bias": of.attention_bias,
            "layer_types": kinds,
            "use_sliding_window": of.window is not None,
            "sliding_window": of.window,
            **layer,
        },
        "draft_vocab_size": config.num_outputs,
        "target_hidden_size": config.target_width,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.hidden_layers],
        "mask_token_id": config.mask_id,
        "sample_from_anchor": config.from_anchor,
        "sliding_window_non_causal": config.windows_both_ways,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": K}],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
    }
    if isinstance(config, DSparkConfig):
        names = {ours: theirs for theirs, ours in MARKOV.items()}
        content |= {"markov_rank": config.markov_rank, "markov_head_type": names[config.markov]}
        content |= {"enable_confidence_head": config.confidence is not None}
        content |= {"confidence_head_with_markov": config.confidence == "markov"}
    if isinstance(config, DFlash2Config):
        content |= {"conv_kernel_size": config.conv_taps, "conv_group_size": config.conv_group}
        content |= {"selector_rank": config.selector_rank, "selector_top_k": config.selector_top_k}
    # Keys of z-lab, which speculators does not read: they are there only where they say something.
    said = (
        ("causal", config.causal, False),
        ("input_embedding_scale", config.embedding_scale, 1),
        ("output_multiplier", config.output_scale, 1),
        ("final_logit_softcapping", of.logit_cap, None),
    )
    return content | {key: value for key, value, default in said if value != default}


def _layer(fields: Fields, target: TransformerConfig, dtype: str) -> TransformerConfig:
    """Returns the shape of the layers, with the target's vocabulary."""
    model_type = fields("model_type", "qwen3")
    validate.choice(f"{fields.path}: model_type", model_type, FAMILY_OF)
    layer = TransformerConfig(dtype=dtype, **FAMILIES[FAMILY_OF[model_type]].read(fields))
    return dataclasses.replace(layer, tied=False, query_key_norm=True)


def _hidden_layers(fields: Fields, by_input: bool, target_layers: int) -> tuple[int, ...]:
    key, first = ("aux_hidden_state_layer_ids", 1) if by_input else ("target_layer_ids", 0)
    ids = fields(key, None)
    if ids is None:
        return BlockConfig.usual_layers(target_layers)
    name = f"{fields.path}, for a target of {target_layers} layers: {key}"
    return tuple(i - first for i in validate.integers(name, ids, first - 1, target_layers + first))


def _corrections(kind: str, fields: Fields, found: Collection[str]) -> dict[str, Any]:
    if kind == "dspark":
        markov = fields("markov_head_type", "vanilla")
        reads = "markov" if fields.switch("confidence_head_with_markov", True) else "hidden"
        return dict(
            markov=MARKOV[validate.choice(f"{fields.path}: markov_head_type", markov, MARKOV)],
            markov_rank=fields("markov_rank", 256),
            confidence=reads if any(name.startswith("confidence_head.") for name in found) else None,
        )
    if kind == "dflash2":
        return dict(
            conv_taps=fields("conv_kernel_size", 2),
            conv_group=fields("conv_group_size", 16),
            selector_rank=fields("selector_rank", 256),
            selector_top_k=fields("selector_top_k", 16),
        )
    return {}
