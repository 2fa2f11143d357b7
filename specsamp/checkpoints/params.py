"""Checks that a tree of parameters is the one that a model wants, and tells its values from others."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MOST_SHOWN = 6


class WrongShapes(ValueError):
    """Raised with both shapes of the first leaves that differ."""


def check_shapes(what: str, have: Any, want: Any) -> None:
    """Raises `WrongShapes` unless both trees have leaves of the same names and shapes.

    Args:
      what: begins the message, such as the path of what was read.
      have, want: trees of anything with a shape.
    """
    have, want = _shapes(have), _shapes(want)
    different = [
        f"{name}: {have.get(name, 'absent')} there, {want.get(name, 'absent')} wanted"
        for name in sorted(have.keys() | want.keys())
        if have.get(name) != want.get(name)
    ]
    if different:
        more = f" and {len(different) - MOST_SHOWN} more" if len(different) > MOST_SHOWN else ""
        raise WrongShapes(f"{what} is of another model: {'; '.join(different[:MOST_SHOWN])}{more}")


def digest(params: Any) -> str:
    """Returns 16 hexadecimal digits that parameters of other values do not share.

    They are of the sum of the bits of each array, read as unsigned integers: a sum that is the same on every mesh, and
    that rows of padding, which are zero, do not change. The arrays are read once, on their devices.
    """
    sums = jax.jit(lambda leaves: [_sum_of_bits(leaf) for leaf in leaves])
    leaves = jax.tree.leaves(params)
    return hashlib.sha256(np.array(sums(leaves), np.uint32).tobytes()).hexdigest()[:16]


def _sum_of_bits(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return jnp.sum(x, dtype=jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}"))
    return jnp.sum(bits, dtype=jnp.uint32)


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every leaf by its path, such as ``layer_0/mlp/up``; trees need not be dictionaries."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in leaves}
