"""What the device itself can do, beside which a measurement stands: streaming, and memory in use."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.analysis.spread import Spread

COLUMNS = 4096
LARGEST = 2**30  # bytes; fits no cache
SECONDS = 0.05  # of a sample, at least


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes on one device."""

    weights: int  # of target and draft
    caches: int
    peak: int  # of this process so far, with what earlier cells needed
    peak_is_of: str  # "device", or "process" where the device counts nothing (a CPU)


def streaming_gb_per_s(nbytes: int, samples: int = 3) -> Spread:
    """How fast one device reads a matrix to multiply it with a vector: what decoding is bound by.

    Args:
      nbytes: of the matrix, as many as a step streams: what fits a cache here fits it there. At most `LARGEST`.
      samples: how often it is measured.
    """
    rows = max(min(nbytes, LARGEST) // (4 * COLUMNS), 1)
    matrix = jnp.ones((rows, COLUMNS), jnp.float32, device=jax.local_devices()[0])

    def seconds(iterations: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(_read(matrix, iterations))
        return time.perf_counter() - start

    seconds(1)  # compiles
    iterations = max(int(SECONDS / max(seconds(1), 1e-6)), 1)
    return Spread.of([iterations * matrix.nbytes / seconds(iterations) / 1e9 for _ in range(samples)])


@jax.jit
def _read(matrix: jax.Array, iterations: jax.Array | int) -> jax.Array:
    """Each product waits for the one before, or the loop would hold only one."""

    def product(_: jax.Array, x: jax.Array) -> jax.Array:
        whole, x = jax.lax.optimization_barrier((matrix, x))
        return jnp.where((whole @ jnp.full(matrix.shape[1], x))[0] > 0, 1.0, 0.5)

    return jax.lax.fori_loop(0, iterations, product, jnp.ones((), jnp.float32))


def memory_use(weights: Any, caches: Any) -> MemoryUse:
    """Of arrays that are there, and the most there ever was."""
    counted = jax.local_devices()[0].memory_stats() or {}
    peak = counted.get("peak_bytes_in_use")
    kilobytes = 1 if sys.platform == "darwin" else 1024
    of_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobytes
    return MemoryUse(
        weights=_bytes(weights),
        caches=_bytes(caches),
        peak=of_process if peak is None else peak,
        peak_is_of="process" if peak is None else "device",
    )


def _bytes(tree: Any) -> int:
    """On the first device; what two trees share counts once."""
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)}
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves.values() if leaf.addressable_shards)
