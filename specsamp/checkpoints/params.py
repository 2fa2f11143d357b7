"""Checks the shapes of a tree of parameters, and computes a digest of its values."""

import dataclasses
import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.decoding.pair import Pair
from specsamp.models.int8 import is_int8

MOST_SHOWN = 6


class WrongShapes(ValueError):
    """Raised for trees of different shapes; the message has the first leaves that differ."""


def check_shapes(what: str, have: Any, want: Any, *, padded: bool = False) -> None:
    """Raises `WrongShapes` unless two trees have leaves of the same names and shapes.

    Args:
      what: names ``have`` in the message, such as by its path.
      have, want: trees of leaves with a shape.
      padded: ``want`` may have more rows of a matrix; leaves of only one tree are not compared.
    """
    have, want = _shapes(have), _shapes(want)

    def fits(name: str) -> bool:
        there, here = have.get(name), want.get(name)
        if padded and there and here:
            return there[0] <= here[0] and there[1:] == here[1:]
        return padded or there == here

    different = [
        f"{name}: {have.get(name, 'absent')} there, {want.get(name, 'absent')} wanted"
        for name in sorted(have.keys() | want.keys())
        if not fits(name)
    ]
    if different:
        more = f" and {len(different) - MOST_SHOWN} more" if len(different) > MOST_SHOWN else ""
        raise WrongShapes(f"{what} is of another model: {'; '.join(different[:MOST_SHOWN])}{more}")


def init_shapes(model: Any) -> Any:
    """Returns the shapes of the parameters of a model, a head or a training task."""
    return jax.eval_shape(model.init, jax.random.key(0))


def check_finite(what: str, leaf: Any) -> None:
    """Raises ValueError, with ``what`` it is, if a parameter on devices holds NaN or infinite
    numbers.

    Every process must call it. A weight in int8 is checked by its scales.
    """
    numbers = leaf.scale if is_int8(leaf) else leaf
    if jnp.issubdtype(numbers.dtype, jnp.floating) and not _is_finite(numbers):
        raise ValueError(
            f"{what} holds numbers that are infinite or NaN: the file was damaged in training or "
            f"conversion, or {numbers.dtype} is too narrow for them"
        )


@jax.jit
def _is_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all()


def digest(params: Any) -> str:
    """Returns 16 hexadecimal digits of a digest over names, dtypes, values and their places.

    The digest contains a weighted sum modulo 2^32 of the bits of all values. It is the same on any
    mesh, since integers are summed, and with rows of padding, since zeros add nothing. Every
    process must call it.
    """
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        found.update(
            f"{jax.tree_util.keystr(path)} {leaf.dtype} {int(_weighted_sum(leaf)):x};".encode()
        )
    return found.hexdigest()[:16]


def digest_of_pair(pair: Pair) -> str:
    """Returns the digest of a pair's parameters and of the configuration of its head."""
    of_params = digest((pair.target_params, pair.draft_params))
    if pair.head is None:
        return of_params
    fields = dataclasses.asdict(pair.head.config)
    del fields["layer"]["vocab_size"]  # a mesh pads it
    told = json.dumps([of_params, pair.head.config.kind, fields], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


@jax.jit
def _weighted_sum(x: jax.Array) -> jax.Array:
    """Returns the sum of the mixed bits of each entry, multiplied by an odd number that depends on
    its place.
    """
    unsigned = jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}")
    bits = (
        x.astype(unsigned) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, unsigned)
    ).astype(jnp.uint32)
    bits = bits * jnp.uint32(0x9E3779B1)  # odd numbers without a pattern
    bits = bits ^ (bits >> 15)  # otherwise signs, the highest bit, would cancel in pairs
    place = jnp.ones(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        place = place * jnp.uint32(0x85EBCA6B) + 2 * (index ^ (index << 13))
    return jnp.sum(bits * (place | 1), dtype=jnp.uint32)


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every leaf by its path, such as ``layer_0/mlp/up``."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_int8)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
        for path, leaf in leaves
    }
