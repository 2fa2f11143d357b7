"""Builds walls around one untrusted program and runs it. `isolation` starts this script; it needs
Python and jail.json.

    python jail.py '{"walls": [...], ...}'     # stdin: the program, then a secret word

There are three processes: this script, which the caller can kill; the first process of the new
namespaces, with which all their processes end; and the program. A wall that the kernel does not
offer raises OSError:

- ``namespaces`` of users, processes, network and mounts. The root folder is made in memory. It has
  Python and the system's libraries, which are read-only, and a working folder. Root becomes nobody;
  no privileges are needed.
- ``landlock``: a list of the folders that can be read and written, for machines without namespaces.
  Names and sizes of other files stay visible.
- ``system calls``: a filter that refuses sockets, new processes, signals to other processes, memory
  and queues that are shared by number, and changes of other users' files.
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
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
NEW_NS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = (
    0x20000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
NOSUID, NODEV, BIND, REC, PRIVATE, DETACH = 0x2, 0x4, 0x1000, 0x4000, 0x40000, 0x2
MOUNT_SETATTR, AT_RECURSIVE, ATTR_RDONLY_NOSUID = 442, 0x8000, 0x3
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8  # rights of Landlock
BPF_LOAD, BPF_EQUAL, BPF_LEAST, BPF_ANY_BIT, BPF_RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, UNKNOWN, KILL = 0x7FFF0000, 0x50000 + 1, 0x50000 + 38, 0x80000000  # EPERM, ENOSYS
CLONE_THREAD, CLONE3 = 0x10000, 435
F_SETOWN, F_SETSIG, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP = 8, 10, 15, 0x8901, 0x8902
SOCK_DATAGRAM = 2  # a bit that streams do not have

# Column of the numbers of calls, and architecture.
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
libc = ctypes.CDLL(None, use_errno=True)
# Of a filter: operation, steps to skip if true and if false, value.
Step = tuple[int, int, int, int]

# Numbers of system calls, by the columns of `MACHINES`; null where the machine has no such call.
# "needed" are those that the jail makes (clone: for threads), "of_itself" those that a program may
# make for its own process.
with open(os.path.splitext(os.path.abspath(__file__))[0] + ".json", encoding="utf-8") as _file:
    CALLS = json.load(_file)
# Calls that are refused with some values of an argument: their numbers, the argument's place, the
# test, and the values.
REFUSED_WITH = {
    # The program would outlive its parent.
    "prctl": ((157, 167), 0, BPF_EQUAL, (PR_SET_PDEATHSIG,)),
    # A descriptor would signal other processes.
    "fcntl": ((72, 25), 1, BPF_EQUAL, (F_SETOWN, F_SETSIG, F_SETOWN_EX)),
    "ioctl": ((16, 29), 1, BPF_EQUAL, (FIOSETOWN, SIOCSPGRP)),  # the same for sockets
    "socketpair": ((53, 199), 1, BPF_ANY_BIT, (SOCK_DATAGRAM,)),  # datagrams can be sent elsewhere
}


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
        if "namespaces" in request["walls"]:
            is_root = enter_namespaces()
            build_root(request["folder"], request["readable"], request["file_mib"])
    except OSError as error:
        report_missing(request, "namespaces", error)
    if (first := os.fork()) == 0:
        die_with_parent()
        if (program := os.fork()) == 0:
            be_program(request, source, is_root)
        end_as(program)
    end_as(first)


def be_program(request: dict, source: bytearray, is_root: bool) -> None:
    """Drops privileges, builds the walls of a single process, and runs the program."""
    walls, wall = request["walls"], "namespaces"
    try:
        if walls:
            os.setsid()
            drop_privileges(is_root)
        die_with_parent()  # a change of user has cleared it
        os.environ["HOME"] = os.environ["TMPDIR"] = work = os.getcwd()
        if (wall := "landlock") in walls:
            restrict_files(request["readable"], work)
        set_limits(request, own_user="namespaces" in walls)
        word = os.dup(0)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        if (wall := "system calls") in walls:
            filter_calls()
    except OSError as error:
        report_missing(request, wall, error)
    os.write(request["report"], b"ready\n")
    run_program(source.decode("utf-8", "surrogatepass"), word, request["report"])


def run_program(source: str, word: int, report: int) -> None:
    """Runs a program as ``__main__``, reports how it ended, and ends the process.

    The word is read first. While the program runs it is an operand of an unfinished sum: no
    descriptor can read it, and no variable of a frame and no object that Python lists holds it.
    """
    read, write, leave = os.read, os.write, os._exit  # the program may replace them
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    spare = bytearray(1 << 20)  # a report of too little memory needs some
    try:
        outcome = read(word, 64) + (
            exec(compile(source, "<program>", "exec", dont_inherit=True), main.__dict__) or b""
        )
    except MemoryError:
        del spare
        outcome = b"memory\n"
    except BaseException as error:
        outcome = f"failed\n{type(error).__name__}: {error}".encode("utf-8", "replace")[:1000]
    write(report, outcome)
    leave(0)


def report_missing(request: dict, wall: str, error: OSError) -> None:
    """Reports that a wall cannot be built, and ends the process."""
    os.write(request["report"], f"refused\n{wall}: {error}".encode())
    os._exit(1)


def end_as(child: int) -> None:
    """Waits for a child and for orphans, and exits with the child's status: 128 and the signal's
    number after a signal.
    """
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
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {uid} 1"),
        ("gid_map", f"{NOBODY} {gid} 1"),
    ):
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
    mount(
        "tmpfs",
        folder + WORK,
        "tmpfs",
        NOSUID | NODEV,
        f"size={4 * file_mib}m,nr_inodes=1k,mode=1777",
    )
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
        # Its processes are counted apart from nobody's other processes.
        succeeded(libc.unshare(NEW_USER))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    syscall(call_number("capset"), struct.pack("Ii", 0x20080522, 0), bytes(24))


def restrict_files(readable: list[str], work: str) -> None:
    """Restricts the process by Landlock: it reads ``readable`` and changes files in ``work``."""
    version = syscall(LANDLOCK_CREATE, None, 0, 1)
    if version < 3:
        raise OSError(
            f"Landlock's version {version} does not protect files from truncation: Linux 6.2 has "
            "version 3"
        )
    every_right = (1 << (16 if version >= 5 else 15)) - 1
    # The rights of files, the two of TCP, and two scopes: signals and abstract sockets.
    attributes = struct.pack("3Q", every_right, 3, 3)[
        : 24 if version >= 6 else 16 if version >= 4 else 8
    ]
    rules = syscall(LANDLOCK_CREATE, attributes, len(attributes), 0)
    rights = {
        path: EXECUTE | READ_FILE | (READ_DIR if os.path.isdir(path) else 0) for path in readable
    }
    for path, allowed in {
        **rights,
        **dict.fromkeys(DEVICES, READ_FILE | WRITE_FILE),
        work: every_right,
    }.items():
        handle = os.open(path, os.O_PATH)
        syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, handle), 0)
        os.close(handle)
    syscall(LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def set_limits(request: dict, own_user: bool) -> None:
    """Limits resources; the number of processes only where the user has no other processes."""
    limits = {
        # The second signal cannot be caught.
        resource.RLIMIT_CPU: (request["cpu_seconds"], request["cpu_seconds"] + 1),
        resource.RLIMIT_AS: 2 * (request["memory_mib"] << 20,),
        resource.RLIMIT_FSIZE: 2 * (request["file_mib"] << 20,),
        resource.RLIMIT_NOFILE: 2 * (request["files"],),
        resource.RLIMIT_CORE: (0, 0),
    }
    if own_user:
        limits[resource.RLIMIT_NPROC] = 2 * (request["processes"],)
    for kind, (soft, hard) in limits.items():
        # The limit is lower already, or the system does not have it.
        with contextlib.suppress(ValueError):
            resource.setrlimit(kind, (soft, hard))


def filter_calls() -> None:
    """Refuses system calls that reach other processes, a network or other users' files; threads are
    allowed.
    """
    column, architecture = machine()
    refused = [pair[column] for kind in CALLS["refused"].values() for pair in kind.values()]
    allow, refuse = (BPF_RETURN, 0, 0, ALLOW), (BPF_RETURN, 0, 0, REFUSE)
    steps = [
        (BPF_LOAD, 0, 0, 4),
        (BPF_EQUAL, 1, 0, architecture),
        (BPF_RETURN, 0, 0, KILL),
        (BPF_LOAD, 0, 0, 0),
    ]
    if column == 0:  # the numbers of another convention of the same machine
        steps += [(BPF_LEAST, 0, 1, 0x40000000), refuse]
    for number in refused:
        steps += of_call(number, refuse) if number is not None else []
    for pair, place, test, values in REFUSED_WITH.values():
        tests = [step for value in values for step in ((test, 0, 1, value), refuse)]
        steps += of_call(pair[column], load_argument(place), *tests, allow)
    # A filter cannot read its flags; libraries then use clone.
    steps += of_call(CLONE3, (BPF_RETURN, 0, 0, UNKNOWN))
    steps += of_call(
        call_number("clone"), load_argument(0), (BPF_ANY_BIT, 0, 1, CLONE_THREAD), allow, refuse
    )
    for pair in CALLS["of_itself"].values():
        tests = [(BPF_EQUAL, 0, 1, 0), allow, (BPF_EQUAL, 0, 1, os.getpid()), allow]
        steps += of_call(pair[column], load_argument(0), *tests, refuse)
    steps.append(allow)
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    prctl(PR_SET_SECCOMP, 2, struct.pack("HP", len(steps), ctypes.addressof(program)))


def of_call(call: int, *steps: Step) -> list[Step]:
    """Returns the steps of a filter for one call; the last step must be a verdict."""
    return [(BPF_EQUAL, 0, len(steps), call), *steps]


def load_argument(place: int) -> Step:
    """Returns the step of a filter that loads the lower half of a call's argument."""
    return (BPF_LOAD, 0, 0, 16 + 8 * place)


def machine() -> tuple[int, int]:
    """Returns the column of this machine's numbers, and its architecture."""
    name = os.uname().machine
    if name not in MACHINES:
        raise OSError(f"the system calls of {name} are not known, only of {', '.join(MACHINES)}")
    return MACHINES[name]


def call_number(call: str) -> int:
    """Returns this machine's number of a system call."""
    return CALLS["needed"][call][machine()[0]]


def mount(source: str, place: str, kind: str, flags: int, options: str = "") -> None:
    """Mounts ``source`` at ``place``; strings may be empty."""
    succeeded(
        libc.mount(
            source.encode(), place.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
        )
    )


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
