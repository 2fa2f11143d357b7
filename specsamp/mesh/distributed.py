"""Joins the processes of a job, which then decode together on one mesh.

    start("10.0.0.2:8476", num_processes=4, process_id=i)  # on a TPU pod: start()
    completions = generate(shard(pair, make_mesh(data=4, model=8)), prompts)

`start` comes before any other call of JAX.

All processes run the same program. When a process dies, all other processes end with a message.
"""

import ctypes
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np

from specsamp import machine, validate
from specsamp.jax_names import multihost_utils

# Seconds until the death of a process is detected, and until a start with missing processes fails.
# Raise it on a machine that is too busy for regular heartbeats.
HEARTBEAT_SECONDS = int(os.environ.get("SPECSAMP_HEARTBEAT_SECONDS", "30"))
CONNECT_SECONDS = int(os.environ.get("SPECSAMP_CONNECT_SECONDS", "45"))

T = TypeVar("T")


def start(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins the processes of a job and checks that all of them run the same code. Call it before
    any other use of JAX.

    When a process dies, all processes end within `HEARTBEAT_SECONDS`, see `end_on_abort`.

    Args:
      coordinator: "host:port" of process 0. Give all three arguments; or none on a TPU pod, under
        Slurm and under Open MPI, whose processes JAX detects.
      num_processes: number of processes of the job.
      process_id: number of this process, from 0.

    Raises:
      ValueError: some arguments are missing or out of range.
      ConnectionError: the coordinator cannot be reached or started.
      RuntimeError: a process runs other code, another version of JAX or another command.
    """
    given = (coordinator, num_processes, process_id)
    if any(x is None for x in given) != all(x is None for x in given):
        raise ValueError(
            f"give coordinator, num_processes and process_id together, or none of them; got {given}"
        )
    if coordinator is not None:
        host, port = _host_and_port(coordinator)
        validate.integer("process_id", process_id, 0, num_processes)
        if process_id:
            _wait_for(host, port)
    # JAX would catch the notice of a preemption. Without its service the notice ends the process.
    jax.config.update("jax_enable_preemption_service", False)
    who = (
        f"all {num_processes} processes reached {coordinator}"
        if coordinator
        else "all processes of this job met"
    )
    # The runtime aborts without naming the processes that it waited for.
    end_on_abort(f"specsamp: not {who} within {CONNECT_SECONDS} seconds")
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=CONNECT_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except ValueError as error:
        raise ValueError(
            f"JAX does not find the processes of this job ({error}): give coordinator, "
            "num_processes and process_id"
        ) from error
    except jax.errors.JaxRuntimeError as error:
        raise ConnectionError(
            f"the coordinator at {coordinator} could not be started: is its port free? ({error})"
        ) from error
    # Again, now that the backend runs, because it may install handlers of its own.
    end_on_abort(
        f"specsamp: the runtime ended process {jax.process_index()} of {jax.process_count()}: most "
        "likely another process died or its machine was taken away; its own output says why"
    )
    check_same_code(code_version())


def end_on_abort(message: str) -> None:
    """Ends this process with ``message`` as its last line and exit status 1 if the runtime aborts
    it.

    The runtime aborts a process when another process of its job has died: it prints about thirty
    lines of its stack and raises SIGABRT in one of its threads. Python would run a signal handler
    later, in the main thread, which is too late; so this installs a handler of the C library.
    """
    if os.name == "posix":
        _abort_handlers.append(_ABORT_HANDLER(lambda number: end_now(message)))
        ctypes.CDLL(None).signal(int(signal.SIGABRT), _abort_handlers[-1])


def end_now(message: str, status: int = 1) -> NoReturn:
    """Prints ``message`` as the last line of this process and ends it.

    A normal exit would block up to `HEARTBEAT_SECONDS` for the dead process, and would then be
    aborted.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(2, f"{message}\n".encode(errors="replace"))
    finally:
        os._exit(status)


_ABORT_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
# Keeps the handlers alive, because the C library only has their addresses.
_abort_handlers: list[Any] = []


def code_version() -> str:
    """Returns the version of the source tree (see `machine.source_version`), the JAX version and
    the command line.
    """
    command = " ".join(
        argument for argument in sys.argv[1:] if not argument.startswith("--process_id")
    )
    return (
        f"specsamp {machine.source_version()}, jax {jax.__version__}, {command or 'no arguments'}"
    )


def check_same_code(version: str) -> None:
    """Raises RuntimeError on every process if their versions, see `code_version`, are not all the
    same.
    """
    versions = gather_objects(version)
    others = {i: theirs for i, theirs in enumerate(versions) if theirs != versions[0]}
    if others:
        raise RuntimeError(
            f"processes run different code: process 0 has {versions[0]}, "
            + ", ".join(f"process {i} has {theirs}" for i, theirs in others.items())
            + ": set up all of them with the same commit, and give all of them the same command"
        )


def gather_objects(value: Any) -> list[Any]:
    """Returns the values of all processes, ordered by process. Every process must call it.

    Values are sent as pickles, which can run code when they are read. JAX's coordinator accepts
    every connection, so its port must be inside a trusted network, for example that of a TPU slice.
    """
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(data))).ravel()
    # A program is compiled for every size.
    padded = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)
    padded[: len(data)] = data
    gathered = multihost_utils.process_allgather(padded)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(gathered, sizes)]


def from_first(make: Callable[[], T]) -> T:
    """Runs ``make`` in the first process; returns its result, or raises its error, in all. All must
    call it.
    """
    made, error = None, None
    if jax.process_index() == 0:
        try:
            made = make()
        except Exception as met:  # noqa: BLE001, otherwise the other processes would block
            error = met
    if jax.process_count() > 1:
        message = gather_objects((made, None if error is None else _portable(error)))[0]
        made, error = message if jax.process_index() else (made, error)
    if error is not None:
        raise error
    return made


def _portable(error: Exception) -> Exception:
    """Returns the error, or a RuntimeError with its message if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # noqa: BLE001, pickles fail in many ways
        return RuntimeError(f"{type(error).__name__}: {error}")


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"the coordinator's address must be host:port; got {address!r}")
    return host, int(port)


def _wait_for(host: str, port: int) -> None:
    """Waits until the coordinator listens; raises ConnectionError after `CONNECT_SECONDS`.

    The runtime would end the process without naming the address.
    """
    until = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise ConnectionError(
                    f"no coordinator answered at {host}:{port} within {CONNECT_SECONDS} seconds "
                    f"({error}): is process 0 running, and does a firewall let this port through?"
                ) from error
        time.sleep(1)
