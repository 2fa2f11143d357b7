"""Rows of a batch that lie in host memory until their turn comes again.

On a mesh each device copies its own part to its own host and back, so that nothing travels between data shards.
"""

from __future__ import annotations

import jax

from specsamp.decoding.data_shards import DataShards
from specsamp.decoding.state import DecodeState

HOST = "pinned_host"


def to_host_memory(rows: DecodeState, shards: DataShards) -> DecodeState:
    """Moves ``rows``, which were extracted from a batch, to host memory."""
    if shards.mesh is None:
        return jax.device_get(rows)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind(HOST)), rows)


def to_device_memory(rows: DecodeState, shards: DataShards) -> DecodeState:
    """Moves ``rows`` back to where they came from."""
    if shards.mesh is None:
        return jax.tree.map(jax.numpy.asarray, rows)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind(None)), rows)
