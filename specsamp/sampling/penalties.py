"""Warps that depend on earlier tokens (penalties for repetition), and biases of single tokens.

    sampling = chain(penalties(repetition=1.2, frequency=0.3), ban([13]), temperature(0.8))

The state includes drafted tokens, for the target and for the draft, so decoding stays exact under every rule. Chain
these warps before a temperature, as other libraries do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.sampling.warp import Chain, Warp, checked, per_row, register_warp

Array = jax.Array

BIASES_MULTIPLE = 4  # biases are padded to a multiple of this, so that their number seldom causes a compilation
NO_TOKEN = -1


def penalties(
    repetition: float | Sequence[float] = 1.0,
    presence: float | Sequence[float] = 0.0,
    frequency: float | Sequence[float] = 0.0,
) -> Penalties:
    """Lowers the logits of tokens that occurred before; each number is a scalar or has one value per row.

    Args:
      repetition: > 0, divides positive and multiplies negative logits of tokens that occur in the prompt or the
        completion (CTRL, arXiv 1909.05858, section 4.1, in the form that libraries use); 1 is off.
      presence: finite, subtracted once from the logits of tokens that occur in the completion.
      frequency: finite, subtracted once for every occurrence of a token in the completion.
    """
    limit = np.finfo(np.float32).max
    return Penalties(
        checked("repetition", repetition, np.float32, lambda v: (v > 0) & (v <= limit), "must be > 0 and finite"),
        checked("presence", presence, np.float32, lambda v: np.abs(v) <= limit, "must be finite"),
        checked("frequency", frequency, np.float32, lambda v: np.abs(v) <= limit, "must be finite"),
    )


def bias(values: Mapping[int, float]) -> Chain:
    """Adds a number to the logits of single tokens; ``-inf`` excludes a token."""
    if not isinstance(values, Mapping):
        raise ValueError(f"biases must be a mapping from token ids to numbers; got {values!r}")
    warps = []
    for token, value in values.items():
        at = checked("a biased token", token, np.int32, lambda v: v >= 0, "must be an id >= 0")
        by = checked("a bias", value, np.float32, lambda v: v < np.inf, "must be finite, or -inf")
        warps.append(Bias(at, by))
    off = Bias(np.int32(NO_TOKEN), np.float32(0))
    return Chain((*warps, *[off] * (-len(warps) % BIASES_MULTIPLE)))


def ban(tokens: Sequence[int]) -> Chain:
    """Excludes tokens. A row in which all tokens are excluded ends as invalid."""
    if not isinstance(tokens, Iterable) or not all(isinstance(token, Hashable) for token in tokens):
        raise ValueError(f"banned tokens must be a list of ids; got {tokens!r}")
    return bias({token: -np.inf for token in tokens})


@register_warp
class Penalties(Warp):
    """Its state: whether a token occurs in the prompt, bool ``[B, V]``, and how often in the text, int32 ``[B, V]``."""

    repetition: Array  # [] or [B]
    presence: Array
    frequency: Array

    def init(self, tokens_BP: Array, lengths_B: Array, vocab_size: int) -> Any:
        is_prompt_BP = jnp.arange(tokens_BP.shape[1])[None] < lengths_B[:, None]
        empty_BV = jnp.zeros((len(tokens_BP), vocab_size), bool)
        return empty_BV.at[_rows(tokens_BP), tokens_BP].max(is_prompt_BP), empty_BV.astype(jnp.int32)

    def advance(self, state: Any, tokens_B: Array) -> Any:
        in_prompt_BV, counts_BV = state
        return in_prompt_BV, counts_BV.at[_rows(tokens_B), tokens_B].add(1)

    def __call__(self, logits: Array, state: Any = ()) -> Array:
        in_prompt_BV, counts_BV = state
        repetition = per_row(self.repetition, logits)
        scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(in_prompt_BV | (counts_BV > 0), scaled, logits)
        logits = logits - jnp.where(counts_BV > 0, per_row(self.presence, logits), 0)
        return logits - per_row(self.frequency, logits) * counts_BV


@register_warp
class Bias(Warp):
    token: Array  # [] or [B] int32; NO_TOKEN: nothing is changed
    value: Array

    @property
    def may_exclude_all(self) -> bool:
        return True  # after greedy(), or of a whole vocabulary

    def check(self, vocab_size: int) -> None:
        if np.any(self.token >= vocab_size):
            raise ValueError(f"a biased token must be an id below {vocab_size}; got {int(np.max(self.token))}")

    def __call__(self, logits: Array, state: Any = ()) -> Array:
        tokens = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        return jnp.where(tokens == per_row(self.token, logits), logits + per_row(self.value, logits), logits)


def _rows(tokens: Array) -> Array:
    return jnp.arange(len(tokens)).reshape((-1,) + (1,) * (tokens.ndim - 1))
