"""Runs one untrusted program in namespaces of its own. `isolation` starts this script; it needs Python alone.

    python jail.py '{"isolated": true, ...}'     # stdin: the program, then a secret word; see `isolation.run_isolated`

There are three processes: this script, which the caller can kill; the first process of the new namespaces, with which
all their processes end; and the program. The namespaces are of users, processes, network, mounts, and memory and queues
that are shared by number. The root folder is made in memory. It has Python and the system's libraries, which are
read-only, and a working folder. Root becomes nobody; no privileges are needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import types

NOBODY = 65534
WORK = "/program"  # the working folder, within the namespaces
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")

# From the kernel's headers; these numbers are the same on all machines.
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
NEW_NS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NOSUID, NODEV, BIND, REC, PRIVATE, DETACH = 0x2, 0x4, 0x1000, 0x4000, 0x40000, 0x2
MOUNT_SETATTR, AT_RECURSIVE, ATTR_RDONLY_NOSUID = 442, 0x8000, 0x3

# Numbers of system calls by machine.
CALLS = {"x86_64": {"pivot_root": 155, "capset": 126}, "aarch64": {"pivot_root": 41, "capset": 91}}
libc = ctypes.CDLL(None, use_errno=True)


def enter() -> None:
    """Builds the namespaces, starts the program in them, and exits with its status."""
    request = json.loads(sys.argv[1])
    os.umask(0o022)
    die_with_parent()
    source = bytearray()
    while len(source) < request["bytes"]:  # the word, which follows, stays in the pipe
        source += os.read(0, request["bytes"] - len(source))
    is_root = False
    try:
        os.chdir(request["folder"])
        if request["isolated"]:
            is_root = enter_namespaces()
            build_root(request["folder"], request["readable"], request["file_mib"])
    except OSError as error:
        refuse(request, error)
    if (first := os.fork()) == 0:
        die_with_parent()
        if (program := os.fork()) == 0:
            be_program(request, source, is_root)
        end_as(program)
    end_as(first)


def be_program(request: dict, source: bytearray, is_root: bool) -> None:
    """Drops privileges, sets limits, and runs the program."""
    try:
        if request["isolated"]:
            os.setsid()
            drop_privileges(is_root)
        die_with_parent()  # a change of user has cleared it
        os.environ["HOME"] = os.environ["TMPDIR"] = os.getcwd()
        set_limits(request)
        word = os.dup(0)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    except OSError as error:
        refuse(request, error)
    os.write(request["report"], b"ready\n")
    run_program(source.decode("utf-8", "surrogatepass"), word, request["report"])


def run_program(source: str, word: int, report: int) -> None:
    """Runs a program as ``__main__``, reports how it ended, and ends the process.

    The word is read first. While the program runs it is an operand of an unfinished sum: no descriptor can read it, and
    no variable of a frame and no object that Python lists holds it.
    """
    read, write, leave = os.read, os.write, os._exit  # the program may replace them
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    spare = bytearray(1 << 20)  # a report of too little memory needs some
    try:
        outcome = read(word, 64) + (exec(compile(source, "<program>", "exec", dont_inherit=True), main.__dict__) or b"")
    except MemoryError:
        del spare
        outcome = b"memory\n"
    except BaseException as error:
        outcome = f"failed\n{type(error).__name__}: {error}".encode("utf-8", "replace")[:1000]
    write(report, outcome)
    leave(0)


def refuse(request: dict, error: OSError) -> None:
    """Reports that the kernel refuses the namespaces, and ends the process."""
    os.write(request["report"], f"refused\nthe kernel refuses namespaces: {error}".encode())
    os._exit(1)


def end_as(child: int) -> None:
    """Waits for a child and for orphans, and exits with the child's status: 128 and the signal's number after a signal."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def die_with_parent() -> None:
    """Lets the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def enter_namespaces() -> bool:
    """Enters new namespaces, and returns whether the process is still the machine's root."""
    flags = NEW_NS | NEW_UTS | NEW_IPC | NEW_PID | NEW_NET
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        with contextlib.suppress(OSError):  # a root without the privilege goes on like other users
            succeeded(libc.unshare(flags))
            return True
    succeeded(libc.unshare(flags | NEW_USER))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return False


def build_root(folder: str, readable: list[str], file_mib: int) -> None:
    """Mounts a root in memory over ``folder``, in which only WORK can be written, and enters it."""
    mount("", "/", "", REC | PRIVATE)
    mount("tmpfs", folder, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    for path in [*readable, *DEVICES]:
        place = folder + path
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), place)
            continue
        if os.path.isdir(path):
            os.mkdir(place)
        else:
            os.close(os.open(place, os.O_CREAT))
        mount(path, place, "", BIND | REC)
    os.mkdir(folder + WORK)
    attributes = struct.pack("4Q", ATTR_RDONLY_NOSUID, 0, 0, 0)
    syscall(MOUNT_SETATTR, -100, folder.encode(), AT_RECURSIVE, attributes, len(attributes))
    mount("tmpfs", folder + WORK, "tmpfs", NOSUID | NODEV, f"size={4 * file_mib}m,nr_inodes=1k,mode=1777")
    os.chdir(folder)
    syscall(call_number("pivot_root"), b".", b".")
    succeeded(libc.umount2(b".", DETACH))
    os.chdir(WORK)


def drop_privileges(is_root: bool) -> None:
    """Becomes nobody if it is root, and gives up all capabilities for good."""
    if is_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        succeeded(libc.unshare(NEW_USER))  # its processes are counted apart from nobody's other processes
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    syscall(call_number("capset"), struct.pack("Ii", 0x20080522, 0), bytes(24))


def set_limits(request: dict) -> None:
    """Limits resources; the number of processes only where the user has no other processes."""
    limits = {
        resource.RLIMIT_CPU: (request["cpu_seconds"], request["cpu_seconds"] + 1),  # the second signal cannot be caught
        resource.RLIMIT_AS: 2 * (request["memory_mib"] << 20,),
        resource.RLIMIT_FSIZE: 2 * (request["file_mib"] << 20,),
        resource.RLIMIT_NOFILE: 2 * (request["files"],),
        resource.RLIMIT_CORE: (0, 0),
    }
    if request["isolated"]:
        limits[resource.RLIMIT_NPROC] = 2 * (request["processes"],)
    for kind, (soft, hard) in limits.items():
        with contextlib.suppress(ValueError):  # the limit is lower already, or the system does not have it
            resource.setrlimit(kind, (soft, hard))


def call_number(call: str) -> int:
    """Returns this machine's number of a system call."""
    machine = os.uname().machine
    if machine not in CALLS:
        raise OSError(f"the system calls of {machine} are not known, only of {', '.join(CALLS)}")
    return CALLS[machine][call]


def mount(source: str, place: str, kind: str, flags: int, options: str = "") -> None:
    """Mounts ``source`` at ``place``; strings may be empty."""
    succeeded(libc.mount(source.encode(), place.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()))


def prctl(*arguments: int | bytes) -> None:
    """Calls prctl with up to five arguments."""
    succeeded(libc.prctl(*map(_word, [*arguments, 0, 0, 0, 0][:5])))


def syscall(*arguments: int | bytes | None) -> int:
    """Calls the kernel by a system call's number."""
    return succeeded(libc.syscall(*map(_word, arguments)))


def _word(argument: int | bytes | None) -> ctypes.c_long | bytes | None:
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def succeeded(result: int) -> int:
    """Returns a call's result; raises OSError if it is negative."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


if __name__ == "__main__":
    enter()
