"""Says where the arrays of a kernel lie."""

from __future__ import annotations

import jax
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # entries of the last axis that a TPU keeps together


def in_hbm(x: jax.Array, *, interpret: bool) -> jax.Array:
    """Keeps the compiler from fetching all of a cache on chip before the kernel fetches what it needs."""
    return x if interpret else pltpu.with_memory_space_constraint(x, pltpu.HBM)
