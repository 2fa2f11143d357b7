"""Log-probabilities of all tokens of a text, and of the likeliest tokens at each position, under
the target alone.

A request that needs more than the log-probabilities of its own tokens is read once more after its
end, in chunks between steps. So the loop keeps no distributions, and other requests have no cost.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.decoding.engine import Engine, to_host

Array = jax.Array

MOST_TOPS = 20


@dataclasses.dataclass(frozen=True)
class Scores:
    """Holds, for each token after the first, its log-probability at temperature 1 and the likeliest
    tokens in its place.
    """

    log_probs: list[float]
    tops: list[list[tuple[int, float]]]


def score(engine: Engine, tokens: Sequence[int], chunk: int) -> Iterator[Scores | None]:
    """Reads a text, a chunk in each step; yields None, and at last the scores.

    Args:
      engine: has a chunk more slots than there are tokens.
    """
    target, rows, count = engine.loop.target, engine.pair.shards.count, len(tokens) - 1
    padded = np.zeros(engine.slots + 1, np.int32)
    padded[: len(tokens)] = tokens
    cache, found = _init_cache(target, rows, engine.slots), []
    for start in range(0, count, chunk):
        here = padded[start : start + chunk + 1]
        tokens_BT, next_BT = (
            np.broadcast_to(part, (rows, chunk)) for part in (here[:-1], here[1:])
        )
        start_B = np.full(rows, start, np.int32)
        cache, *scored = _score(target, engine.weights.target, tokens_BT, next_BT, start_B, cache)
        found.append([part[0] for part in to_host(tuple(scored))])
        if start + chunk < count:
            yield None
    log_probs_T, ids_TN, values_TN = (np.concatenate(parts)[:count] for parts in zip(*found))
    tops = [list(zip(*at)) for at in zip(ids_TN.tolist(), values_TN.tolist())]
    yield Scores(log_probs_T.tolist(), tops)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _init_cache(target: Any, rows: int, slots: int) -> Any:
    return target.init_cache(rows, slots)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=5)
def _score(
    target: Any, weights: Any, tokens_BT: Array, next_BT: Array, start_B: Array, cache: Any
) -> tuple[Any, Array, Array, Array]:
    is_kept = target.with_lengths(start_B + tokens_BT.shape[1] + 1)
    output = target(weights, tokens_BT, start_B, cache, **is_kept)
    log_probs_BTV = jax.nn.log_softmax(output.logits_BTV.astype(jnp.float32), axis=-1)
    chosen_BT = jnp.take_along_axis(log_probs_BTV, next_BT[..., None], axis=-1)[..., 0]
    values_BTN, ids_BTN = jax.lax.top_k(log_probs_BTV, min(MOST_TOPS, target.vocab_size))
    return output.cache, chosen_BT, ids_BTN, values_BTN
