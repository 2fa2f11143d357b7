"""Writes a model trained here as a folder that transformers, and other readers of its format, can
load.

Gated models are written as Llama, ungated models as Arcee, which is Llama without the gate.
"""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict
from safetensors.numpy import save

from specsamp import storage
from specsamp.checkpoints.architectures import FAMILIES, parse_config, written_keys
from specsamp.checkpoints.fields import ACTIVATIONS, differing_fields
from specsamp.checkpoints.params import check_shapes, init_shapes
from specsamp.checkpoints.rope import describe_rotary
from specsamp.checkpoints.safetensors_io import INDEX, MEDUSA_PICKLE, MEDUSA_SINGLE, PICKLE, SINGLE
from specsamp.checkpoints.tensor_names import find_source, sizes
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.models.config import DECODING, TransformerConfig
from specsamp.models.transformer import TransformerLM

# Files that an older export of a model or head may have left. config.json first: it marks a model.
STALE = ("config.json", INDEX, SINGLE, PICKLE, MEDUSA_SINGLE, MEDUSA_PICKLE)
STALE += ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def export(
    folder: str, config: TransformerConfig, params: Any, tokenizer: JsonTokenizer | None = None
) -> None:
    """Writes config, tensors, tokenizer and stop token.

    Args:
      folder: local or in a bucket.
      params: of ``TransformerLM(config)``, stored in their own dtype.
      tokenizer: its ``eos_id`` becomes the stop token.

    Raises:
      ValueError: the architecture cannot describe some fields of this model, or the parameters are
        of another model.
    """
    content = describe_model(config, None if tokenizer is None else tokenizer.eos_id)
    check_shapes("what is to be exported", params, init_shapes(TransformerLM(config)))
    leaves = flatten_dict(params, sep="/")
    content["torch_dtype"] = str(leaves["final_norm/scale"].dtype)
    names = FAMILIES[content["architectures"][0]].names
    sources = {name: find_source(name, names, sizes(config)) for name in leaves}
    tensors = {
        source.tensor: source.write(np.asarray(leaves[name])) for name, source in sources.items()
    }
    write_folder(folder, content, tensors, tokenizer=tokenizer)


def write_folder(
    folder: str | os.PathLike,
    content: Mapping[str, Any],
    tensors: dict[str, np.ndarray],
    file: str = SINGLE,
    tokenizer: JsonTokenizer | None = None,
) -> None:
    """Deletes an older export; writes tensors to ``file``, the tokenizer, and last ``content`` as
    config.json.
    """
    place = storage.place(folder)
    for name in STALE:  # so that it is not mistaken for a part of this export
        (place / name).unlink(missing_ok=True)
    storage.write(place / file, save(tensors, metadata={"format": "pt"}))
    if tokenizer is not None:
        storage.write(place / "tokenizer.json", tokenizer.to_json())
        end = None if tokenizer.eos_id is None else tokenizer.token(tokenizer.eos_id)
        storage.write_json(
            place / "tokenizer_config.json",
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end},
        )
        storage.write_json(place / "generation_config.json", {"eos_token_id": tokenizer.eos_id})
    storage.write_json(place / "config.json", content)


def describe_layers(config: TransformerConfig) -> dict[str, Any]:
    """Returns the keys of config.json that models and heads have in common."""
    theirs = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    return {
        **written_keys(config, "sizes"),
        "rms_norm_eps": config.norm_epsilon,
        "hidden_act": theirs[config.activation],
        "rope_parameters": describe_rotary(config),
        "tie_word_embeddings": config.tied,
    }


def describe_model(config: TransformerConfig, eos_id: int | None) -> dict:
    """Returns the ``config.json`` of a model; raises ValueError with the fields that have no
    counterpart there.
    """
    content = {
        "architectures": ["LlamaForCausalLM" if config.gated else "ArceeForCausalLM"],
        "model_type": "llama" if config.gated else "arcee",
        **describe_layers(config),
        "attention_bias": config.attention_bias,
        "mlp_bias": config.feedforward_bias,
        "rope_theta": config.rotary_base,
        "bos_token_id": None,
        "eos_token_id": eos_id,
    }
    _, read = parse_config("config.json", content, config.dtype)
    different = [
        f"{name} = {ours!r}"
        for name, (ours, _) in differing_fields(config, read, but=DECODING).items()
    ]
    if different:
        raise ValueError(
            f"{content['architectures'][0]} has no counterpart of {', '.join(different)}: train "
            "the model with rotary positions and without n-gram tables "
            "(configs/python_pair.py:llama_target, llama_draft)"
        )
    return content
