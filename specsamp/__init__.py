"""Exact speculative sampling for large language models in JAX.

from specsamp import Pair, generate, chain, temperature, top_p

The public names are in ``__init__.pyi``. A name is imported on first use, so that a program
loads only the modules that it uses.
"""

import ast
import glob
import importlib
import os
import pathlib
from typing import Any

__version__ = "0.1.0"

# JAX starts libtpu if it is installed, for example for compile reports. Without a TPU, libtpu
# prints errors about the machine's missing name and metadata server, so these variables have a
# name. They must be set before JAX starts.
if not glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*"):
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v4-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

_stub = ast.parse(pathlib.Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOMES = {
    name.name: line.module
    for line in _stub.body
    if isinstance(line, ast.ImportFrom)
    for name in line.names
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specsamp' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
