"""The warps that a request may set: their numbers in OpenAI's protocol, and the chain that a server
applies.
"""

import math
from collections.abc import Mapping
from typing import Any

from specsamp.decoding.text import Stops
from specsamp.sampling.penalties import bias, penalties
from specsamp.sampling.warp import Warp, chain, min_p, temperature, top_k, top_p

ALL_TOKENS = 2**31 - 1  # top_k that keeps every token
MAX_BIASES = 300

# The fields of a request, with their neutral values. A warp whose rows are all neutral skips its
# work.
NEUTRAL = {
    "logit_bias": {},
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "temperature": 1,
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
}


def make_warp(numbers: Mapping[str, Any]) -> Warp:
    """Returns the chain of all warps; a number that is not in ``numbers`` changes nothing."""
    given = NEUTRAL | numbers
    return chain(
        bias(given["logit_bias"], room=MAX_BIASES),
        penalties(
            given["repetition_penalty"], given["presence_penalty"], given["frequency_penalty"]
        ),
        temperature(given["temperature"]),
        # Other servers write -1 for all tokens, too.
        top_k(given["top_k"] if given["top_k"] > 0 else ALL_TOKENS),
        top_p(given["top_p"]),
        min_p(given["min_p"]),
    )


def exclude_early(stops: Stops, room: int) -> Warp:
    """Returns a warp that excludes the stop tokens, at most ``room``, from the first
    ``stops.least`` tokens of a text.
    """
    return bias(
        dict.fromkeys(stops.ids if stops.least else (), -math.inf), until=stops.least, room=room
    )
