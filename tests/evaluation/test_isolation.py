"""Hostile programs, within every combination of walls that this machine has; the control is the
same without walls.
"""

import dataclasses
import http.server
import json
import os
import pathlib
import re
import shutil
import socket
import threading
import tomllib

import pytest

from specsamp.evaluation import isolation
from specsamp.evaluation.isolation import (
    ASPECTS,
    WALLS,
    Isolation,
    IsolationError,
    Limits,
    find_isolation,
    run_all,
    run_isolated,
)

LIMITS = Limits(seconds=20, memory_mib=256, output_kib=4)
SHORT = dataclasses.replace(LIMITS, seconds=1, cpu_seconds=1)
FALLBACK = ("landlock", "system calls")  # of machines without namespaces

PROGRAMS = tomllib.loads(pathlib.Path(__file__).with_name("hostile_programs.toml").read_text())
REACHES, BOMBS, ENDLESS, ENDS = (PROGRAMS[name] for name in ("reaches", "bombs", "endless", "ends"))
ENDS["failed"] |= {"is nested too deep": "x = " + "(" * 100_000, "is no text": "x = '\ud800'"}
ENDS["passed"] = {"is long": "#" * 20_000_000}


@pytest.fixture
def processes(tmp_path_factory, monkeypatch):
    """Returns the processes that programs of this test have left."""
    folder = tmp_path_factory.mktemp("jail")
    shutil.copy(isolation.JAIL.with_suffix(".json"), folder)
    jail = shutil.copy(isolation.JAIL, folder)  # its path names this test's processes
    monkeypatch.setattr(isolation, "JAIL", jail)
    return lambda: [
        path for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if str(jail) in read(path)
    ]


def read(path):
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@pytest.fixture(params=[WALLS, FALLBACK], ids=["all walls", "without namespaces"])
def walls(request, processes):
    """Isolates by some of the walls; no process may be left."""
    found = find_isolation(request.param)
    if request.param[0] in found.missing or (found.missing and not found.suffices):
        pytest.skip("; ".join(found.sentences))
    # No wall is missing, so all must hold.
    assert found.missing or all(found.by.values()), found.sentences
    yield found
    assert processes() == []


@pytest.fixture
def outside(tmp_path, tmp_path_factory):
    """Returns a server, a file, a process and a socket for attacks."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    file = tmp_path / "diary"
    file.write_text("secret")
    datagrams, address = (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
        str(tmp_path_factory.mktemp("socket") / "s"),
    )
    datagrams.bind(address)
    yield {"port": server.server_port, "file": str(file), "pid": os.getpid(), "socket": address}
    datagrams.close()
    assert file.read_text() == "secret"
    assert list(tmp_path.iterdir()) == [file]
    server.shutdown()
    server.server_close()


def ends(programs, walls, limits=LIMITS, **options):
    outcomes = run_all(programs.values(), limits, isolation=walls, **options)
    return {name: outcome.status for name, outcome in zip(programs, outcomes, strict=True)}


def test_nothing_is_reached(walls, outside):
    programs = {name: text.format(**outside) for name, text in {**REACHES, **BOMBS}.items()}
    assert ends(programs, walls) == dict.fromkeys(programs, "failed")


def test_without_walls_everything_is_reached(outside):
    """The control: without walls the attacks succeed."""
    none = find_isolation(())
    assert not any(none.by[aspect] for aspect in ASPECTS if aspect != "memory")
    assert not none.suffices
    programs = {name: text.format(**outside) for name, text in REACHES.items()}
    assert ends(programs, none, insist=True) == dict.fromkeys(programs, "passed")
    pathlib.Path(outside["file"]).write_text("secret")
    pathlib.Path(outside["file"] + ".new").unlink()


def test_programs_end(walls):
    for status, programs in ENDS.items():
        assert ends(programs, walls) == dict.fromkeys(programs, status)
    assert ends(ENDLESS, walls, SHORT, workers=len(ENDLESS)) == dict.fromkeys(ENDLESS, "timeout")


def test_the_filter_refuses_calls():
    """None of them is refused without walls."""
    found = find_isolation(FALLBACK)
    if "system calls" in found.missing:
        pytest.skip("; ".join(found.sentences))
    left, count = output_lines(PROGRAMS["calls"]["program"], find_isolation(()))
    assert len(json.loads(left)) == int(count)
    assert json.loads(output_lines(PROGRAMS["calls"]["program"], found)[0]) == []


def output_lines(program, walls):
    outcome = run_isolated(program, LIMITS, isolation=walls, insist=True)
    assert outcome.passed, outcome.detail
    return outcome.output.splitlines()


def test_namespaces_alone(processes):
    """Namespaces by themselves: files cannot be written, processes are counted, and end with the
    program.
    """
    alone = find_isolation(("namespaces",))
    if alone.missing:
        pytest.skip("; ".join(alone.sentences))
    assert alone.suffices, alone.sentences
    read_only = (
        "import os, sys\nfor path in ('/', '/usr', sys.prefix, os.__file__): assert "
        "os.statvfs(path).f_flag & 1"
    )
    assert run_isolated(read_only, LIMITS, isolation=alone).passed
    many = "for n in range(5): open(str(n), 'wb').write(bytes(4 << 20))"
    assert "No space left" in run_isolated(many, LIMITS, isolation=alone).detail
    daemon = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 64)
    time.sleep(60)
"""
    assert run_isolated(daemon, LIMITS, isolation=alone).passed
    if os.geteuid() or is_privileged():  # the kernel does not count the processes of any other root
        assert alone.by["processes"], alone.sentences
        assert run_isolated(BOMBS["forks"], LIMITS, isolation=alone).status == "failed"
    assert processes() == []


def is_privileged():
    """Returns whether this process may build namespaces as root."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"CapEff:\s*(\w+)", status)[1], 16) >> 21 & 1


def test_what_passes(walls):
    """Ordinary programs with libraries, a working folder and output."""
    outcome = run_isolated(
        "import numpy, threading\nopen('a', 'w').write('b')\nprint(open('a').read())",
        isolation=walls,
    )
    assert (outcome.status, outcome.output) == ("passed", "b\n")
    outcome = run_isolated("print(1)\nassert 1 == 2, 'one'", isolation=walls)
    assert (outcome.status, outcome.detail, outcome.output) == (
        "failed",
        "AssertionError: one",
        "1\n",
    )
    assert run_isolated(
        "@__import__('dataclasses').dataclass\nclass A:\n    x: int\nassert A(1) == A(1)",
        isolation=walls,
    ).passed


def test_without_isolation_nothing_runs_unless_the_caller_insists(tmp_path):
    open_files = Isolation(walls=(), missing={}, by=dict.fromkeys(ASPECTS, "walls") | {"files": ""})
    with pytest.raises(IsolationError, match="files: NOT ISOLATED.*or insist"):
        run_isolated("x = 1", isolation=open_files)
    assert run_isolated("x = 1", isolation=open_files, insist=True).passed


def test_a_wall_that_cannot_be_built_lets_nothing_run(walls, monkeypatch):
    monkeypatch.setattr(isolation, "readable", lambda: ["/no/such/folder"])
    with pytest.raises(IsolationError, match="(namespaces|landlock): .*No such file"):
        run_isolated("x = 1", isolation=walls)


def test_where_programs_fail_within_namespaces_the_other_walls_serve(monkeypatch):
    """Root has Python in its home, which nobody may not read."""
    fallback, run_it = find_isolation(FALLBACK), isolation._run

    def run_within(program, limits, walls):
        return run_it(
            "import _no_such" if program and "namespaces" in walls else program, limits, walls
        )

    monkeypatch.setattr(isolation, "_run", run_within)
    found = find_isolation.__wrapped__()
    assert (found.walls, found.by) == (fallback.walls, fallback.by)
    assert "namespaces" in found.missing


def test_other_systems_have_no_walls(monkeypatch):
    monkeypatch.setattr(isolation.sys, "platform", "darwin")
    found = find_isolation.__wrapped__()
    assert (found.walls, set(found.missing), found.suffices) == ((), set(WALLS), False)
