"""Shapes of models that a configuration names, known before any weights are read."""

from __future__ import annotations

import dataclasses
import pathlib

from ml_collections import ConfigDict

from launch.lib.config import choose
from launch.lib.drafters import word_of
from specsamp import storage
from specsamp.checkpoints.architectures import parse_config
from specsamp.checkpoints.head_config import parse_head
from specsamp.checkpoints.heads import open_head
from specsamp.checkpoints.published import CONFIGS, published_config
from specsamp.decoding.drafters import EarlyExitDrafter
from specsamp.models import config as models
from specsamp.models.eagle import Eagle3Config, default_layers
from specsamp.models.heads import HeadConfig
from specsamp.models.int8 import SIDES, Int8
from specsamp.models.transformer import TransformerLM

PRESETS = {
    preset.__name__: preset
    for preset in (models.chinchilla_70b, models.draft_4b, models.target_38m, models.draft_1m, models.tiny)
}

EAGLE3_VOCABULARY = 32_000
INT8_SIDES = {"none": (), "target": ("target",), "draft": ("draft",), "both": SIDES}


def int8_of(config: ConfigDict) -> Int8:
    """Returns what ``config.int8`` describes; raises ValueError for an unknown word."""
    fields = config.get("int8") or {}
    return Int8(**{name: choose(f"int8.{name}", word, INT8_SIDES) for name, word in fields.items()})


def make_model(fields: ConfigDict, **decoding: str | None) -> TransformerLM:
    """Returns the preset's model, with the fields that are set."""
    changes = {name: value for name, value in fields.items() if name != "preset" and value is not None} | decoding
    return TransformerLM.for_backend(choose("preset", fields.preset, PRESETS)(**changes))


def first_layers(target: TransformerLM, exit_layer: int | None) -> TransformerLM:
    """Returns the shape of what drafts in an early exit, as a model of its own.

    Raises:
      ValueError: the target has no such exit.
    """
    EarlyExitDrafter(target, exit_layer, K=1)
    windowless = tuple(layer for layer in target.config.global_layers if layer < exit_layer)
    config = dataclasses.replace(target.config, num_layers=exit_layer, global_layers=windowless)
    return dataclasses.replace(target, config=config)


def eagle3_of(target: models.TransformerConfig) -> Eagle3Config:
    """Returns the shape of an EAGLE-3 head for a target: a layer like the target's, and the 32,000 likeliest tokens.

    So are the published ones for Llama 3.1 8B; those for other targets differ a little.
    """
    layer = dataclasses.replace(target, num_layers=1, tied=False, query_key_norm=False, global_layers=(), experts=None)
    return Eagle3Config(
        layer=layer,
        target_layers=target.num_layers,
        hidden_layers=default_layers(target.num_layers),
        draft_vocab_size=min(EAGLE3_VOCABULARY, target.vocab_size),
        own_output=True,
    )


def head_of(config: ConfigDict, target: models.TransformerConfig) -> HeadConfig:
    """Returns the shape of the head that a configuration names.

    It is that of a head in a folder, of a module in the published checkpoint of its target, or else of EAGLE-3's; in int8
    as the draft is to be, whatever its target is.
    """
    target = dataclasses.replace(target, **int8_of(config).of("draft"))
    name = config.hugging_face.draft if "hugging_face" in config else ""
    if name and pathlib.Path(name, "config.json").is_file():
        return open_head(name, target, dtype=target.dtype).config
    if name in CONFIGS:
        return parse_head(name, CONFIGS[name], target, target.dtype, ())[1]
    return eagle3_of(target)


def known_models(config: ConfigDict) -> dict[str, TransformerLM]:
    """Returns the models whose shapes can be known before weights are read: none of a pair in a folder."""
    int8 = int8_of(config)
    if "hugging_face" not in config:
        return {side: make_model(config[side], **int8.of(side)) for side in SIDES if side in config}
    models = {}
    for side in ("target",) if word_of(config).draft == "head" else ("target", "draft"):
        name = config.hugging_face[side]
        if (path := pathlib.Path(name, "config.json")).is_file():
            shape = parse_config(name, storage.read_json(path), config.hugging_face.dtype)[1]
        elif name in CONFIGS:
            shape = published_config(name, config.hugging_face.dtype)
        else:
            continue
        models[side] = TransformerLM(dataclasses.replace(shape, **int8.of(side)))
    return models


def looked_up_parameters(config: models.TransformerConfig) -> int:
    """Returns how many parameters are tables of n-grams, of which a step reads a few rows."""
    return config.num_ngram_tables * config.ngram_rows * config.width
