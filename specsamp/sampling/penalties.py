"""Warps that depend on earlier tokens (penalties for repetition), and biases of single tokens.

    sampling = chain(penalties(repetition=1.2, frequency=0.3), ban([13]), temperature(0.8))

The state includes drafted tokens, for the target and for the draft, so decoding stays exact under
every rule. Chain these warps before a temperature, as other libraries do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.sampling.warp import Warp, checked, per_row, register_warp

Array = jax.Array

# Biases are padded to a multiple of this, so that their number seldom causes a compilation.
BIASES_MULTIPLE = 4
NO_TOKEN = -1
# Of numbers and factors: products of larger ones, over a small temperature, would be infinite.
MOST = 1e20
MOST_TIMES = 1e10


def penalties(
    repetition: float | Sequence[float] = 1.0,
    presence: float | Sequence[float] = 0.0,
    frequency: float | Sequence[float] = 0.0,
) -> Penalties:
    """Lowers the logits of tokens that occurred before; each number is a scalar or has one value
    per row.

    Args:
      repetition: from 1e-10 to 1e10, divides positive and multiplies negative logits of tokens
        that occur in the prompt or the completion (CTRL, arXiv 1909.05858, section 4.1, in the form
        that libraries use); 1 is off.
      presence: from -1e20 to 1e20, subtracted once from the logits of tokens that occur in the
        completion.
      frequency: from -1e20 to 1e20, subtracted once for every occurrence of a token in the
        completion.
    """
    return Penalties(
        _within("repetition", repetition, 1 / MOST_TIMES, MOST_TIMES),
        _within("presence", presence, -MOST, MOST),
        _within("frequency", frequency, -MOST, MOST),
    )


def _within(name: str, value: float | Sequence[float], low: float, high: float) -> Any:
    lies = f"must lie in [{low:.3g}, {high:.3g}]"
    return checked(name, value, np.float32, lambda v: (v >= low) & (v <= high), lies)


def bias(
    values: Mapping[int, float], *, until: int | Sequence[int] | None = None, room: int = 1
) -> Bias:
    """Adds a number to the logits of single tokens; ``-inf`` excludes a token.

    Args:
      values: the numbers, at most 1e20, by token id.
      until: the length of the text (>= 0 tokens) from which the biases are off, a scalar or one per
        row; None: never.
      room: the minimum size of the warp's arrays; warps with the same room share compiled programs.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"biases must be a mapping from token ids to numbers; got {values!r}")
    tokens = [
        checked("a biased token", token, np.int32, lambda v: v >= 0, "must be an id >= 0")
        for token in values
    ]
    numbers = [
        checked("a bias", x, np.float32, lambda v: v <= MOST, "must be at most 1e20")
        for x in values.values()
    ]
    places = -(-max(len(values), room) // BIASES_MULTIPLE) * BIASES_MULTIPLE
    tokens += [np.int32(NO_TOKEN)] * (places - len(tokens))
    numbers += [np.float32(0)] * (places - len(numbers))
    if until is not None:
        until = checked("until", until, np.int32, lambda v: v >= 0, "must be an integer >= 0")
    tokens_BN, numbers_BN = (
        np.atleast_2d(np.stack(np.broadcast_arrays(*columns), axis=-1))
        for columns in (tokens, numbers)
    )
    return Bias(tokens_BN, numbers_BN, until)


def ban(tokens: Sequence[int]) -> Bias:
    """Excludes tokens. A row without any other token ends as invalid."""
    if not isinstance(tokens, Iterable) or not all(isinstance(token, Hashable) for token in tokens):
        raise ValueError(f"banned tokens must be a list of ids; got {tokens!r}")
    return bias({token: -np.inf for token in tokens})


@register_warp
class Penalties(Warp):
    """Penalises tokens by their occurrences; see `penalties`.

    The state is whether a token occurs in the prompt, bool ``[B, V]``, and how often in the text,
    int32 ``[B, V]``. Tokens are not counted if the numbers of all rows are neutral.
    """

    repetition: Array  # [] or [B]
    presence: Array
    frequency: Array

    def _if_wanted(self, change: Callable[[Any], Any], value: Any) -> Any:
        is_wanted = (self.repetition != 1) | (self.presence != 0) | (self.frequency != 0)
        return jax.lax.cond(jnp.any(is_wanted), change, lambda same: same, value)

    def init(self, tokens_BP: Array, lengths_B: Array, vocab_size: int) -> Any:
        is_prompt_BP = jnp.arange(tokens_BP.shape[1])[None] < lengths_B[:, None]
        empty_BV = jnp.zeros((len(tokens_BP), vocab_size), bool)
        in_prompt_BV = self._if_wanted(
            lambda no_BV: no_BV.at[_rows(tokens_BP), tokens_BP].max(is_prompt_BP), empty_BV
        )
        return in_prompt_BV, empty_BV.astype(jnp.int32)

    def advance(self, state: Any, tokens_B: Array) -> Any:
        in_prompt_BV, counts_BV = state
        return in_prompt_BV, self._if_wanted(
            lambda counts_BV: counts_BV.at[_rows(tokens_B), tokens_B].add(1), counts_BV
        )

    def __call__(self, logits: Array, state: Any = ()) -> Array:
        in_prompt_BV, counts_BV = state

        def penalised(logits: Array) -> Array:
            repetition = per_row(self.repetition, logits)
            scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
            logits = jnp.where(in_prompt_BV | (counts_BV > 0), scaled, logits)
            logits = logits - jnp.where(counts_BV > 0, per_row(self.presence, logits), 0)
            return logits - per_row(self.frequency, logits) * counts_BV

        return self._if_wanted(penalised, logits)


@register_warp
class Bias(Warp):
    """Adds numbers to the logits of single tokens; see `bias`. With ``until``, the state is the
    length of the text, ``[B]``.
    """

    tokens: Array  # [1, N] or [B, N] int32; NO_TOKEN: nothing is changed
    values: Array  # of the same shape
    until: Array | None = None  # [] or [B] int32

    @property
    def may_exclude_all(self) -> bool:
        return True  # after greedy(), or of a whole vocabulary

    def check(self, vocab_size: int) -> None:
        if np.any(self.tokens >= vocab_size):
            raise ValueError(
                f"a biased token must be an id below {vocab_size}; got {int(np.max(self.tokens))}"
            )

    def init(self, tokens_BP: Array, lengths_B: Array, vocab_size: int) -> Any:
        return () if self.until is None else jnp.zeros_like(lengths_B)

    def advance(self, state: Any, tokens_B: Array) -> Any:
        return () if self.until is None else state + 1

    def __call__(self, logits: Array, state: Any = ()) -> Array:
        batch, vocab_size = len(logits), logits.shape[-1]

        def biased() -> Array:
            # Beyond the vocabulary: dropped.
            at_BN = jnp.where(self.tokens == NO_TOKEN, vocab_size, self.tokens)
            at_BN = jnp.broadcast_to(at_BN, (batch, at_BN.shape[-1]))
            by_BV = jnp.zeros((batch, vocab_size), logits.dtype)
            by_BV = by_BV.at[_rows(at_BN), at_BN].add(self.values.astype(logits.dtype), mode="drop")
            if self.until is not None:
                by_BV = jnp.where(per_row(state < self.until, by_BV), by_BV, 0)
            return logits + by_BV.reshape(batch, *[1] * (logits.ndim - 2), vocab_size)

        return jax.lax.cond(jnp.any(self.tokens != NO_TOKEN), biased, lambda: logits)


@register_warp
class Yielding(Warp):
    """Applies a warp, except in rows where it would exclude the last tokens that there are."""

    warp: Warp

    @property
    def may_exclude_all(self) -> bool:
        return False

    def check(self, vocab_size: int) -> None:
        self.warp.check(vocab_size)

    def init(self, tokens_BP: Array, lengths_B: Array, vocab_size: int) -> Any:
        return self.warp.init(tokens_BP, lengths_B, vocab_size)

    def advance(self, state: Any, tokens_B: Array) -> Any:
        return self.warp.advance(state, tokens_B)

    def __call__(self, logits: Array, state: Any = ()) -> Array:
        warped = self.warp(logits, state)
        return jnp.where(jnp.any(warped > -jnp.inf, axis=-1, keepdims=True), warped, logits)


def _rows(tokens: Array) -> Array:
    return jnp.arange(len(tokens)).reshape((-1,) + (1,) * (tokens.ndim - 1))
