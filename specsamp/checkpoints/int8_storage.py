"""Stores weights as int8, with one scale per output channel (`specsamp.models.int8`).

What is loaded is ``stored * scale`` in float32, or the int8 weights themselves for a model that decodes with them; what
is measured of a stored model is measured of that, which is the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from specsamp.models import int8

SCALE_SUFFIX = ".scale_of_int8"


def quantise(params: Any) -> dict[str, np.ndarray]:
    """Returns the arrays of a tree of parameters by path, such as ``layer_0/mlp/up``, with the scales of int8 ones."""
    tensors = {}
    for name, value in flatten_dict(params, sep="/").items():
        value, axes = np.asarray(value, np.float32), int8.summed_axes(name)
        if axes is None:
            tensors[name] = value
            continue
        stored = int8.quantise(value, axes)
        tensors[name], tensors[name + SCALE_SUFFIX] = stored.values, stored.scale
    return tensors


def dequantise(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays that `quantise` stored, in float32 and without the scales.

    Raises:
      ValueError: an int8 array comes without its scales.
    """
    return {
        name: int8.dequantise(value) if int8.is_int8(value) else np.asarray(value, np.float32)
        for name, value in _with_scales(tensors).items()
    }


def int8_weights(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray | int8.Int8Weight]:
    """Returns the arrays that `quantise` stored as a model with int8 weights has them.

    Raises:
      ValueError: see `dequantise`.
    """
    return {
        name: int8.dequantise(value) if int8.is_int8(value) and not int8.is_stored_in_int8(name) else value
        for name, value in _with_scales(tensors).items()
    }


def _with_scales(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray | int8.Int8Weight]:
    for name, value in tensors.items():
        if value.dtype == np.int8 and name + SCALE_SUFFIX not in tensors:
            raise ValueError(f"{name} has no scales")
    return {
        name: int8.Int8Weight(value, tensors[name + SCALE_SUFFIX]) if value.dtype == np.int8 else value
        for name, value in tensors.items()
        if not name.endswith(SCALE_SUFFIX)
    }
