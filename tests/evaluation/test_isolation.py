"""Hostile programs in bubblewrap, where it works; plain processes are the control."""

import http.server
import os
import pathlib
import shutil
import threading
import time
import tomllib

import pytest

from specsamp.evaluation import isolation
from specsamp.evaluation.isolation import IsolationError, Limits, run_all, run_isolated

LIMITS = Limits(seconds=20, memory_mib=256, output_bytes=4096)
SHORT = Limits(seconds=1, cpu_seconds=1)
PROGRAMS = tomllib.loads(pathlib.Path(__file__).with_name("hostile_programs.toml").read_text())
ENDS = PROGRAMS["ends"] | {
    "is nested too deep": "x = " + "(" * 100_000,
    "is no text": "x = '\ud800'",
}


@pytest.fixture(params=[True, False], ids=["bubblewrap", "plain process"])
def isolated(request, tmp_path_factory, monkeypatch):
    """Runs programs in bubblewrap or as plain processes, and checks that none is left."""
    script = tmp_path_factory.mktemp("isolation") / "script.py"  # names this test's processes
    shutil.copy(isolation.__file__, script)
    monkeypatch.setattr(isolation, "__file__", str(script))
    if request.param and (reason := isolation.missing_isolation()):
        pytest.skip(reason)
    monkeypatch.setattr(isolation, "missing_isolation", lambda: "" if request.param else "absent")
    yield request.param
    deadline = time.monotonic() + 5
    while (left := processes_of(script)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def processes_of(script):
    commands = pathlib.Path("/proc").glob("[0-9]*/cmdline")
    return [path for path in commands if str(script) in read(path)]


def read(path):
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def outside(tmp_path):
    """Returns a server, a file and a process for attacks."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    file = tmp_path / "diary"
    file.write_text("secret")
    yield {"port": server.server_port, "file": str(file), "pid": os.getpid()}
    server.shutdown()
    server.server_close()


def passed(programs, limits=LIMITS):
    outcomes = run_all(programs.values(), limits, insist=True)
    return {name: one.passed for name, one in zip(programs, outcomes, strict=True)}


def test_bubblewrap_lets_no_attack_reach_outside(isolated, outside):
    """Plain processes, the control, reach everything."""
    programs = {name: text.format(**outside) for name, text in PROGRAMS["reaches"].items()}
    assert passed(programs) == dict.fromkeys(programs, not isolated)
    if isolated:
        bombs = {name: text.format(**outside) for name, text in PROGRAMS["bombs"].items()}
        assert passed(bombs) == dict.fromkeys(bombs, False)
        assert pathlib.Path(outside["file"]).read_text() == "secret"


def test_programs_before_their_last_line_fail(isolated):
    assert passed(ENDS) == dict.fromkeys(ENDS, False)
    endless = PROGRAMS["endless"]
    assert passed(endless, SHORT) == dict.fromkeys(endless, False)


def test_ordinary_programs_pass(isolated):
    """Programs use libraries, threads, a working folder and output; one has a source of 20 MB."""
    numpy = "import numpy, threading\nopen('a', 'w').write('b')\nprint(open('a').read())"
    assert run_isolated(numpy, insist=True).output == "b\n"
    data = "@__import__('dataclasses').dataclass\nclass A:\n    x: int\nassert A(1) == A(1)"
    assert passed({"numpy": numpy, "data": data, "long": "#" * 20_000_000}, Limits()) == {
        "numpy": True,
        "data": True,
        "long": True,
    }


@pytest.mark.parametrize(
    "program, detail",
    [
        ("print(1)\nassert 1 == 2, 'one'", "AssertionError: one"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("while True: print('x' * 1000)", "more than 4096 bytes of output"),
        ("import os; os._exit(3)", "exit status 3"),
        ("import os, time; time.sleep(0.2 * (os.fork() > 0))", "more than one process"),
    ],
)
def test_detail_names_the_failure(isolated, program, detail):
    assert detail in run_isolated(program, LIMITS, insist=True).detail


STAND_IN = """#!/bin/sh
echo "$@" > "$0.arguments"
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""


@pytest.fixture
def bwrap(tmp_path, monkeypatch):
    """Returns a function that puts a stand-in of bubblewrap on PATH, or empties PATH."""
    isolation.missing_isolation.cache_clear()

    def install(script):
        path = tmp_path / "bwrap"
        path.write_text(script)
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}" if script else "")
        return tmp_path / "bwrap.arguments"

    yield install
    isolation.missing_isolation.cache_clear()


def test_bubblewrap_has_no_network_or_disk(bwrap):
    arguments = bwrap(STAND_IN)
    assert run_isolated("print('ran')").output == "ran\n"
    options = f" {arguments.read_text().partition(' -- ')[0]} "
    for option in (
        "--die-with-parent",
        "--new-session",
        "--unshare-net",
        "--unshare-pid",
        "--size 16777216 --tmpfs /program",
        "--ro-bind-try /usr /usr",
        "--remount-ro /",
    ):
        assert f" {option} " in options
    assert not {"--bind", "--dev-bind", "--share-net", "--proc"} & set(options.split())


@pytest.mark.parametrize(
    "script, reason",
    [
        ("", "bwrap is not on PATH"),
        ("#!/bin/sh\necho no namespaces; exit 1\n", "bwrap fails: no namespaces"),
    ],
)
def test_without_bubblewrap_nothing_runs_unless_the_caller_insists(bwrap, script, reason):
    bwrap(script)
    with pytest.raises(IsolationError, match=f"{reason}. Install bubblewrap.*--run_unisolated"):
        run_isolated("x = 1")
    assert run_isolated("x = 1", insist=True).passed
