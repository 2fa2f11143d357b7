"""Checks that a tree of parameters is the one that a model wants."""

from __future__ import annotations

from typing import Any

import jax

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


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every leaf by its path, such as ``layer_0/mlp/up``; trees need not be dictionaries."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in leaves}
