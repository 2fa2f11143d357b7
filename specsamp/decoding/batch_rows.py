"""Rows that are written into a batch, or ended in it, between runs of the loop.

Every leaf of a `DecodeState` leads with the rows, and no row depends on another. So a row goes on in another batch as it
would have: its noise has its own address, and stale slots harm nothing. On a mesh, each data
shard handles its own rows, so that no cache travels between shards.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.decoding.data_shards import BY_ROWS, DataShards
from specsamp.decoding.state import DecodeState, Finish

Array = jax.Array

NOWHERE = -1


def insert(state: DecodeState, rows: DecodeState, at: Sequence[int], shards: DataShards = DataShards()) -> DecodeState:
    """Writes ``rows`` over the rows ``at`` of ``state``, which is donated except for its request.

    Args:
      state: of a loop, between two runs.
      rows: N rows of the same loop and the same kinds of warps; they may have fewer slots than ``state``.
      at: N different places within a data shard: the first N / shards of them in the first shard, and so on; `NOWHERE`
        for a row that is left out.
    """
    at_N = jnp.asarray(at, jnp.int32)
    request = _write(state.request, rows.request, at_N, shards)
    state, rows = (dataclasses.replace(each, request=None) for each in (state, rows))
    return dataclasses.replace(_write_donated(state, rows, at_N, shards), request=request)


@jax.jit
def end(finish_B: Array, is_ended_B: Array) -> Array:
    """Returns the reasons why rows ended, where the running rows of ``is_ended_B`` have met a stop token."""
    return jnp.where(is_ended_B & (finish_B == Finish.RUNNING), Finish.STOP, finish_B).astype(jnp.int32)


def _write_rows(tree: Any, rows: Any, at_N: Array) -> Any:
    def write(old: Array, new: Array) -> Array:
        for n in range(len(at_N)):
            row, start = new[n : n + 1], (jnp.maximum(at_N[n], 0),) + (jnp.zeros((), at_N.dtype),) * (old.ndim - 1)
            row = jnp.where(at_N[n] == NOWHERE, jax.lax.dynamic_slice(old, start, row.shape), row)
            old = jax.lax.dynamic_update_slice(old, row, start)
        return old

    return jax.tree.map(write, tree, rows)


@functools.partial(jax.jit, static_argnames="shards")
def _write(tree: Any, rows: Any, at_N: Array, shards: DataShards) -> Any:
    return shards.map(_write_rows, (BY_ROWS, BY_ROWS, BY_ROWS))(tree, rows, at_N)


_write_donated = jax.jit(_write.__wrapped__, static_argnames="shards", donate_argnames="tree")
