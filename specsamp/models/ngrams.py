"""Embeddings of the last n tokens: parameters that add almost no time to a step.

A draft must be small because each of its steps reads all its weights, but a lookup reads a single
row of a table. So the embeddings of the last two, three, ... tokens are added to the embedding of a
token (over-encoding, Huang et al., arXiv 2501.16975). N-grams with the same hash share a row of the
table.
"""

import jax
import jax.numpy as jnp

from specsamp.arrays import pad_axis
from specsamp.models.config import TransformerConfig
from specsamp.models.interface import Block
from specsamp.models.slots import read_slots, write_slots
from specsamp.models.visibility import ancestor_slots

Array = jax.Array

# An odd multiplier for each place of an n-gram: the hash is a sum of products modulo 2^32.
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)


def rows_of_call(
    tokens_BT: Array,
    start_B: Array,
    memory_BS: Array | None,
    config: TransformerConfig,
    block: Block | None = None,
) -> tuple[list[Array], Array | None]:
    """Returns the rows of each table for the tokens of a call, and the memory with these tokens
    written.

    Args:
      memory_BS: ``[B, S]`` int32, the tokens of earlier calls; None: the call begins the sequence,
        and is no tree.
      block: in a tree, an n-gram is a token and its ancestors.

    Returns:
      For each order from 2 on ``[B, T]`` int32, and the memory.
    """
    before, (batch, length) = config.ngram_order - 1, tokens_BT.shape
    if memory_BS is not None:
        memory_BS = write_slots(memory_BS, tokens_BT, start_B, axis=1)
    if block is None:
        context_RX, last = _context(tokens_BT, start_B, memory_BS, before), length
    else:
        slots_BX = ancestor_slots(block, before + 1).reshape(batch, -1)
        tokens_BX = jnp.take_along_axis(memory_BS, jnp.maximum(slots_BX, 0), axis=1)
        # Each token of a tree, with its context, is a sequence of its own.
        context_RX = jnp.where(slots_BX < 0, -1, tokens_BX).reshape(-1, before + 1)
        last = 1
    rows = [
        rows_of(context_RX, order, config.ngram_rows)[:, -last:].reshape(batch, length)
        for order in range(2, config.ngram_order + 1)
    ]
    return rows, memory_BS


def rows_of(context_BX: Array, order: int, num_rows: int) -> Array:
    """Returns the table rows of all n-grams (n = ``order``) in a context, in the order of their
    last tokens.

    Args:
      context_BX: int32 tokens; -1 before the beginning of a text.

    Returns:
      ``[B, X - order + 1]`` int32 in ``[0, num_rows)``, of the n-grams that end at positions
      ``order-1 ..``.
    """
    length = context_BX.shape[1] - order + 1
    mixed = jnp.full((context_BX.shape[0], length), order, jnp.uint32)
    for place in range(order):
        token = jax.lax.slice_in_dim(context_BX, place, place + length, axis=1).astype(jnp.uint32)
        mixed = mixed + (token + 1) * jnp.uint32(_FACTORS[place])
        mixed = mixed ^ (mixed >> 15)
    return (mixed % jnp.uint32(num_rows)).astype(jnp.int32)


def _context(tokens_BT: Array, start_B: Array, memory_BS: Array | None, before: int) -> Array:
    """Returns the tokens of a call, preceded by the last ``before`` tokens, ``[B, before + T]``
    int32.

    Entries before the beginning of a sequence are -1.
    """
    if memory_BS is None:
        return pad_axis(tokens_BT, 0, before=before, value=-1)
    padded_BS = pad_axis(memory_BS, 0, before=before, value=-1)
    return read_slots(padded_BS, start_B, before + tokens_BT.shape[1], axis=1)
