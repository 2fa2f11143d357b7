"""Reads published.json: the ``config.json`` of public models, so that plans and compile reports
need no download.
"""

import pathlib

from specsamp import storage
from specsamp.checkpoints.architectures import parse_config
from specsamp.models.config import TransformerConfig

CONFIGS = storage.read_json(pathlib.Path(__file__).with_suffix(".json"))


def published_config(name: str, dtype: str = "bfloat16") -> TransformerConfig:
    """Returns the shape of a model in `CONFIGS`; raises KeyError for any other name."""
    return parse_config(name, CONFIGS[name], dtype)[1]
