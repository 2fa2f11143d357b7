"""Packages that some tests require and plain pytest may lack; the summary reports skipped tests."""

import importlib.util
import pathlib
import platform
import shutil
import sys

import pytest

ON_LINUX_X86 = sys.platform == "linux" and platform.machine() == "x86_64"


def shellcheck():
    """Returns the path of the program, next to this Python or on the path; None without it."""
    beside = pathlib.Path(sys.executable).with_name("shellcheck")
    return str(beside) if beside.exists() else shutil.which("shellcheck")


def is_here(name):
    """Returns whether a package can be imported; shellcheck is a program."""
    if name == "shellcheck":
        return shellcheck() is not None
    return importlib.util.find_spec(name) is not None


# Packages of the extra `test` of setup.py, and the tests that are skipped without each.
LEFT_OUT = {
    "xdist": "a second worker: the tests take twice as long",
    "matplotlib": "figures and notebooks",
    "jupytext": "notebooks",
    "jinja2": "chat templates",
    "rouge_score": "scores of summaries",
    "pyarrow": "data sets in Parquet",
    "starlette": "the endpoint",
    "uvicorn": "the endpoint",
    "pydantic": "the endpoint",
    "openai": "the endpoint, by the client of others",
    "llguidance": "grammars",
    "prometheus_client": "the metrics of the endpoint",
    "shellcheck": "the check of shell scripts",
    "libtpu": "programs compiled for TPUs",
}
if not ON_LINUX_X86:
    del LEFT_OUT["libtpu"]  # not built for this platform
MISSING = {name: what for name, what in LEFT_OUT.items() if not is_here(name)}


def slow_but(values, *quick):
    """Returns parameters of a test, all slow except the ``quick`` ones."""
    each = [(value if isinstance(value, tuple) else (value,), value in quick) for value in values]
    return [
        pytest.param(*value, marks=[] if is_quick else [pytest.mark.slow])
        for value, is_quick in each
    ]


def needs(*names):
    """Returns a mark that skips a test, or a module, if one of the packages is missing."""
    missing = [name for name in names if not is_here(name)]
    return pytest.mark.skipif(bool(missing), reason=f"without {', '.join(missing)}")
