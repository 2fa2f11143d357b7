"""Reads the keys of a config.json; messages name file, key and value."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from specsamp import validate

# The names of activations in config.json and here. If an activation has several names, the first is
# written.
ACTIVATIONS = {
    "gelu": "gelu_exact",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
}


def differing_fields(
    ours: Any, theirs: Any, but: Collection[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """Returns both values of each field that differs between two dataclasses; fields in ``but`` are
    left out.
    """
    values = {
        f.name: (getattr(ours, f.name), getattr(theirs, f.name)) for f in dataclasses.fields(ours)
    }
    return {name: pair for name, pair in values.items() if pair[0] != pair[1] and name not in but}


class Fields:
    """Reads the keys of a config.json; messages name the file."""

    def __init__(self, path: str, content: Mapping[str, Any]):
        self.path, self._content = path, content

    def __call__(self, key: str, *default: Any) -> Any:
        """Returns the value of a key, or ``default`` where it is absent or null; raises ValueError
        without a default.
        """
        value = self._content.get(key)
        if value is not None:
            return value
        if not default:
            raise ValueError(f"{self.path} lacks the key {key!r}")
        return default[0]

    def or_null(self, key: str, default: Any) -> Any:
        """Returns the value of a key, which may be null, or ``default`` if the key is absent."""
        return self._content.get(key, default)

    def count(self, key: str) -> int:
        """Returns a positive integer."""
        return validate.integer(f"{self.path}: {key}", self(key), 1)

    def switch(self, key: str, default: bool) -> bool:
        """Returns a bool; raises ValueError for any other type."""
        return validate.switch(f"{self.path}: {key}", self(key, default))

    def object(self, key: str) -> Mapping[str, Any]:
        """Returns an object; {} if the key is absent or null."""
        value = self(key, {})
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.path} says {key} = {value!r}; it must be an object")
        return value

    def require(self, key: str, allowed: Any) -> None:
        """Raises ValueError unless a key is absent, null or the only supported value."""
        if self(key, allowed) != allowed:
            raise ValueError(
                f"{self.path} says {key} = {self(key)!r}; only {allowed!r} is supported"
            )

    def activation(self, key: str, *default: str) -> str:
        """Returns the name of an activation in `TransformerConfig`."""
        return ACTIVATIONS[validate.choice(f"{self.path}: {key}", self(key, *default), ACTIVATIONS)]
