"""The doctor: each planted trouble is found with its fix, and a sound machine has none."""

import dataclasses
import os
import subprocess
import sys

import jax
import pytest

from launch.lib import page
from specsamp import doctor, machine
from specsamp.doctor import Facts, Level, Wanted, examine
from support.run_script import call

SOUND = Facts(
    python=(3, 12),
    versions={"jax": "0.12.0", "jaxlib": "0.12.0", "libtpu": "0.0.50.1"},
    required={"jaxlib": "<=0.12.0,>=0.11.2", "libtpu": "==0.0.50.*"},
    has_tpu=True,
    has_gpu=False,
    platform="tpu",
    failed="",
    devices=8,
    asked_platforms="",
    memory_bytes=16 << 30,
    cache="/home/me/.cache/specsamp/xla",
    free_bytes=100 << 30,
    has_hub_token=False,
)


def test_sound_machine_has_no_findings():
    findings = examine(SOUND, Wanted(devices=8, weights_bytes=9e9))
    assert {finding.level for finding in findings} == {Level.FINE}
    assert "JAX sees 8 x tpu, 17.2 GB each" in [finding.what for finding in findings]


TROUBLES = [
    (dict(failed="no TPU", devices=8), "JAX does not start: no TPU", "mend that device"),
    (
        dict(failed="no TPU", asked_platforms="tpu"),
        "JAX does not start: no TPU",
        "unset JAX_PLATFORMS",
    ),
    (
        dict(platform="cpu", versions={"jax": "0.12.0"}, required={}),
        "sees only 8 x cpu",
        "pip install 'jax[tpu]'",
    ),
    (dict(platform="cpu"), "this machine has a TPU", "the process that holds the TPU"),
    (dict(platform="cpu", has_tpu=False, has_gpu=True), "this machine has a GPU", "jax[cuda13]"),
    (dict(memory_bytes=9 << 30), "weights take 9.0 of the 9.7 GB", "--config.mesh.model"),
    (dict(devices=4), "mesh takes 8 devices, JAX sees 4", "--config.mesh.data"),
    (dict(devices=16), "mesh takes 8 devices, JAX sees 16", "--config.mesh.data"),
]


@pytest.mark.parametrize(("changes", "what", "fix"), TROUBLES)
def test_doctor_reports_errors_with_fixes(changes, what, fix):
    findings = examine(dataclasses.replace(SOUND, **changes), Wanted(devices=8, weights_bytes=9e9))
    (found,) = [finding for finding in findings if finding.level is Level.ERROR]
    assert what in found.what and fix in found.fix


WARNINGS = [
    (dict(cache=None), "are not kept"),
    (dict(platform="cpu", asked_platforms="cpu"), "sees only 8 x cpu"),
    (dict(versions=SOUND.versions | {"libtpu": "0.0.44"}), "libtpu 0.0.44 does not fit jax 0.12.0"),
    (dict(free_bytes=1 << 20), "has 0.0 GB left"),
]


@pytest.mark.parametrize(("changes", "what"), WARNINGS)
def test_doctor_reports_warnings(changes, what):
    (found,) = [
        one for one in examine(dataclasses.replace(SOUND, **changes)) if one.level is Level.WARNING
    ]
    assert what in found.what and found.fix


def test_versions_that_block_the_tpu_are_errors():
    stale = dataclasses.replace(
        SOUND, versions=SOUND.versions | {"libtpu": "0.0.44"}, platform="cpu"
    )
    found = [finding.fix for finding in examine(stale) if finding.level is Level.ERROR]
    assert "pip install 'libtpu==0.0.50.*'" in found
    without = dataclasses.replace(stale, has_tpu=False)
    assert {finding.level for finding in examine(without)} == {Level.FINE}, "nobody uses it there"


def test_a_notebook_stops_with_the_fix(monkeypatch):
    monkeypatch.setattr(doctor, "read_facts", lambda: SOUND)
    doctor.check()
    monkeypatch.setattr(doctor, "read_facts", lambda: dataclasses.replace(SOUND, platform="cpu"))
    with pytest.raises(RuntimeError, match="sees only 8 x cpu: end the process that holds the TPU"):
        doctor.check()


def test_the_facts_of_this_machine():
    known = doctor.read_facts()
    assert (known.platform, known.devices, known.failed) == ("cpu", 8, "")
    assert known.required["jaxlib"] and known.memory_bytes > 0


def test_a_result_names_the_kind_of_cpu(monkeypatch):
    """The kind includes instructions: int8 gains on one AMD EPYC, and loses on another."""
    environment = machine.environment()
    text = "model name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512f\n"
    monkeypatch.setattr(machine.pathlib.Path, "read_text", lambda *_, **options: text)
    assert (machine.host_facts()["cpu"], machine.instructions()) == (
        "AMD EPYC",
        ["avx2", "avx512f"],
    )
    environment |= {"cpu": "AMD EPYC", "instructions": machine.instructions()}
    environment |= {"machine": "Linux x86_64", "cores": 2}
    told = page.source("name", {"environment": environment})
    assert "; AMD EPYC, avx2 avx512f, Linux x86_64, 2 cores, " in told


def test_doctor_exits_with_the_worst_finding(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.machine, "has_tpu", lambda: False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nothing"))
    assert call("doctor").returncode == 0
    found = call("doctor", "--config=configs/hf.py:llama-8b", "--config.mesh.model=8")
    assert found.returncode == 1 and "meta-llama/Llama-3.1-8B is gated" in found.stdout
    copies = "--config.mesh.draft_model_parallelism=1"
    found = call("doctor", "--config=configs/chinchilla.py", copies)
    assert found.returncode == 2 and "weights take 17.0 of" in found.stdout
    assert "the pair's mesh takes 16 devices, JAX sees 8" in found.stdout


def test_a_compiler_that_fails_is_a_finding(monkeypatch):
    monkeypatch.setattr(
        "specsamp.models.few_rows.build", lambda: "XLA's products of few rows: g++ failed: no space"
    )
    done = call("doctor")
    assert done.returncode == 1 and "warning  XLA's products of few rows: g++ failed" in done.stdout


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_failing_devices_are_a_finding(monkeypatch, error):
    """Causes are JAX_PLATFORMS=cuda without a plugin, or a TPU that another process holds."""

    def fail(*_):
        raise error("Unable to initialize backend 'tpu'")

    for name in ("local_devices", "process_index", "process_count"):
        monkeypatch.setattr(jax, name, fail)
    done = call("doctor")
    assert done.returncode == 2
    assert "JAX does not start: Unable to initialize backend 'tpu'" in done.stdout
    assert "mesh takes" not in done.stdout, "no mesh fits where there are no devices"


WITHOUT_DEVICES = """
from support.run_script import call
from specsamp import load_pair
done = call("doctor"), call("demo"), call("benchmark")
for one in done:
    print(one.returncode, (one.stdout if one is done[0] else one.stderr).replace(chr(10), " "))
try:
    load_pair("python")
except RuntimeError as error:
    print(error)
"""


def test_missing_backend_is_one_line():
    """In a process without another backend, JAX fails an assertion that has no text."""
    environment = os.environ | {"JAX_PLATFORMS": "cuda", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WITHOUT_DEVICES]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=100
    )
    lines = done.stdout.splitlines()
    told = (
        "JAX finds no devices (JAX_PLATFORMS=cuda): this machine, or this installation of JAX, has "
        "no cuda; `specsamp doctor`"
    )
    assert lines[0].startswith("2 ") and "JAX does not start: this machine" in lines[0], done
    assert all(line.startswith(f"2 {told}") for line in lines[1:3]) and lines[3].startswith(told), (
        done
    )
