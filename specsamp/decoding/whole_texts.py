"""Reads whole texts in one call, as teacher forcing does: what models say after each token, without decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.decoding.engine import round_slots
from specsamp.decoding.pair import Pair
from specsamp.models.interface import LanguageModel
from specsamp.sampling.warp import Warp, chain, first_tokens

Array = jax.Array

TOGETHER = 8  # texts per call
WIDTH_MULTIPLE = 64


def full_warp(pair: Pair, warp: Warp) -> Warp:
    """Returns ``warp`` as `generate` applies it: tokens that the tokenizer does not have are excluded."""
    return chain(warp) if pair.num_tokens is None else chain(first_tokens(pair.num_tokens), warp)


def padded_batches(pair: Pair, texts: Sequence[Sequence[int]]) -> tuple[int, list[tuple[Array, Array, list[int]]]]:
    """Returns slots, and batches of equally many texts: padded tokens, lengths, indices. The last text is repeated."""
    longest = max(map(len, texts))
    width = -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    for model in (pair.target, pair.draft):
        if model is not None and model.max_positions is not None:
            width = max(longest, min(width, model.max_positions))
    rows = -(-min(TOGETHER, len(texts)) // pair.shards.count) * pair.shards.count
    batches = []
    for start in range(0, len(texts), rows):
        indices = [min(i, len(texts) - 1) for i in range(start, start + rows)]
        tokens_BT = np.zeros((rows, width), np.int32)
        for row, i in enumerate(indices):
            tokens_BT[row, : len(texts[i])] = texts[i]
        lengths_B = jnp.asarray([len(texts[i]) for i in indices], jnp.int32)
        batches.append((jnp.asarray(tokens_BT), lengths_B, indices))
    return round_slots(width), batches


def read_logits(model: LanguageModel, weights: Any, tokens_BT: Array, slots: int) -> Array:
    """Returns the model's logits after every token of whole texts, ``[B, T, V]`` float32."""
    batch = tokens_BT.shape[0]
    output = model(weights, tokens_BT, jnp.zeros((batch,), jnp.int32), model.init_cache(batch, slots))
    return output.logits_BTV.astype(jnp.float32)
