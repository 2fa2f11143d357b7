"""What all kernels use: arrays in the memory of the device, and products on matrix units."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # entries of the last axis that a TPU keeps together


def in_hbm(x: jax.Array, *, interpret: bool) -> jax.Array:
    """Keeps ``x`` in the memory of the device, so that the kernel alone decides what is fetched on chip."""
    return x if interpret else pltpu.with_memory_space_constraint(x, pltpu.HBM)


def einsum_in_float32(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes ``einsum(spec, x, y)`` of one floating dtype, summed in float32.

    Products of float32 keep every bit. For bfloat16 matrix units have no higher precision, and refuse the option.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32, precision=precision)
