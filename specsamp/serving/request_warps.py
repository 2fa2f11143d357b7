"""The warps that a request may set: their numbers in OpenAI's protocol, and the chain that a server applies."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from specsamp.sampling.penalties import penalties
from specsamp.sampling.warp import Warp, chain, min_p, temperature, top_k, top_p

ALL_TOKENS = 2**31 - 1  # top_k that keeps every token

# The numbers of each kind of warp, with the values that change nothing. In the order in which the warps are chained;
# temperature is always there.
WARPS = {
    "penalties": {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0},
    "temperature": {"temperature": 1},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1},
    "min_p": {"min_p": 0},
}
MAKERS = {
    "penalties": penalties,
    "temperature": temperature,
    "top_k": lambda value: top_k(value if value > 0 else ALL_TOKENS),
    "top_p": top_p,
    "min_p": min_p,
}
OPTIONAL_WARPS = tuple(kind for kind in WARPS if kind != "temperature")


def make_warp(numbers: Mapping[str, float], warps: Collection[str]) -> Warp:
    """Returns the chain of temperature and the kinds ``warps``; a number that is not in ``numbers`` changes nothing."""
    kinds = [kind for kind in WARPS if kind == "temperature" or kind in warps]
    return chain(
        *(MAKERS[kind](*(numbers.get(name, neutral) for name, neutral in WARPS[kind].items())) for kind in kinds)
    )
