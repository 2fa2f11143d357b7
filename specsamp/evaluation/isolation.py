"""Runs generated programs in bubblewrap (``bwrap``): without network, without other files, and with
limits.

    outcome = run_isolated("assert sorted([2, 1]) == [1, 2]")     # outcome.passed

bubblewrap shows a program Python and the system's libraries, which are read-only, and a working
folder in memory; all processes end with the program. Without bubblewrap no program runs unless the
caller insists. It then runs as a plain process with limits, which can read and change the user's
files.

A program passes if it reaches its end: this file, which runs as a script around the program, then
returns a secret word, different in each run. Until then neither a file descriptor nor Python's
introspection can read this word. A program that is written against this script can still search its
own memory for the word with ctypes, or skip its tests with a trace function. Then its score is
wrong, but the isolation holds.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

READABLE = ("/usr", "/bin", "/lib", "/lib64", "/nix/store")
WORK = "/program"  # the working folder within bubblewrap
SEPARATED = (
    "--die-with-parent",
    "--new-session",
    "--unshare-ipc",
    "--unshare-net",
    "--unshare-pid",
    "--unshare-uts",
)
ENVIRONMENT = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
MIB = 1 << 20


class IsolationError(ValueError):
    """Raised if a program was not run because it could not be isolated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one program."""

    seconds: float = 10.0  # of the wall clock, from its start
    cpu_seconds: int = 5  # per process
    memory_mib: int = 1024  # of addresses, per process
    processes: int = 16  # and threads, within bubblewrap
    files: int = 64  # that are open
    file_mib: int = 4  # per file; in bubblewrap all files together have four times as much
    output_bytes: int = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a program.

    Attributes:
      passed: whether the program reached its end within its limits.
      detail: the exception, the limit or the exit status of a program that did not pass.
      output: the beginning of its output.
    """

    passed: bool
    detail: str
    output: str


@functools.cache
def missing_isolation() -> str:
    """Returns the reason why programs cannot be isolated on this machine; empty if they can."""
    if shutil.which("bwrap") is None:
        return "bwrap is not on PATH"
    outcome = _run("", Limits(), isolated=True)
    return "" if outcome.passed else f"bwrap fails: {outcome.output.strip() or outcome.detail}"


def require_isolation() -> None:
    """Raises IsolationError if programs cannot be isolated on this machine."""
    if reason := missing_isolation():
        raise IsolationError(
            f"generated programs are not isolated on this machine, so none is run: {reason}. "
            "Install bubblewrap 0.7 or later (apt-get install bubblewrap) where namespaces are "
            "permitted; or insist (--run_unisolated), and they run as plain processes with limits"
        )


def run_isolated(program: str, limits: Limits = Limits(), *, insist: bool = False) -> Outcome:
    """Runs one program in a new process, and ends all processes that it started.

    Args:
      program: Python source.
      limits: limits of the program.
      insist: run the program as a plain process if this machine does not isolate it.

    Raises:
      IsolationError: the program cannot be isolated, and the caller does not insist.
    """
    if not insist:
        require_isolation()
    return _run(program, limits, isolated=not missing_isolation())


def run_all(
    programs: Iterable[str], limits: Limits = Limits(), *, insist: bool = False
) -> Iterator[Outcome]:
    """Runs programs with `run_isolated`, one per core at a time, and yields outcomes in order."""
    missing_isolation()  # once, not in every thread
    one = functools.partial(run_isolated, limits=limits, insist=insist)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(one, programs)


def bwrap_command(limits: Limits) -> list[str]:
    """Returns the bubblewrap command before the isolated command."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    paths = sorted({*READABLE, *prefixes, *map(os.path.realpath, prefixes)})
    command = ["bwrap", *SEPARATED]
    if os.geteuid() == 0:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    for path in [*paths, __file__]:
        for parent in reversed(pathlib.Path(path).parents):  # home folders, too, can be entered
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind-try", path, path]
    command += ["--dev", "/dev", "--perms", "1777"]
    command += ["--size", str(4 * limits.file_mib * MIB), "--tmpfs", WORK, "--chdir", WORK]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--"]


def _run(program: str, limits: Limits, isolated: bool) -> Outcome:
    word = secrets.token_hex(16).encode()
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        tempfile.TemporaryFile() as source,
        tempfile.TemporaryFile() as printed,
        tempfile.TemporaryDirectory(prefix="specsamp-", ignore_cleanup_errors=True) as folder,
    ):
        source.write(program.encode("utf-8", "surrogatepass"))
        source.seek(0)
        ours.send(word)
        request = {"channel": theirs.fileno(), "isolated": isolated} | dataclasses.asdict(limits)
        work = WORK if isolated else folder
        command = [sys.executable, "-I", "-u", __file__, json.dumps(request)]
        process = subprocess.Popen(
            bwrap_command(limits) + command if isolated else command,
            stdin=source,
            stdout=printed,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            cwd=folder,
            env=ENVIRONMENT | {"PATH": os.environ.get("PATH", ""), "HOME": work, "TMPDIR": work},
        )
        detail = ""
        try:
            process.wait(limits.seconds)
        except subprocess.TimeoutExpired:
            detail = f"longer than {limits.seconds} s"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        report = b""
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            report = ours.recv(4096)
        printed.seek(0)
        output = printed.read(limits.output_bytes + 1)
    if len(output) > limits.output_bytes:
        detail = f"more than {limits.output_bytes} bytes of output"
    elif report != word and not detail:
        detail = report.replace(word, b"", 1).decode("utf-8", "replace")
        if not report:
            detail = f"ended with exit status {code} before its last line"
        elif report == word + word:
            detail = "more than one process reached the last line"
    return Outcome(passed=not detail, detail=detail, output=output.decode("utf-8", "replace"))


def _be_program(request: dict) -> None:
    """Limits this process, runs the program of stdin as ``__main__``, and reports how it ended.

    The word is read first. While the program runs it is an operand of an unfinished sum: no
    descriptor can read it, and no variable of a frame and no object that Python lists holds it.
    """
    source = sys.stdin.buffer.read()
    _limit(request)
    channel = request["channel"]
    read = os.read
    write = os.write
    leave = os._exit
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    spare = bytearray(MIB)  # a report of too little memory needs some
    try:
        outcome = read(channel, 64) + (
            exec(compile(source, "<program>", "exec", dont_inherit=True), main.__dict__) or b""
        )
    except BaseException as error:
        del spare
        outcome = f"{type(error).__name__}: {error}".encode("utf-8", "replace")[:1000]
    write(channel, outcome)
    leave(0)


def _limit(request: dict) -> None:
    """Limits the resources of this process."""
    limits = {
        # The second signal cannot be caught.
        resource.RLIMIT_CPU: (request["cpu_seconds"], request["cpu_seconds"] + 1),
        resource.RLIMIT_AS: 2 * (request["memory_mib"] * MIB,),
        resource.RLIMIT_FSIZE: 2 * (request["file_mib"] * MIB,),
        resource.RLIMIT_NOFILE: 2 * (request["files"],),
        resource.RLIMIT_CORE: (0, 0),
    }
    if request["isolated"]:  # a plain process shares the count with the user's other processes
        limits[resource.RLIMIT_NPROC] = 2 * (request["processes"],)
        if os.geteuid() == 0:  # root's processes are not counted; those of this new user are
            user = (1 << 30) + secrets.randbelow(1 << 30)
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
    for kind, bounds in limits.items():
        # The limit is lower already, or the system does not have it.
        with contextlib.suppress(ValueError):
            resource.setrlimit(kind, bounds)


if __name__ == "__main__":
    _be_program(json.loads(sys.argv[1]))
