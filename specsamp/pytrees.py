"""Dataclasses whose fields are arrays."""

import dataclasses
from typing import TypeVar, dataclass_transform

import jax

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass with keyword arguments, and a pytree of its fields.

    A field with ``metadata={"static": True}`` is part of the structure.
    """
    made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    return jax.tree_util.register_dataclass(made)
