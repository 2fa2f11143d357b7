"""Facts about the device that a measurement is compared with: streaming rate and memory in use."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.analysis.timing import Quartiles

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


def streaming_gb_per_s(nbytes: int, samples: int = 3) -> Quartiles:
    """Measures how fast one device multiplies a float32 matrix by a vector, in GB/s: reading weights bounds decoding.

    Args:
      nbytes: size of the matrix, at most `LARGEST`. Give what a step streams: then both fit a cache, or neither does.
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
    return Quartiles.of([iterations * matrix.nbytes / seconds(iterations) / 1e9 for _ in range(samples)])


@jax.jit
def _read(matrix: jax.Array, iterations: jax.Array | int) -> jax.Array:
    """Multiplies ``iterations`` times; each product waits for the one before, or XLA would keep only one."""

    def product(_: jax.Array, x: jax.Array) -> jax.Array:
        whole, x = jax.lax.optimization_barrier((matrix, x))
        return jnp.where((whole @ jnp.full(matrix.shape[1], x))[0] > 0, 1.0, 0.5)

    return jax.lax.fori_loop(0, iterations, product, jnp.ones((), jnp.float32))


def memory_use(weights: Any, caches: Any) -> MemoryUse:
    """Returns the bytes of these arrays, and the most that was ever in use."""
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
    """Returns the bytes on the first device; arrays that two trees share count once."""
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)}
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves.values() if leaf.addressable_shards)
