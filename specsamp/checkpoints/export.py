"""Writes a model trained here as a folder that transformers, and other readers of its format, can load.

Gated models are written as Llama, ungated ones as Arcee, which is Llama without the gate.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from safetensors.numpy import save

from specsamp import storage
from specsamp.checkpoints.architectures import FAMILIES, parse_config
from specsamp.checkpoints.fields import ACTIVATIONS, SIZES, differing_fields
from specsamp.checkpoints.params import check_shapes
from specsamp.checkpoints.safetensors_io import INDEX, SINGLE
from specsamp.checkpoints.tensor_names import find_source, sizes
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.models.config import DECODING, TransformerConfig
from specsamp.models.transformer import TransformerLM

# Without the first there is no model. Numbered files are found through an index only.
WRITTEN = ("config.json", INDEX, SINGLE, "tokenizer.json", "tokenizer_config.json", "generation_config.json")
SHARD_BYTES = 2 * 10**9  # at most, of one file (or one tensor that is larger)


def export(folder: str, config: TransformerConfig, params: Any, tokenizer: JsonTokenizer | None = None) -> None:
    """Writes config, tensors, tokenizer and stop token; ``config.json`` comes last.

    Args:
      folder: local or in a bucket.
      params: of ``TransformerLM(config)``, stored in the dtype they have.
      tokenizer: its ``eos_id`` becomes the stop token.

    Raises:
      ValueError: neither architecture can describe this model, with the fields that have no counterpart; or the parameters
        are of another model.
    """
    place = storage.place(folder)
    content = describe_model(config, None if tokenizer is None else tokenizer.eos_id)
    check_shapes("what is to be exported", params, jax.eval_shape(TransformerLM(config).init, jax.random.key(0)))
    leaves = flatten_dict(params, sep="/")
    content["torch_dtype"] = str(leaves["final_norm/scale"].dtype)
    names = FAMILIES[content["architectures"][0]].names
    shards = _shards({name: leaf.nbytes for name, leaf in leaves.items()})
    count, weight_map = len(shards), {}
    files = [SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for name in WRITTEN:  # of an older export: no reader may take it for a part of this one
        (place / name).unlink(missing_ok=True)
    for file, shard in zip(files, shards):
        tensors = {}
        for name in shard:
            source = find_source(name, names, sizes(config))
            tensors[source.tensor] = source.write(np.asarray(leaves[name]))
            weight_map[source.tensor] = file
        storage.write(place / file, save(tensors, metadata={"format": "pt"}))
    if len(files) > 1:
        total = sum(leaf.nbytes for leaf in leaves.values())
        storage.write_json(place / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    if tokenizer is not None:
        storage.write(place / "tokenizer.json", tokenizer.to_json())
        end = None if tokenizer.eos_id is None else tokenizer.token(tokenizer.eos_id)
        storage.write_json(
            place / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
        )
        storage.write_json(place / "generation_config.json", {"eos_token_id": tokenizer.eos_id})
    storage.write_json(place / "config.json", content)


def describe_model(config: TransformerConfig, eos_id: int | None) -> dict:
    """Returns the ``config.json`` of a model; raises ValueError with the fields that have no counterpart there."""
    theirs = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    content = {
        "architectures": ["LlamaForCausalLM" if config.gated else "ArceeForCausalLM"],
        "model_type": "llama" if config.gated else "arcee",
        **{key: getattr(config, ours) for ours, key in SIZES.items()},
        "rms_norm_eps": config.norm_epsilon,
        "hidden_act": theirs[config.activation],
        "tie_word_embeddings": config.tied,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.feedforward_bias,
        "rope_theta": config.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        "bos_token_id": None,
        "eos_token_id": eos_id,
    }
    _, read = parse_config("config.json", content, config.dtype)
    different = [f"{name} = {ours!r}" for name, (ours, _) in differing_fields(config, read, but=DECODING).items()]
    if different:
        raise ValueError(
            f"{content['architectures'][0]} has no counterpart of {', '.join(different)}: train the model with "
            "rotary positions and without n-gram tables (configs/python_pair.py:llama_target, llama_draft)"
        )
    return content


def _shards(sizes: dict[str, int]) -> list[list[str]]:
    """Returns the names of the parameters of each file, given the bytes of each parameter."""
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(map(sizes.get, shards[-1])) + size > SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)
    return shards
