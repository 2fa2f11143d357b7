"""Inserts, extracts and ends rows of a batch between runs of the loop.

The leading axis of every leaf of a `DecodeState` is the batch, and rows are independent. So a row
continues in another batch with the same tokens: the addresses of its random numbers do not change,
and stale slots are masked. On a mesh, each data shard handles its own rows, so that no cache
travels between shards.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.decoding.data_shards import BY_ROWS, DataShards
from specsamp.decoding.state import DecodeState, Finish, Kept

Array = jax.Array

NOWHERE = -1


def insert(
    state: DecodeState, rows: DecodeState, at: Sequence[int], shards: DataShards = DataShards()
) -> DecodeState:
    """Writes ``rows`` over the rows ``at`` of ``state``, which is donated except for its request.

    Args:
      state: of a loop, between two runs.
      rows: N rows of the same loop and the same kinds of warps; slots beyond those of ``state`` are
        left out.
      at: N different row indices within a data shard: the first N / shards indices for the first
        shard, and so on; `NOWHERE` for a row that is left out.

    Raises:
      ValueError: there is no such row, or two rows would be written over one.
    """
    per_shard, width = (len(rows_B) // shards.count for rows_B in (state.lengths_B, at))
    for shard in range(shards.count):
        taken = [index for index in at[shard * width : (shard + 1) * width] if index != NOWHERE]
        if len(set(taken)) < len(taken) or any(not 0 <= index < per_shard for index in taken):
            raise ValueError(
                f"rows {taken} of a data shard must be different, from 0 to {per_shard - 1}"
            )
    at_N = jnp.asarray(at, jnp.int32)
    request = _write(state.request, rows.request, at_N, shards)
    state, rows = (dataclasses.replace(each, request=None) for each in (state, rows))
    return dataclasses.replace(_write_donated(state, rows, at_N, shards), request=request)


@jax.jit
def end(finish_B: Array, is_ended_B: Array) -> Array:
    """Returns ``finish_B`` with `Finish.STOP` in the running rows of ``is_ended_B``."""
    return jnp.where(is_ended_B & (finish_B == Finish.RUNNING), Finish.STOP, finish_B).astype(
        jnp.int32
    )


def _write_rows(tree: Any, rows: Any, at_N: Array) -> Any:
    def write(old, new):
        if isinstance(old, Kept):
            return old
        for n in range(len(at_N)):
            row = new[n : n + 1][tuple(map(slice, old.shape))]
            start = (jnp.maximum(at_N[n], 0),) + (jnp.zeros((), at_N.dtype),) * (old.ndim - 1)
            row = jnp.where(at_N[n] == NOWHERE, jax.lax.dynamic_slice(old, start, row.shape), row)
            old = jax.lax.dynamic_update_slice(old, row, start)
        return old

    return jax.tree.map(write, tree, rows, is_leaf=lambda part: isinstance(part, Kept))


@functools.partial(jax.jit, static_argnames="shards")
def _write(tree: Any, rows: Any, at_N: Array, shards: DataShards) -> Any:
    return shards.map(_write_rows, (BY_ROWS, BY_ROWS, BY_ROWS))(tree, rows, at_N)


_write_donated = jax.jit(_write.__wrapped__, static_argnames="shards", donate_argnames="tree")


@functools.partial(jax.jit, static_argnames="shards")
def extract(state: DecodeState, at_N: Array, shards: DataShards) -> DecodeState:
    """Returns the rows ``at_N`` of ``state`` as a new state, for example to insert them later."""
    return shards.map(_take_rows, (BY_ROWS, BY_ROWS))(state, at_N)


def _take_rows(state: DecodeState, at_N: Array) -> DecodeState:
    def take(leaf):
        return jnp.concatenate(
            [jax.lax.dynamic_slice_in_dim(leaf, at_N[n], 1, axis=0) for n in range(len(at_N))]
        )

    return jax.tree.map(take, state)


@functools.partial(jax.jit, static_argnames=("shapes", "shards"))
def resize(
    state: DecodeState, at_N: Array, shapes: tuple[tuple[int, ...], ...], shards: DataShards
) -> DecodeState:
    """Returns a state of another size with some rows of ``state``.

    Args:
      at_N: for each new row, in order of the data shards, its index within its shard of ``state``;
        `NOWHERE`: an ended row.
      shapes: of the new state's leaves, without the batch axis. Added slots are empty, and slots
        beyond the new size are lost.
    """

    def fit(leaf, shape):
        padding = [(0, 0, 0)] + [(0, new - old, 0) for old, new in zip(leaf.shape[1:], shape)]
        if all(high == 0 for _, high, _ in padding):
            return leaf
        return jax.lax.pad(leaf, jnp.zeros((), leaf.dtype), padding)

    def read(state, at_N):
        taken = _take_rows(state, jnp.maximum(at_N, 0))
        leaves, structure = jax.tree.flatten(taken)
        taken = jax.tree.unflatten(
            structure, [fit(leaf, shape) for leaf, shape in zip(leaves, shapes, strict=True)]
        )
        finish_B = jnp.where(at_N == NOWHERE, Finish.LENGTH, taken.finish_B).astype(jnp.int32)
        return dataclasses.replace(taken, finish_B=finish_B)

    return shards.map(read, (BY_ROWS, BY_ROWS))(state, at_N)
