"""Reads the rotary positions of a config.json as fields of a `TransformerConfig`."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from specsamp import validate
from specsamp.checkpoints.fields import Fields
from specsamp.models.config import TransformerConfig
from specsamp.models.positions import RotaryScaling

ORIGINAL = "original_max_position_embeddings"  # a key
# The fields of a `RotaryScaling` by kind, and their keys in config.json.
LLAMA3 = {
    "factor": "factor",
    "original_positions": ORIGINAL,
    "low": "low_freq_factor",
    "high": "high_freq_factor",
}
YARN = LLAMA3 | {
    "low": "beta_slow",
    "high": "beta_fast",
    "amplitude": "attention_factor",
    "whole_dimensions": "truncate",
}
PROPORTIONAL = {"factor": "factor", "share": "partial_rotary_factor"}
LONGROPE = {
    "factor": "factor",
    "original_positions": ORIGINAL,
    "amplitude": "attention_factor",
    "divisors": "short_factor",
}
SCALINGS = {
    "linear": {"factor": "factor"},
    "llama3": LLAMA3,
    "yarn": YARN,
    "proportional": PROPORTIONAL,
    "longrope": LONGROPE,
}


def rope_parameters(fields: Fields) -> Mapping[str, Any]:
    """Returns the rotary parameters of a file, with the preferences of transformers.

    It prefers rope_scaling, which users add to lengthen the context, and an original length next to
    the parameters to one within them.
    """
    given = fields.object("rope_scaling") or fields.object("rope_parameters")
    original = fields(ORIGINAL, None)
    return given if original is None else {**given, ORIGINAL: original}


def rotary_fields(
    fields: Fields,
    given: Mapping[str, Any],
    usual: Mapping[str, Any],
    *,
    partial: bool = False,
    base: float = 10_000.0,
    kinds: Collection[str] = tuple(SCALINGS),
) -> dict[str, Any]:
    """Returns the fields of rotary positions.

    Args:
      given: the result of `rope_parameters`.
      usual: sizes of the model.
      partial: whether the family rotates a part of each head. Other families ignore
        partial_rotary_factor, unless positions are scaled: there transformers fails.
      base: of a file without rope_theta.
      kinds: of the scalings that the family has.
    """
    given = {key: value for key, value in given.items() if value is not None or key == "truncate"}
    if "full_attention" in given:
        raise ValueError(
            f"{fields.path} has rope_parameters for each kind of layer, which only Gemma 3 "
            "and 4, and OLMo 3, may have"
        )
    share = given.get("partial_rotary_factor", fields("partial_rotary_factor", 1.0))
    head_size = usual["head_size"] or usual["width"] // usual["num_heads"]
    scaling = _scaling(fields, given, usual["max_positions"], kinds)
    is_cut = scaling is not None and scaling.kind != "proportional"
    if share != 1 and is_cut and not partial:
        raise ValueError(
            f"{fields.path} says partial_rotary_factor = {share!r} and scales its rotary "
            "positions; this family rotates whole heads: remove one of the two"
        )
    theta = given.get("rope_theta", fields("rope_theta", base))
    turned = int(head_size * share) if partial else head_size
    rotary = dict(
        positions="rotary",
        rotary_base=validate.number(f"{fields.path}: rope_theta", theta, 0, above=True),
        rotary_size=None if turned == head_size else turned,
        rotary_scaling=scaling,
    )
    if scaling is None or scaling.kind != "longrope":
        return rotary
    if 2 * len(scaling.divisors) != turned:
        raise ValueError(
            f"{fields.path} has {len(scaling.divisors)} numbers in short_factor; it must have "
            f"{turned // 2}, half the rotated entries of a head"
        )
    # Beyond these, all keys in the cache would change.
    return rotary | {"max_positions": scaling.original_positions}


def describe_rotary(config: TransformerConfig) -> dict[str, Any]:
    """Returns the rope_parameters of a model, as `rotary_fields` reads them."""
    scaling = config.rotary_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rotary_base}
    keys = SCALINGS[scaling.kind]
    described = {key: getattr(scaling, field) for field, key in keys.items()}
    return {"rope_type": scaling.kind, "rope_theta": config.rotary_base} | described


def _scaling(
    fields: Fields, given: Mapping[str, Any], max_positions: int, kinds: Collection[str]
) -> RotaryScaling | None:
    """Returns the scaling of frequencies, or None; raises ValueError for a kind that is not
    supported.
    """
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return None
    if kind not in kinds or (kind == "yarn" and ("mscale" in given or "mscale_all_dim" in given)):
        raise ValueError(
            f"{fields.path} scales its rotary positions by {dict(given)}; supported are "
            f"{', '.join(('default', *kinds))} (scaling that depends on the length of the "
            "sequence would change keys in the cache)"
        )
    given = {ORIGINAL: max_positions} | given
    if kind == "yarn":
        factor = given.get("factor", 1)
        amplitude = 0.1 * math.log(factor) + 1 if factor > 1 else 1
        usual = dict(beta_slow=1, beta_fast=32, attention_factor=amplitude, truncate=True)
        given = usual | given
    if kind == "longrope":
        original = given[ORIGINAL]
        longer = given.get("factor", max_positions / original)
        amplitude = math.sqrt(1 + math.log(longer) / math.log(original)) if longer > 1 else 1
        given = dict(factor=longer, attention_factor=amplitude, short_factor=()) | given
    if kind == "proportional":
        given = dict(factor=1, partial_rotary_factor=1) | given
    values = {field: given.get(key) for field, key in SCALINGS[kind].items()}
    for field, value in values.items():
        if field == "whole_dimensions":
            values[field] = bool(value)  # null is false in transformers
            continue
        if field == "divisors":
            for divisor in value:
                validate.number(f"{fields.path}: short_factor", divisor, 0, above=True)
            continue
        number = validate.number(
            f"{fields.path}: {SCALINGS[kind][field]} of {kind} scaling", value, 0, above=True
        )
        values[field] = value if field == "original_positions" else number
    return RotaryScaling(kind=kind, **values)
