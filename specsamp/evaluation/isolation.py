"""Runs untrusted programs in isolation: without network, without other users' files, and with
limits.

    print("\\n".join(find_isolation().sentences))
    outcome = run_isolated("assert sorted([2, 1]) == [1, 2]")     # outcome.passed

Machines differ (a container may forbid namespaces), so `find_isolation` runs a probe that tries to
escape. If the probe reaches a network or other users' files, no program runs, unless the caller
insists. A program passes if it reaches its end: the harness then reports a secret word, different
in each run. Until then neither a file descriptor nor Python's introspection can read this word. A
program that is written against this harness can still search its own memory for the word with
ctypes, or skip its tests with a trace function. Then its score is wrong, but the isolation holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO

READY = b"ready\n"  # the first line of a report: the walls stand
JAIL = pathlib.Path(__file__).with_name("jail.py")
WALLS = ("namespaces", "landlock", "system calls")
# What a program must not reach, and the walls against it.
ASPECTS = {
    "network": ("namespaces", "system calls"),
    "files": ("namespaces", "landlock"),
    "processes": ("namespaces", "system calls"),
    "memory": ("limits",),
}
NEEDED = ("network", "files")
SYSTEM_FOLDERS = ("/usr", "/bin", "/lib", "/lib64", "/nix/store")
ENVIRONMENT = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class IsolationError(RuntimeError):
    """Raised if a program was not run because it could not be isolated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one program."""

    seconds: float = 10.0  # of the wall clock, from its start
    cpu_seconds: int = 5  # per process
    memory_mib: int = 1024  # of addresses, per process
    processes: int = 16  # and threads
    files: int = 64  # that are open
    file_mib: int = 4  # per file; within namespaces all files together have four times as much
    output_kib: int = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a program, and its cause.

    Attributes:
      status: "passed", "failed" (an exception, or an end before the last line), "timeout",
        "memory", "output" (more than allowed) or "killed" (by a signal).
      detail: the exception, the signal or the limit.
      output: the beginning of its output.
    """

    status: str
    detail: str
    output: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "passed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Isolation:
    """The isolation of programs on this machine.

    Attributes:
      walls: the names in `WALLS` that can be built.
      missing: the other names, with the reason.
      by: for each aspect of `ASPECTS`, the walls that isolate it; empty if none does.
    """

    walls: tuple[str, ...]
    missing: dict[str, str]
    by: dict[str, str]

    @property
    def suffices(self) -> bool:
        """Returns whether network and files are isolated, so that programs may run."""
        return all(self.by[aspect] for aspect in NEEDED)

    @property
    def sentences(self) -> list[str]:
        """Returns sentences on the isolation of each aspect, and on missing walls."""
        lines = [
            f"{aspect}: isolated by {how}" if how else f"{aspect}: NOT ISOLATED"
            for aspect, how in self.by.items()
        ]
        return lines + [f"without {wall}: {why}" for wall, why in self.missing.items()]


# A program that tries to reach a server, a file and a process outside, and prints where it
# succeeded.
PROBE = """
import json, os, socket, time
def can(attempt):
    try:
        attempt()
    except (OSError, MemoryError):
        return False
    return True
def count():
    for _ in range({processes}):
        if os.fork() == 0:
            time.sleep(0.5)
            os._exit(0)
print(json.dumps({{
    "network": can(lambda: socket.create_connection(("127.0.0.1", {port}), 1)),
    "files": can(lambda: open({file!r}))
    or can(lambda: open({file!r}, "a"))
    or can(lambda: os.chmod({file!r}, 0o600)),
    "processes": can(lambda: os.kill({pid}, 0)) or can(count),
    "memory": can(lambda: bytearray({memory} << 20)),
}}))
open("own", "w").write("")
"""


@functools.cache
def find_isolation(walls: tuple[str, ...] = WALLS) -> Isolation:
    """Tests which of ``walls`` can be built, and which aspects they isolate.

    Raises:
      IsolationError: no program runs at all.
    """
    if sys.platform != "linux":
        return Isolation(
            walls=(),
            missing=dict.fromkeys(walls, "only Linux has it"),
            by=dict.fromkeys(ASPECTS, ""),
        )
    missing, limits = {}, Limits()
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.NamedTemporaryFile() as file:
        probe = PROBE.format(
            port=server.getsockname()[1],
            file=file.name,
            pid=os.getpid(),
            processes=limits.processes,
            memory=limits.memory_mib,
        )
        while True:
            left = tuple(wall for wall in walls if wall not in missing)
            try:
                outcome = _run(probe, limits, left)
                if outcome.passed:
                    break
                # For example, Python is in root's home, which the user nobody cannot read.
                why = f"a harmless program fails within the walls ({outcome.detail})"
            except IsolationError as error:
                why = str(error)
            if not left:
                raise IsolationError(why)
            wall = why.partition(":")[0]
            missing[wall if wall in left else left[0]] = why
    reached = json.loads(outcome.output)
    by = {
        name: " and ".join(how for how in ways if how in (*left, "limits"))
        for name, ways in ASPECTS.items()
    }
    return Isolation(
        walls=left,
        missing=missing,
        by={name: "" if reached[name] else how for name, how in by.items()},
    )


def require(isolation: Isolation) -> None:
    """Raises IsolationError if network or files are not isolated."""
    if not isolation.suffices:
        raise IsolationError(
            "generated programs are not run, since this machine does not isolate them: "
            f"{'; '.join(isolation.sentences)}. Use Linux with user namespaces, or with Landlock; "
            "or insist"
        )


def run_isolated(
    program: str,
    limits: Limits = Limits(),
    *,
    isolation: Isolation | None = None,
    insist: bool = False,
) -> Outcome:
    """Runs one program in a new process, and ends all processes that it started.

    Args:
      program: Python source.
      limits: limits of the program.
      isolation: default `find_isolation()`.
      insist: run the program even if this machine does not isolate network and files.

    Raises:
      IsolationError: network or files are not isolated, and the caller does not insist.
    """
    isolation = find_isolation() if isolation is None else isolation
    if not insist:
        require(isolation)
    return _run(program, limits, isolation.walls)


def run_all(
    programs: Iterable[str],
    limits: Limits = Limits(),
    *,
    workers: int | None = None,
    isolation: Isolation | None = None,
    insist: bool = False,
) -> Iterator[Outcome]:
    """Runs ``workers`` programs at a time (default: one per core) with `run_isolated`, and yields
    outcomes in order.
    """
    isolation = find_isolation() if isolation is None else isolation  # once, not in every thread
    one = functools.partial(run_isolated, limits=limits, isolation=isolation, insist=insist)
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        yield from pool.map(one, programs)


def readable() -> list[str]:
    """Returns the folders that a program may read: Python's own and the system's libraries."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    chosen: list[str] = []
    for path in sorted({*SYSTEM_FOLDERS, *prefixes, *map(os.path.realpath, prefixes)}, key=len):
        if os.path.exists(path) and not any(
            pathlib.Path(path).is_relative_to(parent) for parent in chosen
        ):
            chosen.append(path)
    return chosen


def _run(program: str, limits: Limits, walls: tuple[str, ...]) -> Outcome:
    """Runs a program within walls; raises IsolationError if a wall cannot be built."""
    source, word = program.encode("utf-8", "surrogatepass"), secrets.token_hex(16).encode()
    deadline = time.monotonic() + limits.seconds
    pipe, jail_pipe = os.pipe()
    with (
        open(pipe, "rb", buffering=0) as reports,
        tempfile.TemporaryFile() as printed,
        tempfile.TemporaryDirectory(prefix="specsamp-", ignore_cleanup_errors=True) as folder,
    ):
        request = dataclasses.asdict(limits) | {
            "walls": walls,
            "bytes": len(source),
            "report": jail_pipe,
            "folder": os.path.realpath(folder),
            "readable": readable(),
        }
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-u", str(JAIL), json.dumps(request)],
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=subprocess.STDOUT,
                pass_fds=(jail_pipe,),
                start_new_session=True,
                env=ENVIRONMENT,
            )
        finally:
            os.close(jail_pipe)
        with process:
            try:
                # The process has ended, for a reason in the report.
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(source + word)
                    process.stdin.close()
                report, in_time = _read(reports, deadline)
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            # No process is left, unless there are no walls.
            _read(reports, time.monotonic() + 1.0, to_end=True)
        printed.seek(0)
        output = printed.read((limits.output_kib << 10) + 1)
    status, detail = _judge(report, word, in_time, code, limits, output)
    return Outcome(
        status=status,
        detail=detail,
        output=output[: limits.output_kib << 10].decode("utf-8", "replace"),
    )


def _read(reports: IO[bytes], deadline: float, *, to_end: bool = False) -> tuple[bytes, bool]:
    """Reads a report until the program has reported or all processes have ended.

    Args:
      reports: a pipe that ends with the last process.
      deadline: of the monotonic clock.
      to_end: read on after the program has reported.

    Returns:
      The report, and whether it came before the deadline.
    """
    report, poll = b"", select.poll()
    poll.register(reports, select.POLLIN)
    while poll.poll(max(deadline - time.monotonic(), 0) * 1000):
        read = reports.read(1 << 16)
        report += read
        if not read or (report.partition(READY)[2] and not to_end):
            return report, True
    return report, False


def _judge(
    report: bytes, word: bytes, in_time: bool, code: int, limits: Limits, output: bytes
) -> tuple[str, str]:
    """Returns status and detail of an `Outcome`."""
    if report.startswith(b"refused"):
        raise IsolationError(report.decode().partition("\n")[2])
    if len(output) > limits.output_kib << 10:
        return "output", f"more than {limits.output_kib} KiB"
    if not in_time or code in (128 + signal.SIGXCPU, -signal.SIGXCPU):
        return (
            "timeout",
            f"longer than {limits.seconds} s, or {limits.cpu_seconds} s of computation",
        )
    if not report.startswith(READY):
        raise IsolationError(
            f"the harness did not start: {output.decode('utf-8', 'replace')[-300:].strip()}"
        )
    report = report.removeprefix(READY)
    if report == word:
        return "passed", ""
    kind, _, detail = report.decode("utf-8", "replace").partition("\n")
    if kind == "memory":
        return "memory", f"more than {limits.memory_mib} MiB"
    if kind == "failed":
        return "failed", detail
    if code > 128:
        return "killed", signal.strsignal(code - 128) or f"signal {code - 128}"
    return "failed", f"ended with exit status {code} before its last line"
