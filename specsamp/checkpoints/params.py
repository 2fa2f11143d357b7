"""Trees of parameters by name: ``layer_0/mlp/up``."""

from __future__ import annotations

from typing import Any

import jax

MOST_SHOWN = 6


def named(tree: Any) -> dict[str, Any]:
    """Leaves by their path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def nested(leaves: dict[str, Any]) -> dict:
    """The tree of dictionaries that `named` made a list of."""
    tree: dict = {}
    for name, value in leaves.items():
        *folders, leaf = name.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[leaf] = value
    return tree


class WrongShapes(ValueError):
    """The message lists both shapes of every leaf that differs."""


def check_shapes(what: str, have: Any, want: Any) -> None:
    """Raises `WrongShapes` unless both trees have leaves of the same names and shapes."""

    def shapes(tree):
        return {name: tuple(leaf.shape) for name, leaf in named(tree).items()}

    have, want = shapes(have), shapes(want)
    different = [
        f"{name}: {have.get(name, 'absent')} there, {want.get(name, 'absent')} wanted"
        for name in sorted(have.keys() | want.keys())
        if have.get(name) != want.get(name)
    ]
    if different:
        more = f" and {len(different) - MOST_SHOWN} more" if len(different) > MOST_SHOWN else ""
        raise WrongShapes(f"{what} is of another model: {'; '.join(different[:MOST_SHOWN])}{more}")
