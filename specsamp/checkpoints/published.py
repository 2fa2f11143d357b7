"""Reads published.json: the ``config.json`` of public models, so that plans and compile reports
need no download; and published_heads.json: shapes of public heads, put together from what their
authors state, with the tensors that say which parts they have. The assistant's shape is that of
transformers' conversion script, convert_gemma4_weights.py.
"""

import pathlib

from specsamp import storage
from specsamp.checkpoints.architectures import parse_config
from specsamp.checkpoints.head_config import parse_head
from specsamp.models.config import TransformerConfig
from specsamp.models.heads import HeadConfig

CONFIGS = storage.read_json(pathlib.Path(__file__).with_suffix(".json"))
HEADS = storage.read_json(pathlib.Path(__file__).with_name("published_heads.json"))


def published_config(name: str, dtype: str = "bfloat16") -> TransformerConfig:
    """Returns the shape of a model in `CONFIGS`; raises KeyError for any other name."""
    return parse_config(name, CONFIGS[name], dtype)[1]


def published_head(name: str, target: TransformerConfig) -> HeadConfig | None:
    """Returns the shape of a head in `HEADS`, or of the module in the checkpoint of a target in
    `CONFIGS`; None for any other name.
    """
    known = HEADS.get(name, {"config": CONFIGS.get(name), "tensors": ()})
    if known["config"] is None:
        return None
    return parse_head(name, known["config"], target, target.dtype, known["tensors"])[1]
