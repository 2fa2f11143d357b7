"""Reads the shapes of a configuration's models, without their weights."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from launch.lib.fields import ExperimentConfig, make_model
from specsamp import EarlyExitDrafter, TransformerLM, storage
from specsamp.checkpoints.architectures import FAMILIES, parse_config
from specsamp.checkpoints.hub import ASSETS
from specsamp.checkpoints.public_heads import open_head
from specsamp.checkpoints.published import CONFIGS, published_head
from specsamp.checkpoints.trained_pair import HEADS
from specsamp.models import config as models
from specsamp.models.eagle import Eagle3Config
from specsamp.models.heads import HeadConfig

EAGLE3_VOCABULARY = 32_000
# Fields of the layer of an EAGLE-3 head that are the target's.
SHARED = "vocab_size width num_heads num_kv_heads head_size feedforward_width max_positions "
SHARED += "rotary_base rotary_scaling dtype weight_dtype cache_dtype"


def eagle3_of(target: models.TransformerConfig) -> Eagle3Config:
    """Returns the shape of the published EAGLE-3 heads: a layer of the family of Llama with the
    sizes of the target, and its 32,000 most frequent tokens.
    """
    layer = models.TransformerConfig(
        **{name: getattr(target, name) for name in SHARED.split()},
        num_layers=1,
        positions="rotary",
        gated=True,
        activation="silu",
        tied=False,
    )
    return Eagle3Config(
        layer=layer,
        target_layers=target.num_layers,
        hidden_layers=Eagle3Config.usual_layers(target.num_layers),
        draft_vocab_size=min(EAGLE3_VOCABULARY, target.vocab_size),
        own_output=True,
    )


def head_of(config: ExperimentConfig, target: models.TransformerConfig) -> HeadConfig:
    """Returns the shape of a head in a folder or in the package, of a published head or module, or
    of an EAGLE-3 head.
    """
    target = dataclasses.replace(target, **config.int8.sides.of("draft"))
    name = config.hugging_face.draft if config.hugging_face else ""
    folders = (pathlib.Path(name).expanduser(), ASSETS / name) if name else ()
    if any((folder / "config.json").is_file() for folder in folders):
        return open_head(name, target, dtype=target.dtype).config
    return published_head(name, target) or eagle3_of(target)


def known_models(config: ExperimentConfig) -> dict[str, TransformerLM]:
    """Returns the models whose shapes need no reading of weights: none for a pair in a
    folder.
    """
    int8 = config.int8.sides
    if config.hugging_face is None:
        fields = {"target": config.target, "draft": config.draft}
        return {
            side: make_model(shape, **int8.of(side))
            for side, shape in fields.items()
            if shape is not None
        }
    models, kind = {}, config.word.draft
    for side in ("target",) if kind in HEADS else ("target", "draft"):
        name = getattr(config.hugging_face, side)
        path = pathlib.Path(name, "config.json").expanduser()
        content = storage.read_json(path) if name and path.is_file() else CONFIGS.get(name)
        if content is not None and (kind or is_model(content)):
            shape = parse_config(name, content, config.hugging_face.dtype)[1]
            models[side] = TransformerLM(dataclasses.replace(shape, **int8.of(side)))
    return models


def is_model(content: Mapping[str, Any]) -> bool:
    """Returns whether a config.json describes a language model, not a head."""
    return any(str(name) in FAMILIES for name in content.get("architectures") or ())


def target_and_draft(config: ExperimentConfig) -> tuple[TransformerLM, TransformerLM | None]:
    """Returns the shapes of both models; the draft is the target's first layers for an early exit,
    None for a head.
    """
    word, known = config.word, known_models(config)
    for side in ("target", "draft") if word.draft == "model" else ("target",):
        if side not in known:
            name = getattr(config.hugging_face, side, "")
            raise ValueError(
                f"--config does not say the shape of the {side} {name}: take "
                "configs/chinchilla.py, a folder with a config.json, or one of "
                f"{', '.join(CONFIGS)}"
            )
    if word.inside:
        return known["target"], EarlyExitDrafter(known["target"], config.exit_layer, K=1).exit_model
    names = config.hugging_face
    if "draft" in known and names is not None and not names.other_vocabulary:
        # Embeddings are padded to the size of both, as where their weights are read.
        rows = max(model.vocab_size for model in known.values())
        known = {
            side: dataclasses.replace(
                model, config=dataclasses.replace(model.config, vocab_size=rows)
            )
            for side, model in known.items()
        }
    return known["target"], known.get("draft")
