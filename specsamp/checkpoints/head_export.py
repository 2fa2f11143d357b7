"""Writes heads as files for `specsamp.checkpoints.heads` and for other programs.

EAGLE-3 heads are written in the layout of the package speculators, Medusa heads in the layout of their authors. There is no
public layout for an MTP module without its target: its tensors get the names of MiMo's module, and only this package reads
the folder.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from specsamp.checkpoints.architectures import FAMILIES
from specsamp.checkpoints.block_config import KINDS, describe_block, layout_of
from specsamp.checkpoints.export import write_folder
from specsamp.checkpoints.fields import SIZES, differing_fields
from specsamp.checkpoints.head_config import (
    EAGLE,
    MEDUSA,
    MIMO,
    MIMO_MTP,
    SPECULATORS,
    SWITCHES,
    HeadLayout,
    parse_head,
)
from specsamp.checkpoints.heads import KEPT, OFFSETS, head_sources
from specsamp.checkpoints.params import check_shapes
from specsamp.checkpoints.rope import describe_rotary
from specsamp.models.block import BlockConfig
from specsamp.models.config import TransformerConfig
from specsamp.models.eagle import Eagle3Config
from specsamp.models.heads import DRAFT_IDS, Head, HeadConfig
from specsamp.models.medusa import MedusaConfig
from specsamp.models.mtp import MTPConfig


def write_head(folder: str | os.PathLike, head: Head, params: Any, *, target_name: str, K: int) -> None:
    """Writes a head as a folder.

    Args:
      target_name: where readers find the target: a folder, or an id of the hub.
      K: the draft length that the files recommend.

    Raises:
      ValueError: a head that its layout cannot describe; parameters of another head.
    """
    config = head.config
    layout, content = describe_head(config, target_name, K)
    check_shapes("what is to be written", params, jax.eval_shape(config.head().init, jax.random.key(0)))
    leaves = flatten_dict(params, sep="/")
    tensors = {
        source.tensor: source.write(np.asarray(leaves[name])) for name, source in head_sources(config, layout).items()
    }
    if config.draft_vocab_size is not None:
        ids_U = np.asarray(leaves[DRAFT_IDS], np.int64)
        tensors[OFFSETS] = ids_U - np.arange(len(ids_U))
        tensors[KEPT] = np.isin(np.arange(config.layer.vocab_size), ids_U)
    write_folder(folder, content, tensors, layout.file)


def describe_head(config: HeadConfig, target_name: str, K: int) -> tuple[HeadLayout, dict[str, Any]]:
    """Returns the layout of a head, and its ``config.json``; see `write_head`."""
    if type(config) not in WRITTEN:
        known = ", ".join(kind.__name__ for kind in WRITTEN)
        raise ValueError(f"only heads of {known} can be written; got {type(config).__name__}")
    (layout, describe), layer = WRITTEN[type(config)], config.layer
    layout, content = layout or layout_of(config), describe(config, target_name, K)
    try:
        found = {source.tensor for source in head_sources(config, layout).values()}
    except KeyError as error:
        raise ValueError(f"the layout of {layout.whose} has no tensor for the parameter {error}") from error
    if config.draft_vocab_size is not None:
        found.add(OFFSETS)
    target = dataclasses.replace(layer, width=config.target_width, num_layers=config.target_layers, head_size=2)
    _, read = parse_head("config.json", content, target, layer.dtype, found)
    if not config.has_layer:
        read = dataclasses.replace(read, layer=layer)
    different = differing_fields(config, read, but=("layer",)) | differing_fields(layer, read.layer)
    if different:
        told = ", ".join(f"{name} = {ours!r}" for name, (ours, _) in different.items())
        raise ValueError(f"the layout of {layout.whose} has no counterpart of {told}")
    return layout, content


def _eagle3(config: Eagle3Config, target_name: str, K: int) -> dict[str, Any]:
    layer = config.layer
    return {
        SPECULATORS: "eagle3",
        "architectures": ["Eagle3Speculator"],
        "speculators_version": "0.9.0",
        "transformer_layer_config": {
            "model_type": "qwen3" if layer.query_key_norm else "llama",
            "num_hidden_layers": 1,
            "attention_bias": layer.attention_bias,
            **_layer(layer),
        },
        "draft_vocab_size": config.num_outputs,
        "target_hidden_size": config.target_width,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in config.hidden_layers],
        **{name: getattr(config, name) for name in SWITCHES},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": K}],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
    }


def _medusa(config: MedusaConfig, target_name: str, K: int) -> dict[str, Any]:
    if not config.bias:
        raise ValueError("bias = False: the code of Medusa has a bias in each block, and would leave it random")
    return {
        "model_type": "medusa",
        "base_model_name_or_path": target_name,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": 1,
        "hidden_size": config.layer.width,
        "vocab_size": config.layer.vocab_size,
    }


def _mtp(config: MTPConfig, target_name: str, K: int) -> dict[str, Any]:
    return {
        "architectures": [MIMO],
        "model_type": FAMILIES[MIMO].model_type,
        "base_model_name_or_path": target_name,
        "num_hidden_layers": config.target_layers,
        "num_nextn_predict_layers": 1,
        **_layer(config.layer),
    }


def _layer(layer: TransformerConfig) -> dict[str, Any]:
    """Returns the keys of a decoder layer."""
    return {
        **{key: getattr(layer, ours) for ours, key in SIZES.items() if ours != "num_layers"},
        "rms_norm_eps": layer.norm_epsilon,
        "hidden_act": layer.activation,
        "rope_parameters": describe_rotary(layer),
        "tie_word_embeddings": False,
    }


def _block(config: BlockConfig, target_name: str, K: int) -> dict[str, Any]:
    return describe_block(config, target_name, K, _layer(config.layer))


WRITTEN = {
    Eagle3Config: (EAGLE, _eagle3),
    MedusaConfig: (MEDUSA, _medusa),
    MTPConfig: (MIMO_MTP, _mtp),
    **{kind: (None, _block) for kind in KINDS.values()},
}
