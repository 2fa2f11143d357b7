"""Small models with recurrent layers and attention."""

import functools

from specsamp.models import config

RECURRENT = config.RecurrentConfig(
    num_key_heads=1, num_value_heads=2, key_size=8, value_size=8, attention_layers=(1,)
)
hybrid = functools.partial(
    config.tiny,
    positions="rotary",
    gated=True,
    activation="silu",
    norm_offset=True,
    query_key_norm=True,
    attention_gate=True,
    head_size=8,
    rotary_size=4,
    num_kv_heads=2,
    recurrent=RECURRENT,
)
