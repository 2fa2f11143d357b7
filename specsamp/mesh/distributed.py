"""Many processes, one program: joining them, sharing out prompts, and bringing results back together.

start("10.0.0.2:8476", num_processes=4, process_id=i)     # on a TPU pod: start(); before any other JAX call
replica = my_replica(model=8)                             # the mesh this process works on, with others or alone
mine = replica.share(len(prompts))
completions = generate(shard(pair, replica.mesh), [prompts[i] for i in mine], prompt_ids=mine)
everything = replica.gather(mine, completions, len(prompts))     # on every process, in the order of the prompts
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import os
import pathlib
import pickle
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import specsamp
from specsamp.mesh.layout import make_mesh

# A process that is gone is noticed after this long, a coordinator that never was after that. A machine so busy that
# it answers later needs more.
HEARTBEAT_SECONDS = int(os.environ.get("SPECSAMP_HEARTBEAT_SECONDS", "30"))
CONNECT_SECONDS = int(os.environ.get("SPECSAMP_CONNECT_SECONDS", "45"))


def start(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Joins the processes of a job and checks that all run the same code; before any other use of JAX.

    When one process dies, the runtime ends the others within `HEARTBEAT_SECONDS`. Their last line then says so, and
    their exit status is 1, see `end_on_abort`.

    Args:
      coordinator: "host:port" of process 0. All three arguments or none: a TPU pod, Slurm and Open MPI say
        themselves who takes part.

    Raises:
      ValueError: some arguments are missing. ConnectionError: nobody answers at the coordinator's address.
      RuntimeError: a process runs other code, or another JAX.
    """
    given = (coordinator, num_processes, process_id)
    if any(x is None for x in given) != all(x is None for x in given):
        raise ValueError(f"give coordinator, num_processes and process_id together, or none of them; got {given}")
    if coordinator is not None:
        host, port = _host_and_port(coordinator)
        if not 0 <= process_id < num_processes:
            raise ValueError(f"process_id must be in [0, {num_processes}); got {process_id}")
        if process_id:
            _wait_for(host, port)
    # Nobody here would ask whether the notice has come: let it end the process, as it ends every other program.
    jax.config.update("jax_enable_preemption_service", False)
    who = f"all {num_processes} processes reached {coordinator}" if coordinator else "all processes of this job met"
    # The runtime aborts without saying whom it waited for.
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
            f"nothing here says which processes take part ({error}): give coordinator, num_processes and process_id"
        ) from error
    except jax.errors.JaxRuntimeError as error:
        raise ConnectionError(
            f"the coordinator at {coordinator} could not be started: is its port free? ({error})"
        ) from error
    # Again, and with the backend there: it may have installed handlers of its own.
    end_on_abort(
        f"specsamp: the runtime ended process {jax.process_index()} of {jax.process_count()}: most likely another "
        "process died or its machine was taken away; its own output says why"
    )
    check_same_code(code_version())


def end_on_abort(message: str) -> None:
    """Replaces what follows an abort of the runtime by ``message``, as the last line, and exit status 1.

    The runtime aborts a process whose job has lost another one: it prints some thirty lines of its own stack, and
    then raises SIGABRT in a thread of its own. Python's handlers would run too late, hence one of C.
    """
    if os.name == "posix":
        _abort_handlers.append(_ABORT_HANDLER(lambda number: end_now(message)))
        ctypes.CDLL(None).signal(int(signal.SIGABRT), _abort_handlers[-1])


def end_now(message: str, status: int = 1) -> NoReturn:
    """Prints ``message`` as the last line of this process and ends it, without waiting for the others.

    A normal exit would wait `HEARTBEAT_SECONDS` for the process that died, and be aborted then.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(2, f"{message}\n".encode(errors="replace"))
    finally:
        os._exit(status)


_ABORT_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_abort_handlers: list[Any] = []  # kept, as C only has their addresses


def code_version() -> str:
    """Of the source (launch and configs too, in a checkout), of JAX, and of the command line.

    With ``SPECSAMP_VERSION`` in front, the commit that launch/tpu/setup.sh exports.
    """
    digest = hashlib.sha256()
    package = pathlib.Path(specsamp.__file__).parent
    folders = [package] + [folder for name in ("launch", "configs") if (folder := package.parent / name).is_dir()]
    for folder in folders:
        for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
            name = f"{folder.name}/{path.relative_to(folder).as_posix()}"
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    command = " ".join(argument for argument in sys.argv[1:] if not argument.startswith("--process_id"))
    source = f"{os.environ.get('SPECSAMP_VERSION') or 'source'} {digest.hexdigest()[:12]}"
    return f"specsamp {source}, jax {jax.__version__}, {command or 'no arguments'}"


def check_same_code(version: str) -> None:
    """Raises RuntimeError, on every process, unless all give the same version."""
    versions = gather_objects(version)
    others = {i: theirs for i, theirs in enumerate(versions) if theirs != versions[0]}
    if others:
        raise RuntimeError(
            f"processes run different code: process 0 has {versions[0]}, "
            + ", ".join(f"process {i} has {theirs}" for i, theirs in others.items())
            + ": set all up with the same commit, and give all the same command"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Replica:
    """The processes that hold one copy of the models together, of ``count`` such groups."""

    mesh: Mesh
    index: int
    count: int

    def share(self, num_items: int) -> list[int]:
        """The items this replica works on: every ``count``-th."""
        return list(range(self.index, num_items, self.count))

    def gather(self, indices: Sequence[int], results: Sequence[Any], num_items: int) -> list[Any]:
        """All results of all replicas, in the order of their items; every process must call it.

        Raises:
          ValueError: an index is missing, or there are not as many results as indices.
        """
        if len(indices) != len(results):
            raise ValueError(f"{len(results)} results for {len(indices)} indices")
        # Processes of one replica have the same results: later ones overwrite equal ones.
        by_index = dict(pair for part in gather_objects(list(zip(indices, results))) for pair in part)
        missing = sorted(set(range(num_items)) - by_index.keys())
        if missing:
            raise ValueError(f"no result for items {missing[:10]}")
        return [by_index[i] for i in range(num_items)]


def my_replica(model: int, **parts: int | None) -> Replica:
    """The mesh of this process: its own devices, or with neighbours where ``model`` takes more than it has.

    Args:
      model: devices that hold one copy of the target together.
      parts: ``draft_model_parallelism``, ``num_kv_heads`` and ``rows`` of `make_mesh`.

    Raises:
      ValueError: ``model`` neither divides the devices of a process nor is a multiple of them.
    """
    local, processes = jax.local_device_count(), jax.process_count()
    if model < 1:
        raise ValueError(f"model must be >= 1; got {model}")
    together = max(model // local, 1)
    if (local % model if model <= local else model % local) or processes % together:
        raise ValueError(
            f"model {model} must divide the {local} devices of a process, or be a multiple of them that divides "
            f"all {jax.device_count()}"
        )
    index = jax.process_index() // together
    devices = [d for d in jax.devices() if d.process_index // together == index]
    mesh = make_mesh(len(devices) // model, model, devices=devices, **parts)
    return Replica(mesh=mesh, index=index, count=processes // together)


def gather_objects(value: Any) -> list[Any]:
    """Returns the values of all processes, in their order; every process must call it.

    Values travel as pickles, which can run code where they are read. Only processes that joined this job send them,
    but JAX's coordinator takes everybody who reaches its port: keep that port inside a network that you trust, as
    the hosts of a TPU slice do.
    """
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(data))).ravel()
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(data)] = data
    gathered = multihost_utils.process_allgather(padded)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(gathered, sizes)]


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"the coordinator's address must be host:port; got {address!r}")
    return host, int(port)


def _wait_for(host: str, port: int) -> None:
    """Until something listens there: the runtime itself would end the process without saying where it looked."""
    until = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise ConnectionError(
                    f"no coordinator answered at {host}:{port} within {CONNECT_SECONDS} seconds ({error}): "
                    "is process 0 running, and does a firewall let this port through?"
                ) from error
        time.sleep(1)
