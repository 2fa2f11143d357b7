"""What all entry points share: flags for many processes, quiet logs, errors as one line.

python launch/quality.py --distributed                                   # on every worker of a TPU pod
python launch/quality.py --coordinator=10.0.0.2:8476 --num_processes=2 --process_id=0
"""

import glob
import importlib.util
import os
import shlex
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before JAX: only errors of the runtime

from collections.abc import Callable
from typing import Any

import jax
from absl import app, flags, logging
from jax.experimental import multihost_utils
from rich.console import Console

from specsamp import storage
from specsamp.analysis import report
from specsamp.mesh import distributed

# The tests bring a TPU's compiler along. Where no TPU is, JAX would look for one at length and complain.
if importlib.util.find_spec("libtpu") and not glob.glob("/dev/accel*") + glob.glob("/dev/vfio/*"):
    if not any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin")):
        jax.config.update("jax_platforms", jax.config.jax_platforms or "cpu")

_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Join the other processes of this pod, which it finds itself.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0, where nothing finds it itself.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many take part, with --coordinator.", lower_bound=1)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which of them this is, with --coordinator.", lower_bound=0)


def run(main: Callable[[], None]) -> None:
    """Parses flags, joins other processes if asked to, and calls ``main``."""

    def start(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected argument {argv[1]!r}")
        logging.set_verbosity(logging.ERROR)
        numbers = (_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
        if _DISTRIBUTED.value or any(number is not None for number in numbers):
            try:
                distributed.start(*numbers)
            except (ValueError, ConnectionError, RuntimeError) as error:
                sys.exit(f"joining other processes: {error}")
        try:
            main()
            if jax.process_count() > 1:  # else the first would end the others while it is still writing
                multihost_utils.sync_global_devices("the end")
        except jax.errors.JaxRuntimeError as error:
            if jax.process_count() == 1:
                raise
            distributed.end_now(
                f"a computation of {jax.process_count()} processes failed; has one of them died? {error}"
            )

    app.run(start)


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0


def make_console(**options: Any) -> Console:
    return Console(quiet=not is_first(), **options)


def command() -> str:
    """As it was typed."""
    return shlex.join(["python", *sys.argv])


def check_output(path: str | None, flag: str = "output") -> None:
    """Refuses a place that cannot be written, or is a folder: now, not after an hour of measuring.

    Raises:
      ValueError: with the reason.
    """
    if path and is_first():
        if storage.place(path).is_dir():
            raise ValueError(f"--{flag}={path} is a folder: name a file in it")
        probe = f"{path}.probe"
        try:
            storage.write(probe, "")
            storage.place(probe).unlink()
        except OSError as error:
            raise ValueError(f"--{flag}={path} cannot be written: {error}") from error


def write_result(path: str | None, document: dict, console: Console) -> None:
    """As JSON, with the command and the environment in front; once, whatever the number of processes."""
    if path and is_first():
        report.write_json(path, {"command": command(), "environment": report.environment()} | document)
        console.print(f"\nwritten to {path}", soft_wrap=True)
