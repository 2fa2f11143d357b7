"""Hostile programs in isolation; the control is the same programs without it."""

import dataclasses
import http.server
import os
import pathlib
import shutil
import socket
import threading

import pytest

from specsamp.evaluation import isolation
from specsamp.evaluation.isolation import IsolationError, Limits, run_all, run_isolated, why_not_isolated

LIMITS = Limits(seconds=20, memory_mib=256, output_kib=4)
SHORT = dataclasses.replace(LIMITS, seconds=1, cpu_seconds=1)

# An attack that succeeds reaches its end. {port}, {file} and {pid}: a server, a file and the process of the tests.
REACHES = {
    "connects": "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
    "asks for an address": "import socket; socket.getaddrinfo('localhost', 80)",
    "sends a datagram": "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('127.0.0.1', {port}))",
    "reads a file": "open({file!r}).read()",
    "adds to a file": "open({file!r}, 'a').write('x')",
    "writes beside a file": "open({file!r} + '.new', 'w')",
    "changes the mode of a file": "import os; os.chmod({file!r}, 0o600)",
    "lists home": "import os; os.listdir(os.path.dirname({file!r}))",
    "finds the tests": "import os; os.kill({pid}, 0)",
    "signals by a descriptor": "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, {pid})",
}
# Searches for the word of a program that passed, and reports it.
PRY = """
import gc, os, re, sys
found, frame = [], sys._getframe()
while frame:
    found += frame.f_locals.values()
    frame = frame.f_back
for held in gc.get_objects():
    found += gc.get_referents(held)
for number in range(64):
    try:
        os.set_blocking(number, False)
        found.append(os.read(number, 64))
    except OSError:
        pass
for word in {bytes(one) for one in found if type(one) in (bytes, bytearray) and re.fullmatch(b"[0-9a-f]{32}", one)}:
    for number in range(3, 64):
        try:
            os.write(number, word)
        except OSError:
            pass
os._exit(0)
"""
ENDLESS = {
    "loops": "while True: pass",
    "sleeps": "import time; time.sleep(100)",
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "heeds its parent's end no longer": "import ctypes, time; ctypes.CDLL(None).prctl(1, 0); time.sleep(100)",
    "heeds no signal": "from signal import *\nfor n in (SIGTERM, SIGXCPU): signal(n, SIG_IGN)\nwhile True: pass",
}
ENDS = {
    "prints without end": ("while True: print('x' * 1000)", "output"),
    "takes memory": ("x = bytearray(1 << 30)", "memory"),
    "takes memory slowly": ("x = []\nwhile True: x.append(bytearray(1 << 20))", "memory"),
    "exits": ("import sys; sys.exit(0)", "failed"),
    "exits at once": ("import os; os._exit(0)", "failed"),
    "becomes another program": ("import os; os.execv('/bin/true', ['true'])", "failed"),
    "closes everything": ("import os; os.closerange(0, 256)", "failed"),
    "writes everywhere": (
        "import os\nfor n in range(3, 64):\n    try: os.write(n, b'passed\\nready\\nrefused\\n')\n    except OSError: pass\nos._exit(0)",
        "failed",
    ),
    "looks for what it is judged by": (PRY, "failed"),
    "replaces what it is judged by": (
        "import builtins, os, sys\nos.write = lambda *_: 0\nos._exit = sys.exit = lambda *_: None\n"
        "builtins.AssertionError = builtins.BaseException = KeyError\nassert False",
        "failed",
    ),
    "ends in a thread": ("import _thread, os\n_thread.start_new_thread(os._exit, (0,))\nwhile True: pass", "failed"),
    "recurses": ("def f(): f()\nf()", "failed"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "killed"),
    "is nested too deep": ("x = " + "(" * 100_000, "failed"),
    "is no text": ("x = '\ud800'", "failed"),
    "is long": ("#" * 20_000_000, "passed"),
    "fills a disk": ("while True: open('a', 'ab').write(bytes(1 << 20))", "failed"),
    "opens pipes": ("import os\nwhile True: os.pipe()", "failed"),
    "asks": ("input()", "failed"),
}
# Attacks that are not tried without isolation.
BOMBS = {
    "forks": "import os\nwhile True: os.fork()",
    "starts threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()",
    "kills all": "import contextlib, os\nfor pid in (-1, os.getppid(), 0):\n    with contextlib.suppress(OSError): os.kill(pid, 9)",
    "deletes a file": "import os; os.unlink({file!r})",
    "cuts a file short": "import os; os.truncate({file!r}, 0)",
    "sends a datagram from a pair": "import socket; socket.socketpair(type=2)[0].sendto(b'', {socket!r})",
    "deletes Python": "import os; os.unlink(os.__file__)",
}


@pytest.fixture
def processes(tmp_path_factory, monkeypatch):
    """Returns the processes that programs of this test have left."""
    jail = shutil.copy(isolation.JAIL, tmp_path_factory.mktemp("jail"))  # its path names this test's processes
    monkeypatch.setattr(isolation, "JAIL", jail)
    return lambda: [path for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if str(jail) in read(path)]


def read(path):
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def isolated(processes):
    """Skips a test where programs cannot be isolated; no process may be left."""
    if why := why_not_isolated():
        pytest.skip(why)
    yield
    assert processes() == []


@pytest.fixture
def outside(tmp_path, tmp_path_factory):
    """Servers, a file and a process."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    file = tmp_path / "diary"
    file.write_text("secret")
    datagrams, address = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), str(tmp_path_factory.mktemp("socket") / "s")
    datagrams.bind(address)
    yield {"port": server.server_port, "file": str(file), "pid": os.getpid(), "socket": address}
    datagrams.close()
    assert file.read_text() == "secret"
    assert list(tmp_path.iterdir()) == [file]
    server.shutdown()
    server.server_close()


def ends(programs, limits=LIMITS, **options):
    outcomes = run_all(programs.values(), limits, **options)
    return {name: outcome.status for name, outcome in zip(programs, outcomes, strict=True)}


def test_nothing_is_reached(isolated, outside):
    programs = {name: text.format(**outside) for name, text in {**REACHES, **BOMBS}.items()}
    assert ends(programs) == dict.fromkeys(programs, "failed") | {"kills all": "killed"}


def test_without_isolation_everything_is_reached(outside, monkeypatch):
    """The control: without namespaces the attacks succeed."""
    monkeypatch.setattr(isolation, "why_not_isolated", lambda: "the test says so")
    programs = {name: text.format(**outside) for name, text in REACHES.items()}
    assert ends(programs, insist=True) == dict.fromkeys(programs, "passed")
    pathlib.Path(outside["file"]).write_text("secret")
    pathlib.Path(outside["file"] + ".new").unlink()


def test_programs_end(isolated):
    assert ends({name: text for name, (text, _) in ENDS.items()}) == {
        name: status for name, (_, status) in ENDS.items()
    }
    assert ends(ENDLESS, SHORT, workers=len(ENDLESS)) == dict.fromkeys(ENDLESS, "timeout")


def test_files_and_processes(isolated):
    """Files cannot be written, or fill the memory, and processes end with the program."""
    read_only = "import os, sys\nfor path in ('/', '/usr', sys.prefix, os.__file__): assert os.statvfs(path).f_flag & 1"
    assert run_isolated(read_only, LIMITS).passed
    many = "for n in range(5): open(str(n), 'wb').write(bytes(4 << 20))"
    assert "No space left" in run_isolated(many, LIMITS).detail
    daemon = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 64)
    time.sleep(60)
"""
    assert run_isolated(daemon, LIMITS).passed


def test_what_passes(isolated):
    """Ordinary programs with libraries, a working folder and output."""
    outcome = run_isolated("import numpy, threading\nopen('a', 'w').write('b')\nprint(open('a').read())")
    assert (outcome.status, outcome.output) == ("passed", "b\n")
    outcome = run_isolated("print(1)\nassert 1 == 2, 'one'")
    assert (outcome.status, outcome.detail, outcome.output) == ("failed", "AssertionError: one", "1\n")
    assert run_isolated("@__import__('dataclasses').dataclass\nclass A:\n    x: int\nassert A(1) == A(1)").passed


def test_without_isolation_nothing_runs_unless_the_caller_insists(monkeypatch):
    monkeypatch.setattr(isolation, "PROBE", "print('files')\nopen('own', 'w').write('')")
    monkeypatch.setattr(isolation, "why_not_isolated", why_not_isolated.__wrapped__)
    with pytest.raises(IsolationError, match="does not isolate them: .*; or insist"):
        run_isolated("x = 1")
    assert run_isolated("x = 1", insist=True).passed


def test_a_refusal_of_the_kernel_lets_nothing_run(isolated, monkeypatch):
    monkeypatch.setattr(isolation, "readable", lambda: ["/no/such/folder"])
    assert "refuses namespaces: " in why_not_isolated.__wrapped__()
    with pytest.raises(IsolationError, match="refuses namespaces: .*No such file"):
        run_isolated("x = 1")


def test_a_harmless_program_must_run(isolated, monkeypatch):
    """Root has Python in its home, which nobody may not read."""
    monkeypatch.setattr(isolation, "PROBE", "import _no_such")
    assert "a harmless program fails in namespaces (ModuleNotFound" in why_not_isolated.__wrapped__()


def test_other_systems_have_no_namespaces(monkeypatch):
    monkeypatch.setattr(isolation.sys, "platform", "darwin")
    assert why_not_isolated.__wrapped__() == "only Linux has namespaces"
