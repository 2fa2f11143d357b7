"""Stores weights as int8, with one scale per output channel.

    stored = round(weight / scale),   scale = max |weight| of the channel / 127

Only storage is quantised: ``stored * scale`` is loaded, in float32, and everything that is measured of a stored model
is measured of that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

# The axes that a product sums over, by the name of the parameter; the others are output channels. A parameter that is
# not here stays float32.
SUMMED_AXES = {
    "ngrams_2": (1,),
    "ngrams_3": (1,),
    "ngrams_4": (1,),
    "ngrams_5": (1,),  # [R, D]: every row
    "embedding": (1,),  # [V, D]: a logit is one channel
    "query": (1,),
    "key": (1,),
    "value": (1,),
    "relative": (1,),  # [N, D, H]
    "output": (0, 1),  # [N, H, D]
    "output_embedding": (1,),  # [V, D]
    "up": (0,),
    "gate": (0,),  # [D, F]
    "down": (0,),  # [F, D]
}
SCALE_SUFFIX = ".scale_of_int8"


def quantise(params: Any) -> dict[str, np.ndarray]:
    """Returns the arrays of a tree of parameters by path, such as ``layer_0/mlp/up``, with the scales of int8 ones."""
    tensors = {}
    for name, value in flatten_dict(params, sep="/").items():
        value = np.asarray(value, np.float32)
        axes = SUMMED_AXES.get(name.split("/")[-1])
        if axes is None:
            tensors[name] = value
            continue
        scale = np.abs(value).max(axis=axes, keepdims=True) / 127
        scale = np.where(scale > 0, scale, 1).astype(np.float32)
        tensors[name] = np.clip(np.rint(value / scale), -127, 127).astype(np.int8)
        tensors[name + SCALE_SUFFIX] = scale
    return tensors


def dequantise(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays that `quantise` stored, in float32 and without the scales.

    Raises:
      ValueError: an int8 array comes without its scales.
    """
    for name, value in tensors.items():
        if value.dtype == np.int8 and name + SCALE_SUFFIX not in tensors:
            raise ValueError(f"{name} has no scales")
    return {
        name: np.asarray(value, np.float32) * tensors.get(name + SCALE_SUFFIX, np.float32(1))
        for name, value in tensors.items()
        if not name.endswith(SCALE_SUFFIX)
    }
