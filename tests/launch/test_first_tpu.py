"""The first run on a TPU, rehearsed on a CPU: failures are named, all other parts run, and the same
command resumes.
"""

import json
import re
import subprocess

import jax.numpy as jnp
import pytest

from specsamp.models.kernels import dispatch
from specsamp.models.kernels.append_rows import append_rows
from specsamp.tpu import kernel_check
from specsamp.tpu.kernel_check import KernelCheck
from support import extras
from support.run_script import call, read_cells

RIGHT = "append_rows, 5 tokens in float32"
FAILING = "append_rows, 34 tokens in int8"
WRONG = "small, norms and rotation in float32"


def fails_for_int8(caches, *rest, **options):
    if caches[0].dtype == jnp.int8:
        raise NotImplementedError("no such layout")
    return append_rows(caches, *rest, **options)


def turns_nothing(kernels, function, operands, axes):
    return operands[: len(axes)]


def ended(done):
    """Returns the names and outcomes of the parts that a run has tried, in order."""
    lines = [
        line.split(": ")[0].split("  ") for line in done.stdout.partition("\n\n")[0].splitlines()
    ]
    return [(name, outcome) for outcome, name in lines]


def rehearse(output, *flags):
    return call("first_tpu", "--interpret", "--plain", f"--output={output}", *flags)


def parts_of(output):
    return {cell["key"]["part"]: cell["result"] for cell in read_cells(output)}


@pytest.fixture
def three_checks(monkeypatch):
    few = [check for check in kernel_check.CHECKS if check.name in (RIGHT, FAILING, WRONG)]
    monkeypatch.setattr(kernel_check, "CHECKS", few)


def test_bad_kernels_are_named_and_good_ones_run(three_checks, monkeypatch, tmp_path):
    """A second run tries the two failed kernels alone, and they pass."""
    asked = (tmp_path / "first.json", "--parts=doctor,kernel,estimate")
    made = []
    run = subprocess.run

    def compiles(command, **how):
        """Writes a made-up report in place of launch/compile_report.py."""
        if "compile-report" not in command:
            return run(command, **how)
        output = next(word for word in command if word.startswith("--output=")).partition("=")[2]
        band = {"least": 1.0, "likely": 2.0, "most": 3.0, "open": False}
        report = {"calibrated_ms": {"round": band}, "report": {"programs": []}}
        with open(output, "w") as file:
            json.dump(report, file)
        made.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", compiles)
        patch.setattr(dispatch, "append_rows", fails_for_int8)
        patch.setattr(dispatch.PallasKernels, "fuse", turns_nothing)
        done = rehearse(*asked)
    assert done.returncode == 1
    assert ended(done) == [
        ("doctor", "passed"),
        (f"kernel {RIGHT}", "passed"),
        (f"kernel {FAILING}", "FAILED"),
        (f"kernel {WRONG}", "FAILED"),
        ("estimate", "passed"),
    ]
    assert f"kernel {FAILING}: NotImplementedError: no such layout" in done.stdout
    assert f"kernel {WRONG}: differs by" in done.stdout and "2 of 5 parts failed" in done.stdout
    assert "round 2.0 (1.0 to 3.0) ms" in done.stdout
    assert "--config=configs/random_pair.py:kernels" in made[0]
    assert "fails_for_int8" in parts_of(asked[0])[f"kernel {FAILING}"]["found"]["traceback"]

    done = rehearse(*asked)
    assert done.returncode == 0, done.stdout
    assert ended(done) == [(f"kernel {FAILING}", "passed"), (f"kernel {WRONG}", "passed")]
    assert len(made) == 1


def fake(name, made):
    return KernelCheck(kernel=name, what="x", draw=lambda: (jnp.ones(2),), compute=made, near=0.1)


def test_part_that_killed_the_process_runs_last(monkeypatch, tmp_path):
    output = tmp_path / "first.json"

    def spoils(kernels, x):
        return x if kernels is None else jnp.array([jnp.nan, 1.0])

    def kills(kernels, x):
        raise KeyboardInterrupt

    right = fake("c", lambda kernels, x: x)
    monkeypatch.setattr(kernel_check, "CHECKS", (fake("a", spoils), fake("b", kills), right))
    killed = rehearse(output, "--parts=kernel")
    assert killed.returncode == 130
    assert f"interrupted; {output} has the parts so far" in killed.stderr
    assert set(parts_of(output)) == {"kernel a, x", "kernel b, x"}
    assert not parts_of(output)["kernel a, x"]["passed"]
    monkeypatch.setattr(
        kernel_check, "CHECKS", (fake("a", spoils), fake("b", right.compute), right)
    )
    done = rehearse(output, "--parts=kernel")
    assert ended(done) == [
        ("kernel a, x", "FAILED"),
        ("kernel c, x", "passed"),
        ("kernel b, x", "passed"),
    ]
    assert "kernel a, x: differs by nan" in done.stdout


@pytest.mark.slow
@extras.needs("libtpu")
def test_a_rehearsal_has_measured_times_beside_the_compilers(tmp_path):
    output = tmp_path / "first.json"
    done = rehearse(output, "--parts=audit,times,estimate")
    assert done.returncode == 0, done.stdout + done.stderr
    parts = parts_of(output)
    assert {"audit", "times", "estimate"} == set(parts)
    for name in ("plain step", "draft step", "scoring", "round"):
        table = " ".join(done.stdout.split())
        assert re.search(
            rf"time of a {name} \S+ ms; compiler estimate \S+ \(\S+ to \S+\) ms", table
        )
        assert parts["times"]["found"]["ms"][name] > 0
