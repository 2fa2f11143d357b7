"""Log-probabilities of all tokens of a text, and of the likeliest tokens at each position, under the target alone.

A request that asks for more than the log-probabilities of its own tokens is read once more after its end, in chunks
between the slices of others. So the loop keeps no distributions, and nobody else pays.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.decoding.engine import Engine, to_host

Array = jax.Array

MOST_TOPS = 20


@dataclasses.dataclass(frozen=True)
class Scores:
    """Holds, for each token after the first, its log-probability at temperature 1 and the likeliest tokens in its place."""

    log_probs: list[float]
    tops: list[list[tuple[int, float]]]


@dataclasses.dataclass(frozen=True)
class ScoreCall:
    """The call that scores a chunk; see `Scoring`."""

    slots: int
    chunk: int


class Scoring:
    """A text that is being scored, a chunk at a time.

    Attributes:
      request: whose text it is, for the caller.
    """

    request: Any = None

    def __init__(self, engine: Engine, tokens: Sequence[int], chunk: int):
        """Begins to score ``tokens``; the engine has a chunk more slots than there are tokens."""
        self._engine, self._chunk, self._count = engine, chunk, len(tokens)
        self._rows = engine.pair.shards.count
        self._tokens = np.zeros(engine.slots + 1, np.int32)
        self._tokens[: len(tokens)] = tokens
        self._start, self._found = 0, []
        self._cache = _init_cache(engine.loop.target, self._rows, engine.slots)

    def step(self) -> Scores | None:
        """Reads a chunk; returns the scores after the last one."""
        here = self._tokens[self._start : self._start + self._chunk + 1]
        tokens_BT, next_BT = (np.broadcast_to(part, (self._rows, self._chunk)) for part in (here[:-1], here[1:]))
        start_B = np.full(self._rows, self._start, np.int32)
        target, weights = self._engine.loop.target, self._engine.weights.target
        self._cache, *found = _score(target, weights, tokens_BT, next_BT, start_B, self._cache)
        self._found.append([part[0] for part in to_host(tuple(found))])
        self._start += self._chunk
        if self._start < self._count - 1:
            return None
        log_probs_T, ids_TN, values_TN = (np.concatenate(parts)[: self._count - 1] for parts in zip(*self._found))
        tops = [list(zip(*at)) for at in zip(ids_TN.tolist(), values_TN.tolist())]
        return Scores(log_probs_T.tolist(), tops)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _init_cache(target: Any, rows: int, slots: int) -> Any:
    return target.init_cache(rows, slots)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=5)
def _score(
    target: Any, weights: Any, tokens_BT: Array, next_BT: Array, start_B: Array, cache: Any
) -> tuple[Any, Array, Array, Array]:
    output = target(weights, tokens_BT, start_B, cache)
    log_probs_BTV = jax.nn.log_softmax(output.logits_BTV.astype(jnp.float32), axis=-1)
    chosen_BT = jnp.take_along_axis(log_probs_BTV, next_BT[..., None], axis=-1)[..., 0]
    values_BTN, ids_BTN = jax.lax.top_k(log_probs_BTV, min(MOST_TOPS, target.vocab_size))
    return output.cache, chosen_BT, ids_BTN, values_BTN
