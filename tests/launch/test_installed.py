"""The wheel: what a user has who installed it and has no checkout."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import specsamp
from specsamp.__main__ import commands, main

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder that the wheel was unpacked into, outside the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    for name in ("setup.py", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("specsamp", "launch", "configs"):  # a build leaves files beside them
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import setuptools.build_meta as backend; backend.build_sdist('.')"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    options = ["-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--target", "site"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, archive], cwd=folder, check=True)
    return folder / "site"


def run(site, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-P", "-m", "specsamp", *arguments]
    return subprocess.run(command, cwd=site.parent / "site", env=environment, capture_output=True, text=True)


def test_a_wheel_brings_all_commands_and_configurations(site):
    assert {path.name for path in (site / "bin").iterdir()} == {"specsamp"}
    listed = run(site).stdout
    assert all(f"  {name} " in listed for name in commands())
    assert (site / "specsamp/checkpoints/assets/python/target.safetensors").exists()
    for kind in ("launch", "configs"):
        here = {path.name for path in (ROOT / kind).glob("*.py")}
        assert {path.name for path in (site / "specsamp/checkout" / kind).glob("*.py")} == here


def test_an_installed_command_says_so_in_its_result(site, tmp_path):
    """It reads a configuration and the measurements of TPUs, which are nowhere but in the wheel."""
    output = tmp_path / "result.json"
    known = ["--acceptance=0.8", "--config=configs/chinchilla.py", "--chip=v4", "--devices=16", "--context=2048"]
    done = run(site, "plan", *known, f"--output={output}")
    assert done.returncode == 0, done.stderr
    document = json.loads(output.read_text(encoding="utf-8"))
    assert document["command"].startswith("specsamp plan --acceptance=0.8")
    environment = document["environment"]
    assert (environment["specsamp"], environment["commit"]) == (specsamp.__version__, "not a checkout")


# One process imports JAX, and forks for each command: flags of two commands would meet.
EVERY = """
import os, sys
import specsamp.__main__ as program
sys.path.insert(0, str(program.folder()))
import entry
for name in program.commands():
    child = os.fork()
    if child == 0:
        print(f"=== {name}", flush=True)
        status = program.main([name, "--help"])
        sys.stdout.flush()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, name
"""


def test_every_command_starts_and_names_itself_as_it_is_called(site):
    """Each imports what it needs, and reads its configuration, from the wheel alone."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", EVERY], cwd=site, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = dict(text.split("\n", 1) for text in done.stdout.split("=== ")[1:])
    assert {"demo", "chat", "benchmark", "plan", "audit", "compile-report", "evaluate"} <= told.keys()
    assert told.keys() >= commands().keys()
    assert "specsamp check-head --config=" in told["check-head"] and "launch/check_head.py" not in done.stdout


def test_an_unknown_command_is_refused_with_those_there_are(capsys):
    assert main(["serf"]) == 2
    assert "no command 'serf': choose one of audit, benchmark," in capsys.readouterr().err
