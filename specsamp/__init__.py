"""Exact speculative sampling for large language models in JAX.

from specsamp import Pair, generate, chain, temperature, top_p

The public names are in ``__init__.pyi``. A name is imported when it is first used, so that a program pays only for what it
needs.
"""

import ast
import importlib
import pathlib
from typing import Any

__version__ = "0.1.0"

_stub = ast.parse(pathlib.Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOMES = {name.name: line.module for line in _stub.body if isinstance(line, ast.ImportFrom) for name in line.names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specsamp' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
