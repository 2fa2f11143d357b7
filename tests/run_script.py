"""Launch scripts as a user runs them: in a process of their own."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def run(script, *arguments, **environment):
    """Runs ``launch/{script}.py`` on CPU devices; nothing is read from or written to the user's cache of programs."""
    fixed = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    return subprocess.run(
        [sys.executable, f"launch/{script}.py", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True,
        timeout=300, env={**os.environ, **fixed, **environment},
    )  # fmt: skip
