"""Operations on one axis of an array."""

import jax
import jax.numpy as jnp


def pad_axis(
    x: jax.Array, after: int, axis: int = -1, *, before: int = 0, value: float = 0
) -> jax.Array:
    """Returns ``x`` with more entries of ``value`` behind and before those of one axis."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (before, after)
    return jnp.pad(x, widths, constant_values=value)
