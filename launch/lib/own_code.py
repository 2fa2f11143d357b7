"""Drafters and rules from files of the user's own, which configurations name as
FILE.py:EXPRESSION.
"""

import functools
import importlib.util
import pathlib
import sys
import types
from typing import Any, TypeVar

T = TypeVar("T")


def is_own(word: str) -> bool:
    """Returns whether a word names code in a file."""
    return ".py:" in word


def file_of(field: str, word: str) -> pathlib.Path:
    """Returns the file that a word names; raises ValueError if it does not exist."""
    path = pathlib.Path(f"{word.split('.py:')[0]}.py").expanduser()
    if not path.is_file():
        raise ValueError(f"{field}={word}: no file {str(path)!r}")
    return path


def evaluate(field: str, word: str, kind: type[T], **names: Any) -> T:
    """Runs the file of ``FILE.py:EXPRESSION`` and returns the value of the expression, for example
    ``MyDrafter(K)``.

    Args:
      field: of the configuration, for messages.
      kind: of the value.
      names: values that the expression may use, in addition to all names of the file.

    Raises:
      ValueError: the file does not exist, its code or the expression fails, or the value is of
        another kind.
    """
    path, expression = file_of(field, word).resolve(), word.split(".py:", 1)[1]
    try:
        value = eval(expression, vars(load_module(path)) | names)
    except Exception as error:
        raise ValueError(f"{field}={word}: {type(error).__name__}: {error}") from error
    if not isinstance(value, kind):
        raise ValueError(
            f"{field}={word} is of type {type(value).__name__}: it must be a {kind.__name__}"
        )
    return value


@functools.cache  # equal words make equal drafters, whose programs are compiled once
def load_module(path: pathlib.Path) -> types.ModuleType:
    """Runs a file and returns it as a module; raises ValueError if its name does not end in .py."""
    name = str(path).replace(".", "_")  # no import has it
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise ValueError(f"{path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module
