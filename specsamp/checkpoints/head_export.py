"""Writes heads as files for `specsamp.checkpoints.public_heads` and for other programs.

EAGLE-3 heads and heads that draft blocks are written in the layout of the package speculators,
Medusa heads in the layout of their authors. MTP modules have no public layout without their target:
the tensors get the names of MiMo's module, and only this package reads the folder.
"""

import dataclasses
import os
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from specsamp.checkpoints.architectures import FAMILIES, KEYS, written_keys
from specsamp.checkpoints.export import describe_layers, write_folder
from specsamp.checkpoints.fields import differing_fields
from specsamp.checkpoints.head_config import (
    BLOCKS,
    EAGLE,
    MARKOV,
    MEDUSA,
    MIMO,
    MIMO_MTP,
    SPECULATORS,
    HeadLayout,
    block_layout,
    parse_head,
)
from specsamp.checkpoints.params import check_shapes, init_shapes
from specsamp.checkpoints.public_heads import KEPT, OFFSETS, head_sources
from specsamp.models.block_corrections import DSparkConfig
from specsamp.models.dflash import BlockConfig
from specsamp.models.eagle import Eagle3Config
from specsamp.models.heads import DRAFT_IDS, Head, HeadConfig
from specsamp.models.medusa import MedusaConfig
from specsamp.models.mtp import MTPConfig


def write_head(
    folder: str | os.PathLike, head: Head, params: Any, *, target_name: str, K: int
) -> None:
    """Writes a head as a folder.

    Args:
      target_name: the target's folder or id of the hub, for readers of the files.
      K: the recommended draft length, written to the files.

    Raises:
      ValueError: the layout cannot describe the head, or the parameters are of another head.
    """
    config = head.config
    layout, content = describe_head(config, target_name, K)
    check_shapes("what is to be written", params, init_shapes(config.head()))
    leaves = flatten_dict(params, sep="/")
    tensors = {
        source.tensor: source.write(np.asarray(leaves[name]))
        for name, source in head_sources(config, layout).items()
    }
    if config.draft_vocab_size is not None:
        ids_U = np.asarray(leaves[DRAFT_IDS], np.int64)
        tensors[OFFSETS] = ids_U - np.arange(len(ids_U))
        tensors[KEPT] = np.isin(np.arange(config.layer.vocab_size), ids_U)
    write_folder(folder, content, tensors, layout.file)


def describe_head(
    config: HeadConfig, target_name: str, K: int
) -> tuple[HeadLayout, dict[str, Any]]:
    """Returns the layout of a head, and its ``config.json``; see `write_head`."""
    if type(config) not in WRITTEN:
        known = ", ".join(kind.__name__ for kind in WRITTEN)
        raise ValueError(f"only heads of {known} can be written; got {type(config).__name__}")
    (layout, describe), layer = WRITTEN[type(config)], config.layer
    layout, content = layout or block_layout(config), describe(config, target_name, K)
    try:
        found = {source.tensor for source in head_sources(config, layout).values()}
    except KeyError as error:
        raise ValueError(
            f"the files of {config.kind} heads have no tensor for the parameter {error}"
        ) from error
    if config.draft_vocab_size is not None:
        found.add(OFFSETS)
    target = dataclasses.replace(
        layer,
        width=config.target_width,
        num_layers=config.target_layers,
        head_size=2,
        window=None,
        global_layers=(),
    )
    _, read = parse_head("config.json", content, target, layer.dtype, found)
    if not config.has_layer:
        read = dataclasses.replace(read, layer=layer)
    different = differing_fields(config, read, but=("layer",)) | differing_fields(layer, read.layer)
    if different:
        told = ", ".join(f"{name} = {ours!r}" for name, (ours, _) in different.items())
        raise ValueError(f"the files of {config.kind} heads have no counterpart of {told}")
    return layout, content


def _eagle3(config: Eagle3Config, target_name: str, K: int) -> dict[str, Any]:
    of_layer = {"model_type": "qwen3" if config.layer.query_key_norm else "llama"}
    return _speculators("eagle3", "Eagle3Speculator", config, target_name, K, of_layer) | {
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in config.hidden_layers],
        **written_keys(config, "eagle3"),
    }


def _speculators(
    kind: str,
    architecture: str,
    config: HeadConfig,
    target_name: str,
    K: int,
    of_layer: dict[str, Any],
) -> dict[str, Any]:
    """Returns the keys that all files of speculators have; ``of_layer`` has further keys of the
    decoder layers.
    """
    layer = config.layer
    return {
        SPECULATORS: kind,
        "architectures": [architecture],
        "speculators_version": "0.9.0",
        "transformer_layer_config": {
            "attention_bias": layer.attention_bias,
            **of_layer,
            **describe_layers(layer),
        },
        "draft_vocab_size": config.num_outputs,
        "target_hidden_size": config.target_width,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": K}],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
    }


def _medusa(config: MedusaConfig, target_name: str, K: int) -> dict[str, Any]:
    if not config.bias:
        raise ValueError(
            "bias = False: Medusa's own code has a bias in each block, which would stay random"
        )
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
        "num_nextn_predict_layers": config.num_modules,
        **describe_layers(config.layer),
        "num_hidden_layers": config.target_layers,
    }


def _block(config: BlockConfig, target_name: str, K: int) -> dict[str, Any]:
    kind = next(kind for kind, cls in BLOCKS.items() if cls is type(config))
    layer = config.layer
    windows = [layer.window_of(i) for i in range(layer.num_layers)]
    of_layer = {
        "model_type": "qwen3",
        "layer_types": [
            "full_attention" if window is None else "sliding_attention" for window in windows
        ],
        "use_sliding_window": layer.window is not None,
        "sliding_window": layer.window,
    }
    architecture = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}.get(
        kind, "DFlash2DraftModel"
    )
    content = _speculators(kind, architecture, config, target_name, config.max_tokens, of_layer) | {
        **written_keys(config, *dict.fromkeys(("dflash", kind))),
        "aux_hidden_state_layer_ids": [i + 1 for i in config.hidden_layers],
        "sample_from_anchor": config.from_anchor,
        "sliding_window_non_causal": config.windows_both_ways,
    }
    if isinstance(config, DSparkConfig):
        names = {ours: theirs for theirs, ours in MARKOV.items()}
        content |= {
            "markov_head_type": names[config.markov],
            "enable_confidence_head": config.confidence is not None,
        }
        content |= {"confidence_head_with_markov": config.confidence == "markov"}
    if layer.logit_cap is not None:
        content["final_logit_softcapping"] = layer.logit_cap
    # Keys of z-lab, which speculators does not read: written only if they differ from the defaults.
    defaults = dict(KEYS["dflash_of_zlab"].values())
    return content | {
        key: x for key, x in written_keys(config, "dflash_of_zlab").items() if x != defaults[key]
    }


WRITTEN = {
    Eagle3Config: (EAGLE, _eagle3),
    MedusaConfig: (MEDUSA, _medusa),
    MTPConfig: (MIMO_MTP, _mtp),
    **{kind: (None, _block) for kind in BLOCKS.values()},
}
