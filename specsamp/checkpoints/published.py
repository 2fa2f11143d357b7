"""The ``config.json`` of public models, as their authors published them (published.json).

Plans and compile reports of these models need no download. A checkpoint that is read has a file of its own. Tests
compare the numbers of parameters with the published ones.
"""

from __future__ import annotations

import pathlib

from specsamp import storage
from specsamp.checkpoints.architectures import parse_config
from specsamp.models.config import TransformerConfig

CONFIGS = storage.read_json(pathlib.Path(__file__).with_suffix(".json"))


def published_config(name: str, dtype: str = "bfloat16") -> TransformerConfig:
    """Returns the shape of one of `CONFIGS`; raises KeyError for another name."""
    return parse_config(name, CONFIGS[name], dtype)[1]
