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
    """The folder that the wheel was unpacked into, outside the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    for name in ("setup.py", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("specsamp", "launch", "configs"):  # a build leaves files beside them
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import setuptools.build_meta as backend; backend.build_sdist('.')"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    options = [
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--target",
        "site",
    ]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, archive], cwd=folder, check=True
    )
    return folder / "site"


def run(site, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-P", "-m", "specsamp", *arguments]
    return subprocess.run(
        command, cwd=site.parent / "site", env=environment, capture_output=True, text=True
    )


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
    listed = run(site, "study", "backtest", "--help")
    assert listed.returncode == 0 and "  --results: " in listed.stdout, listed.stderr


def test_a_setuptools_that_makes_no_wheels_is_named():
    without = (
        "import importlib.util, runpy, setuptools, sys; importlib.util.find_spec = lambda name: "
        "None; "
    )
    program = without + "sys.argv = ['setup.py', 'dist_info']; runpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(
        "this setuptools makes no wheels: pip install 'setuptools>=70"
    )


# One process imports JAX, and forks for each command: flags of two commands would meet.
EVERY = """
import json, os, sys
import optax, scipy.stats  # as many commands do, a second each time
import specsamp.__main__ as program
sys.path.insert(0, str(program.folder().parent))
from launch.lib import entry
for arguments in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        print(f"=== {arguments[0]}", flush=True)
        status = program.main(arguments)
        sys.stdout.flush()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, arguments
"""


def run_each(site, commands, typed=""):
    """Runs commands one after another, and returns what each printed."""
    environment = {**os.environ, "PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu"}
    arguments = [sys.executable, "-P", "-W", "ignore", "-c", EVERY, json.dumps(commands)]
    done = subprocess.run(
        arguments, cwd=site, env=environment, input=typed, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(text.split("\n", 1) for text in done.stdout.split("=== ")[1:])


@pytest.mark.slow
def test_what_a_first_hour_takes_runs_from_the_wheel(site, tmp_path):
    save_tiny_pair(tmp_path / "pair", ["def f(x):"])
    pair = [
        f"--config=configs/trained_pair.py:{tmp_path / 'pair'}",
        "--plain",
        "--config.max_new_tokens=4",
    ]
    short = [*pair, "--config.draft_length=1", "--config.sampling.top_p=1.0"]
    cells_json = tmp_path / "cells.json"
    helps = run_each(site, [[name, "--help"] for name in commands()])
    assert helps.keys() == commands().keys()
    assert "specsamp doctor --config=" in helps["doctor"] and "launch/doctor.py" not in "".join(
        helps.values()
    )
    told = run_each(
        site,
        [
            [
                "plan",
                "--acceptance=0.8",
                "--config=configs/chinchilla.py",
                "--chip=v4",
                "--devices=16",
            ],
            ["demo", *short, "--passes=1"],
            [
                "benchmark",
                *pair,
                *"--config.draft_length=0 --config.repeats=1".split(),
                f"--output={cells_json}",
            ],
            ["audit", *short, "--prompt_count=2", "--checks=acceptance"],
            ["chat", *short],
            [
                "evaluate",
                *short,
                "--task=python",
                "--problems=2",
                "--samples=1",
                "--blocks=1",
                "--methods=plain",
            ],
        ],
        typed="def f(x):\n/quit\n",
    )
    assert "greedy, speculative = autoregressive: 1 of 1 prompts, 4 tokens" in told["demo"]
    assert "1 of 1 checks passed" in told["audit"] and "4 tokens, " in told["chat"]
    cells = json.loads(cells_json.read_text())
    assert cells["command"].startswith("specsamp benchmark --config=") and len(cells["cells"]) == 1
    found = cells["environment"]["specsamp"], cells["environment"]["commit"]
    assert found == (specsamp.__version__, "not a checkout") and "K = 4" in told["plan"]
    assert "plain" in told["evaluate"]


def test_an_unknown_command_is_refused_with_those_there_are(capsys):
    assert (
        main(["--version"]) == 0 and capsys.readouterr().out == f"specsamp {specsamp.__version__}\n"
    )
    for name, told in {
        "fly": "choose one of audit, benchmark,",
        "serv": "did you mean serve?",
    }.items():
        assert main([name]) == 2
        assert f"no command {name!r}: {told}" in capsys.readouterr().err
