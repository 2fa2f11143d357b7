"""Rows of a batch, taken out of it and put into it between runs of the loop.

Every leaf of a `DecodeState` leads with the rows and a row knows nothing of its neighbours, so a row goes on in
another batch, or in another place, exactly as it would have: its noise has its own address, and stale slots harm
nothing. On a mesh each data shard handles its own rows, so that no cache travels between shards.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.decoding.data_shards import BY_ROWS, DataShards
from specsamp.decoding.state import DecodeState, Finish, RequestBatch

Array = jax.Array

NOWHERE = -1


def insert(state: DecodeState, rows: DecodeState, at: Sequence[int], shards: DataShards = DataShards()) -> DecodeState:
    """Writes ``rows`` over the rows ``at`` of ``state``, which is donated except for its request.

    Args:
      state: of a loop, between two runs.
      rows: of the same loop, N rows; they may have fewer slots than ``state``.
      at: N different places within a data shard: the first N / shards of them in the first shard, and so on; `NOWHERE`
        for a row that is left out.

    Raises:
      ValueError: a place that does not exist or occurs twice, another number of rows, or rows with more slots.
    """
    at_N = _places(at, len(state.lengths_B), shards)
    if len(rows.lengths_B) != len(at_N):
        raise ValueError(f"{len(rows.lengths_B)} rows for {len(at_N)} places: give each row a place")
    if rows.tokens_BS.shape[1] > state.tokens_BS.shape[1]:
        raise ValueError(
            f"rows with {rows.tokens_BS.shape[1]} slots do not fit a state of {state.tokens_BS.shape[1]}: prefill them "
            "with as many slots at most"
        )
    request = _write(state.request, fit_request(rows.request, state.request), at_N, shards)
    state, rows = (dataclasses.replace(each, request=None) for each in (state, rows))
    return dataclasses.replace(_write_donated(state, rows, at_N, shards), request=request)


def extract(state: DecodeState, at: Sequence[int], shards: DataShards = DataShards()) -> DecodeState:
    """Returns the rows ``at`` of ``state`` as a new state, for example to preempt them and insert them later.

    Raises:
      ValueError: a place that does not exist or occurs twice.
    """
    return _read(state, _places(at, len(state.lengths_B), shards), shards)


def end(state: DecodeState, is_ended_B: Array) -> DecodeState:
    """Ends the rows of ``is_ended_B`` that are still running, as if they had met a stop token."""
    return dataclasses.replace(state, finish_B=_end(state.finish_B, is_ended_B))


@jax.jit
def _end(finish_B: Array, is_ended_B: Array) -> Array:
    return jnp.where(is_ended_B & (finish_B == Finish.RUNNING), Finish.STOP, finish_B).astype(jnp.int32)


def fit_request(new: RequestBatch, old: RequestBatch) -> RequestBatch:
    """Returns ``new`` with as many columns of stop ids as ``old``, whose columns it overwrites.

    Raises:
      ValueError: it has more of them, or other warps.
    """
    missing = old.stop_ids_BN.shape[1] - new.stop_ids_BN.shape[1]
    if missing < 0:
        raise ValueError(
            f"rows with {new.stop_ids_BN.shape[1]} stop ids do not fit a state of {old.stop_ids_BN.shape[1]}: make the "
            "state's request with as many"
        )
    if missing:
        stop_ids_BN = jnp.pad(new.stop_ids_BN, ((0, 0), (0, missing)), constant_values=-1)
        new = dataclasses.replace(new, stop_ids_BN=stop_ids_BN)
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise ValueError("rows with other warps do not fit this state: chain the same warps, with numbers of their own")
    return new


def _places(at: Sequence[int], batch: int, shards: DataShards) -> Array:
    """Returns ``at`` as int32 ``[N]``, checked."""
    per_shard = batch // shards.count
    if np.asarray(at).size and np.asarray(at).dtype.kind not in "iu":
        raise ValueError(f"rows must be integers; got {at!r}")
    places = np.asarray(at, np.int32)
    if places.ndim != 1 or not len(places) or len(places) % shards.count:
        raise ValueError(
            f"give at least one row per data shard, the same number for each of {shards.count}; got {at!r}"
        )
    if (places < NOWHERE).any() or (places >= per_shard).any():
        raise ValueError(f"rows must lie in [0, {per_shard}), counted within a data shard; got {at!r}")
    groups = [group[group != NOWHERE].tolist() for group in places.reshape(shards.count, -1)]
    if any(len(set(group)) < len(group) for group in groups):
        raise ValueError(f"a row occurs twice in {at!r}")
    return jnp.asarray(places)


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


@functools.partial(jax.jit, static_argnames="shards")
def _read(state: DecodeState, at_N: Array, shards: DataShards) -> DecodeState:
    def read_rows(state: DecodeState, at_N: Array) -> DecodeState:
        def read(leaf: Array) -> Array:
            rows = [jax.lax.dynamic_slice_in_dim(leaf, at_N[n], 1, axis=0) for n in range(len(at_N))]
            return jnp.concatenate(rows)

        return jax.tree.map(read, state)

    return shards.map(read_rows, (BY_ROWS, BY_ROWS))(state, at_N)
