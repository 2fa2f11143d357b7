"""Checks of single values that users give; every message names the field, what it must be and the
value.
"""

import contextlib
import dataclasses
import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def integer(name: str, value: Any, least: int = 0, limit: int = 2**31) -> int:
    """Returns ``value`` as an int in [least, limit); NumPy integers pass, booleans and fractions do
    not.

    Raises:
      ValueError: it is not an integer in this range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, (bool, np.bool_)) or not least <= number < limit:
        raise ValueError(f"{name} must be an integer >= {least} and below {limit}; got {value!r}")
    return number


def integers(name: str, values: Any, least: int = 0, limit: int = 2**31) -> list[int]:
    """Returns each element of a list, as `integer` gives it; raises ValueError for anything but a
    list.
    """
    if not is_list(values):
        raise ValueError(f"{name} must be a list; got {values!r}")
    return [integer(f"{name}[{i}]", value, least, limit) for i, value in enumerate(values)]


def is_list(value: Any) -> bool:
    """Returns whether ``value`` has items in an order and is no text: a list, a tuple or an array
    of an axis.
    """
    texts_and_sets = (str, bytes, bytearray, Mapping, Set)
    return (
        hasattr(value, "__len__")
        and not isinstance(value, texts_and_sets)
        and getattr(value, "shape", True) != ()
    )


def number(
    name: str, value: Any, least: float, most: float = math.inf, *, above: bool = False
) -> float:
    """Returns ``value`` as a finite float in [least, most]; with ``above``, in (least, most].

    Raises:
      ValueError: it is not a number in this range; booleans and texts are refused.
    """
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(
        value, bool
    )
    if (
        not is_number
        or not abs(value) < math.inf
        or not least <= value <= most
        or (above and value == least)
    ):
        low = f"above {least:g}" if above else f"from {least:g}"
        raise ValueError(
            f"{name} must be a number {low}{'' if most == math.inf else f' to {most:g}'}; got "
            f"{value!r}"
        )
    return float(value)


def path(name: str, value: Any) -> str:
    """Returns ``value``, a path or a name, as text; raises ValueError for anything else, such as
    None.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError(f"{name} must be a path or a name; got {value!r}")
    return os.fspath(value)


def switch(name: str, value: Any) -> bool:
    """Returns ``value``, which must be True or False; raises ValueError for anything else, such as
    a text.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False; got {value!r}")
    return value


def instance(name: str, value: Any, kind: type[T], example: str) -> T:
    """Returns ``value``, which must be a ``kind``; raises ValueError with an example of one."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ValueError(
            f"{name} must be {article} {kind.__name__}, such as {example}; got {value!r:.200}"
        )
    return value


def hashable(name: str, value: Any) -> None:
    """Raises ValueError for a value that cannot be hashed, and so cannot be a static part of a
    compiled program.
    """
    try:
        hash(value)
    except TypeError as error:
        raise ValueError(
            f"{name} must be hashable, such as a frozen dataclass without arrays"
        ) from error


def choice(name: str, value: T, known: Iterable[Any]) -> T:
    """Returns ``value``, which must be among ``known``; raises ValueError with the known values."""
    known = list(known)
    if not any(
        value is each or (isinstance(value, type(each)) and value == each) for each in known
    ):
        raise ValueError(f"{name} must be one of {', '.join(map(str, known))}; got {value!r}")
    return value


def fields(
    config: Any,
    of: str = "",
    *,
    choices: Mapping[str, Iterable[Any]] = {},
    least: Mapping[str, int] = {},
) -> None:
    """Raises ValueError for a field of a dataclass with an invalid value; None is valid where it is
    the default. Integers are at least 1, and numbers positive. The types of the fields are strings,
    by ``from __future__ import annotations``.

    Args:
      of: behind the names of fields in messages.
      choices: the values of some fields.
      least: the smallest integers of some fields.
    """
    for field in dataclasses.fields(config):
        name, value = field.name + of, getattr(config, field.name)
        if field.name in choices:
            choice(name, value, choices[field.name])
        elif field.type == "bool":
            switch(name, value)
        elif value is None and field.default is None:
            continue
        elif field.type.startswith("int"):
            integer(name, value, least.get(field.name, 1))
        elif field.type.startswith("float"):
            number(name, value, 0, above=True)


@contextlib.contextmanager
def located(place: str) -> Iterator[None]:
    """Puts the place of bad input, such as a file and a line, in front of a ValueError.

    Its subclasses pass: a machine that cannot do something is no fault of the input.
    """
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise ValueError(f"{place}: {error}") from error
