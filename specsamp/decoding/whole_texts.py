"""Reads whole texts in one call (teacher forcing): a model's logits after each token, without decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.decoding.drafter import Drafter
from specsamp.decoding.engine import round_slots, to_host
from specsamp.decoding.pair import Pair
from specsamp.decoding.state import Weights
from specsamp.models.interface import LanguageModel

Array = jax.Array

TOGETHER = 8  # texts per call
WIDTH_MULTIPLE = 64


def read_texts(
    pair: Pair,
    drafter: Drafter,
    texts: Sequence[Sequence[int]],
    read: Callable[[Weights, int, Array, Array, list[int]], Any],
) -> list[Any]:
    """Reads texts in batches of one shape, and returns the results of each text on the host.

    Args:
      pair: has the weights of the target and of the drafter.
      drafter: its weights are read, too.
      texts: token ids.
      read: called with weights, cache slots, padded tokens ``[B, T]``, lengths ``[B]`` and the texts' indices; returns
        arrays whose first axis is B. The last batch is filled up with copies of the last text.
    """
    longest = max(map(len, texts))
    width = -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    for model in (pair.target, pair.draft):
        if model is not None and model.max_positions is not None:
            width = max(longest, min(width, model.max_positions))
    slots = round_slots(width)
    weights = pair.weights(drafter, slots)
    rows = -(-min(TOGETHER, len(texts)) // pair.shards.count) * pair.shards.count
    results = []
    for start in range(0, len(texts), rows):
        indices = [min(i, len(texts) - 1) for i in range(start, start + rows)]
        tokens_BT = np.zeros((rows, width), np.int32)
        for row, i in enumerate(indices):
            tokens_BT[row, : len(texts[i])] = texts[i]
        lengths_B = jnp.asarray([len(texts[i]) for i in indices], jnp.int32)
        found = to_host(read(weights, slots, jnp.asarray(tokens_BT), lengths_B, indices))
        results += [jax.tree.map(lambda values: values[row], found) for row in range(rows)]
    return results[: len(texts)]


def read_logits(model: LanguageModel, weights: Any, tokens_BT: Array, slots: int) -> Array:
    """Returns the model's logits after every token of whole texts, ``[B, T, V]`` float32."""
    batch = tokens_BT.shape[0]
    output = model(weights, tokens_BT, jnp.zeros((batch,), jnp.int32), model.init_cache(batch, slots))
    return output.logits_BTV.astype(jnp.float32)
