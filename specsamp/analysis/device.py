"""What the device itself can do, beside which a measurement stands: streaming, and memory in use."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.analysis import phases
from specsamp.analysis.spread import Spread

WIDTHS = {"cpu": 8192, "gpu": 16384, "tpu": 16384}  # of a square float32 matrix that fits no cache
SECONDS = 0.05  # of a sample, at least


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes on one device."""

    weights: int  # of target and draft
    caches: int
    peak: int  # of this process so far, with what earlier cells needed
    peak_is_of: str  # "device", or "process" where the device counts nothing (a CPU)


def streaming_gb_per_s(samples: int = 3) -> Spread:
    """How fast one device reads a large matrix to multiply a vector with it: what decoding is bound by."""
    width = WIDTHS.get(jax.default_backend(), 8192)
    matrix = jax.block_until_ready(jnp.ones((width, width), jnp.float32, device=jax.local_devices()[0]))

    def seconds(iterations: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(phases.stream([matrix], iterations, rows=1))
        return time.perf_counter() - start

    seconds(1)  # compiles
    iterations = max(int(SECONDS / max(seconds(1), 1e-6)), 1)
    return Spread.of([iterations * matrix.nbytes / seconds(iterations) / 1e9 for _ in range(samples)])


def memory_use(weights: Any, caches: Any) -> MemoryUse:
    """Of arrays that are there, and the most there ever was."""
    counted = jax.local_devices()[0].memory_stats() or {}
    peak = counted.get("peak_bytes_in_use")
    kilobytes = 1 if sys.platform == "darwin" else 1024
    of_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobytes
    return MemoryUse(
        weights=_bytes(weights), caches=_bytes(caches), peak=of_process if peak is None else peak,
        peak_is_of="process" if peak is None else "device",
    )  # fmt: skip


def _bytes(tree: Any) -> int:
    """On the first device; what two trees share counts once."""
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)}
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves.values() if leaf.addressable_shards)
