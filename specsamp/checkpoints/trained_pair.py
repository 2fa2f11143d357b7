"""Reads and writes pairs of models trained here, each in a folder.

    pair = load_pair("python")                  # comes with the package
    pair = load_pair("python", draft="head")    # its target, with the head that drafts inside it
    pair = load_pair("runs/my_pair")            # of launch/export.py

    pair.json             shapes of both models, and how they were trained
    target.safetensors    int8 with a scale per output channel, see int8_tensors.py
    draft.safetensors
    tokenizer.json
    prompts.json          prompts from held-out files, if there are any
    head, block           heads for this target, if there are any: launch/export.py

Pairs of public checkpoints are read by public_pair.py.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import safetensors
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file, save

from specsamp import machine, storage, validate
from specsamp.checkpoints.hub import ASSETS
from specsamp.checkpoints.int8_tensors import read_pair_tensors, write_pair_tensors
from specsamp.checkpoints.params import check_shapes, init_shapes
from specsamp.checkpoints.tokenizer import EOS, JsonTokenizer
from specsamp.decoding.pair import Pair
from specsamp.models.config import DECODING, TransformerConfig
from specsamp.models.int8 import FLOAT, SIDES, Int8
from specsamp.models.transformer import TransformerLM

HEADS = ("head", "block")  # folders of heads; the second drafts blocks


def load_pair(
    name_or_path: str | pathlib.Path,
    *,
    draft: str = "model",
    dtype: str = "float32",
    int8: Int8 = FLOAT,
) -> Pair:
    """Reads a pair, ready for `generate`.

    Args:
      name_or_path: a pair that comes with the package, or a folder that `save_pair` wrote.
      draft: the default drafter: the draft "model", the "head", or the head that drafts a "block"
        in one call.
      dtype: of decode-time weights, activations and caches.
      int8: the sides that compute in int8 instead; files always hold weights in int8.

    Raises:
      FileNotFoundError: the pair, or one of its files, is missing.
      ValueError: ``draft`` is another word; a file is damaged, or its shapes differ from pair.json
        (both are listed); or the tokenizer does not fit the models.
    """
    machine.require_devices()
    validate.choice("draft", draft, ("model", *HEADS))
    validate.instance("int8", int8, Int8, "Int8(weights=('target',))")
    folder = pair_folder(name_or_path)
    described = storage.read_json(folder / "pair.json")
    try:
        configs = {
            side: TransformerConfig(**{**described[side], "dtype": dtype, **int8.of(side)})
            for side in SIDES
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder}/pair.json does not describe a pair ({type(error).__name__}: {error})"
        ) from error
    eos = described.get("eos", EOS)
    if not isinstance(eos, str):
        raise ValueError(
            f"{folder / 'pair.json'} says eos = {eos!r}; it must be the text of the end-of-text "
            "token"
        )
    models = {side: TransformerLM.for_backend(config) for side, config in configs.items()}
    if draft in HEADS:
        # Imports Orbax, which a draft model does not need.
        from specsamp.checkpoints.public_heads import (
            open_head,
            read_head,
        )

        if not (folder / draft / "config.json").is_file():
            raise FileNotFoundError(
                f"the pair {str(name_or_path)!r} has no {draft}: {folder}/{draft}/config.json is "
                "missing"
            )
        checkpoint = open_head(folder / draft, configs["target"], dtype=dtype)
        layer = dataclasses.replace(checkpoint.config.layer, **int8.of("draft"))
        head = dataclasses.replace(checkpoint.config, layer=layer).head()
        drafting = {"head": head, "draft_params": read_head(checkpoint, head)}
    else:
        params = _load_params(folder / "draft.safetensors", models["draft"])
        drafting = {"draft": models["draft"], "draft_params": params}
    return Pair(
        target=models["target"],
        target_params=_load_params(folder / "target.safetensors", models["target"]),
        tokenizer=JsonTokenizer(folder / "tokenizer.json", eos=eos),
        **drafting,
    )


def load_prompts(name_or_path: str | pathlib.Path) -> list[str]:
    """Returns the held-out prompts that come with a pair.

    Raises:
      FileNotFoundError: the pair is missing, or has no prompts. ValueError: the file of
        prompts is damaged.
    """
    path = pair_folder(name_or_path) / "prompts.json"
    if not path.is_file():
        raise FileNotFoundError(f"the pair {str(name_or_path)!r} has no prompts: {path} is missing")
    try:
        texts = [prompt["text"] for prompt in storage.read_json(path)["prompts"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no prompts ({type(error).__name__}: {error})") from error
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{path} holds no prompts, or prompts that are not strings")
    return texts


def pair_folder(name_or_path: str | pathlib.Path) -> pathlib.Path:
    """Returns the folder of a pair, by its name or path; raises FileNotFoundError if
    there is none.
    """
    name = validate.path("a pair", name_or_path)
    for folder in (ASSETS / name, pathlib.Path(name).expanduser()):
        if (folder / "pair.json").is_file():
            return folder
    known = ", ".join(sorted(path.parent.name for path in ASSETS.glob("*/pair.json")))
    raise FileNotFoundError(
        f"no pair {name!r}: give one of {known or 'none'}, or a folder with a pair.json"
    )


def save_pair(
    folder: str | pathlib.Path,
    *,
    target: tuple[TransformerConfig, Any],
    draft: tuple[TransformerConfig, Any],
    tokenizer_json: str,
    provenance: dict,
    eos: str = EOS,
) -> None:
    """Writes a pair; ``pair.json`` is written last, since it marks a complete pair.

    Args:
      target, draft: config and parameters of each side, which are stored as int8.
      provenance: the origin of the pair, as JSON.
      eos: the text of the end-of-text token.
    """
    folder = pathlib.Path(folder)
    (folder / "pair.json").unlink(missing_ok=True)
    storage.write(folder / "tokenizer.json", tokenizer_json)
    shapes = {}
    for side, (config, params) in {"target": target, "draft": draft}.items():
        storage.write(folder / f"{side}.safetensors", save(write_pair_tensors(params)))
        shapes[side] = {k: v for k, v in dataclasses.asdict(config).items() if k not in DECODING}
    storage.write_json(folder / "pair.json", {**shapes, "eos": eos, "provenance": provenance})


def _load_params(path: pathlib.Path, model: TransformerLM) -> Any:
    """Reads the parameters of one side; raises ValueError if they are damaged or of
    another model.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        stored = load_file(path)
        tensors = read_pair_tensors(stored, in_int8=model.config.weight_dtype == "int8")
    except (safetensors.SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): download or copy it again") from error
    for name, array in stored.items():
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            raise ValueError(
                f"{path}: {name} holds numbers that are infinite or NaN: export the pair again"
            )
    check_shapes(str(path), tensors, init_shapes(model))
    return jax.tree.map(jax.numpy.asarray, unflatten_dict(tensors, sep="/"))
