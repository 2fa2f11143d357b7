"""The wheel works for users without a checkout."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import specsamp
from specsamp.__main__ import commands, main
from support.run_script import save_tiny_pair

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Installs the wheel into a folder outside the checkout, and returns this folder."""
    folder = tmp_path_factory.mktemp("installed")
    for name in ("setup.py", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("specsamp", "launch", "configs"):  # a build writes into its folder
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import setuptools.build_meta as backend; backend.build_sdist('.')"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    options = "-q --no-deps --no-build-isolation --disable-pip-version-check --target site"
    install = [sys.executable, "-m", "pip", "install", *options.split(), archive]
    subprocess.run(install, cwd=folder, check=True)
    return folder / "site"


def run(site, *arguments):
    environment = os.environ | {"PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-P", "-m", "specsamp", *arguments]
    return subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_wheel_brings_all_commands_and_configurations(site):
    assert {path.name for path in (site / "bin").iterdir()} == {"specsamp"}
    listed = run(site).stdout
    assert all(f"  {name} " in listed for name in commands())
    assert (site / "specsamp/checkpoints/assets/python/target.safetensors").exists()
    for kind in ("launch", "configs"):
        there = site / "specsamp/checkout" / kind
        for ending in ("py", "json"):
            here = {path.relative_to(ROOT / kind) for path in (ROOT / kind).rglob(f"*.{ending}")}
            assert {path.relative_to(there) for path in there.rglob(f"*.{ending}")} == here


def test_a_setuptools_that_makes_no_wheels_is_named():
    without = (
        "import importlib.util, runpy, setuptools, sys; importlib.util.find_spec = lambda name: "
        "None; "
    )
    program = without + "sys.argv = ['setup.py', 'dist_info']; runpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("this setuptools makes no wheels: pip install 'setuptools>=70")


@pytest.mark.slow
def test_commands_of_a_first_hour_run_installed(site, tmp_path):
    save_tiny_pair(tmp_path / "pair", ["def f(x):"])
    pair = f"--config=configs/trained_pair.py:{tmp_path / 'pair'} --config.max_new_tokens=1"
    cells_json = tmp_path / "cells.json"
    for command, told in (
        ("plan --acceptance=0.8 --config=configs/chinchilla.py --chip=v4 --devices=16", "K = 4"),
        ("study backtest --help", "  --results: "),
        (f"benchmark {pair} --config.draft_length=0 --config.repeats=1 --output={cells_json}", ""),
    ):
        done = run(site, *command.split())
        assert done.returncode == 0 and told in done.stdout, done.stderr
    cells = json.loads(cells_json.read_text())
    assert cells["command"].startswith("specsamp benchmark --config=") and len(cells["cells"]) == 1
    found = cells["environment"]["specsamp"], cells["environment"]["commit"]
    assert found == (specsamp.__version__, "not a checkout")


def test_unknown_command_is_refused_with_a_suggestion(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"specsamp {specsamp.__version__}\n"
    for name, told in {
        "fly": "choose one of audit, benchmark,",
        "serv": "did you mean serve?",
    }.items():
        assert main([name]) == 2
        assert f"no command {name!r}: {told}" in capsys.readouterr().err
