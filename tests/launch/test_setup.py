"""The scripts that install: their choice of a Python and versions, and when they install again."""

import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = ("launch/setup.sh", "launch/test.sh", "launch/demo.sh", ".ci/run", ".ci/house.sh")
CONSTRAINTS = (".ci/newest.txt", ".ci/oldest.txt")

# Stands for a Python and for the environments that it makes: records its calls and their
# constraints.
PYTHON = r"""#!/bin/bash
if [[ $1 == -c ]]; then
  exec {real} -c "{release}; exec(sys.argv[1])" "$2"
elif [[ "$1 $2" == "-m venv" ]]; then
  mkdir -p "${{!#}}/bin" && cp "$0" "${{!#}}/bin/python"
fi
[[ "$*" == *--version* ]] || echo "$0: ${{PIP_CONSTRAINT:-none}}, $*" >>"$NOTES"
[[ "$*" != *install* || ! -e "$NOTES.fails" ]]
"""
RELEASE = """
import sys, sysconfig
real = sysconfig.get_config_var
sysconfig.get_config_var = lambda name: {} if name == 'Py_GIL_DISABLED' else real(name)
Release = type('Release', (tuple,), dict(releaselevel=property(lambda self: self[3])))
sys.version_info = Release(({}))"""
TOOLS = (
    "bash",
    "sh",
    "cat",
    "cksum",
    "cp",
    "dirname",
    "grep",
    "mkdir",
    "rm",
)  # all of PATH: no Python of this machine
FAILS = "#!/bin/sh\nexit 127\n"  # as pyenv's shims do for an inactive version


class Checkout:
    """A folder with the scripts, and a home and a PATH with stand-ins for Python."""

    def __init__(self, folder):
        self.folder = folder / "checkout"
        self.home = folder / "home"
        self.notes = folder / "notes"
        self.path = folder / "bin"
        self.path.mkdir()
        for tool in TOOLS:
            (self.path / tool).symlink_to(shutil.which(tool))
        for name in (*SCRIPTS, *CONSTRAINTS, "setup.py"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)

    def add(self, path, release="3, 13, 0, 'final', 0", free_threaded=0, text=PYTHON):
        """Puts a stand-in at a path below home, or under a name on PATH."""
        place = self.home / path if "/" in path else self.path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(
            text.format(real=sys.executable, release=RELEASE.format(free_threaded, release))
        )
        place.chmod(0o755)

    def run(self, command):
        managers = (
            "PYENV_ROOT",
            "ASDF_DATA_DIR",
            "MISE_DATA_DIR",
            "UV_PYTHON_INSTALL_DIR",
            "PYTHONS",
            "PIP_CONSTRAINT",
        )
        kept = {name: value for name, value in os.environ.items() if name not in managers}
        kept |= {"HOME": str(self.home), "PATH": str(self.path), "NOTES": str(self.notes)}
        script = f"set -euo pipefail; {command}"
        return subprocess.run(
            [shutil.which("bash"), "-c", script],
            cwd=self.folder,
            env=kept,
            capture_output=True,
            text=True,
        )

    def called(self, command):
        """Runs a command that must succeed, and returns the calls of the stand-ins meanwhile."""
        self.notes.unlink(missing_ok=True)
        done = self.run(command)
        assert done.returncode == 0, done.stderr
        return self.notes.read_text().splitlines() if self.notes.exists() else []


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


FIND = "source launch/setup.sh; find_python"
PYENV_314 = ".pyenv/versions/3.14.1/bin/python"


@pytest.mark.parametrize(
    "stand_ins, found",
    [
        ({"python3.11": PYTHON, "python3.12": PYTHON, "python3.13": PYTHON}, "python3.13"),
        ({"python3.14": FAILS, "python3.11": PYTHON, PYENV_314: PYTHON}, PYENV_314),
        (
            {"python3.11": PYTHON, ".asdf/installs/python/3.12.4/bin/python": PYTHON},
            ".asdf/installs/python/3.12.4/bin/python",
        ),
        ({"python3": PYTHON, "python3.9": PYTHON}, "python3"),
    ],
)
def test_the_newest_python_that_runs_is_taken(checkout, stand_ins, found):
    for path, text in stand_ins.items():
        checkout.add(path, text=text)
    assert checkout.run(FIND).stdout.strip() == (
        str(checkout.home / found) if "/" in found else found
    )


@pytest.mark.parametrize(
    "release, free_threaded",
    [("3, 14, 0, 'candidate', 2", 0), ("3, 14, 1, 'final', 0", 1), ("3, 10, 9, 'final', 0", 0)],
)
def test_python_without_wheels_is_skipped(checkout, release, free_threaded):
    checkout.add(PYENV_314, release, free_threaded)
    refused = checkout.run(FIND)
    assert refused.returncode == 1
    assert refused.stderr.startswith("No Python 3.11 to 3.14 found that can make a virtual")
    assert refused.stderr.count("\n") == 1
    checkout.add("python3.11")
    assert checkout.run(FIND).stdout == "python3.11\n"


def test_named_python_version_is_used(checkout):
    checkout.add("python3.13")
    checkout.add("python3.12")
    assert checkout.run(f"export PYTHONS=3.12; {FIND}").stdout == "python3.12\n"
    refused = checkout.run(f"export PYTHONS=3.11; {FIND}")
    assert refused.returncode == 1 and refused.stderr.startswith("No Python 3.11 found")


def test_installation_is_repeated_only_after_a_change(checkout):
    checkout.add("python3.13")
    demo, test = "bash launch/demo.sh", "bash launch/test.sh"
    made, installed, ran = checkout.called(test)
    assert made.endswith(".venv") and ran.endswith("-m pytest --complete")
    assert installed.startswith(".venv/bin/python: .ci/newest.txt, -m pip")
    assert installed.endswith("--editable .[test]")
    assert len(checkout.called(test)) == len(checkout.called(demo)) == 1, (
        "the tests' packages are enough for the demo"
    )
    (ran,) = checkout.called("cd ..; bash checkout/launch/demo.sh --config=mine.py")
    assert ran.endswith(f" {checkout.folder}/launch/demo.py --config=mine.py")
    for name in ("setup.py", ".ci/newest.txt"):
        with (checkout.folder / name).open("a") as file:
            file.write("# changed\n")
        assert len(checkout.called(test)) == 2 and len(checkout.called(test)) == 1


def test_failed_installation_is_tried_again(checkout):
    checkout.add("python3.13")
    fails = checkout.notes.with_suffix(".fails")
    fails.touch()
    assert checkout.run("bash launch/test.sh").returncode
    fails.unlink()
    assert "--editable .[test]" in "".join(checkout.called("bash launch/test.sh"))


def test_newest_releases_are_installed_each_time(checkout):
    checkout.add("python3.13")
    checkout.called("bash launch/test.sh")
    for _ in range(2):
        installed, ran = checkout.called("bash launch/test.sh --slow --newest -k 'a or b'")
        assert installed.startswith(".venv/bin/python: none, ")
        assert "--upgrade --upgrade-strategy=eager" in installed
        assert ran.endswith("-m pytest --complete --slow -k a or b")
    assert ": .ci/newest.txt, " in checkout.called("bash launch/test.sh")[0]


def test_ci_tests_newest_and_oldest_releases(checkout):
    checkout.add("python3.11")
    checkout.add(".pyenv/versions/3.13.0/bin/python")
    made, installed, then_made, then_installed, *ran = checkout.called("bash .ci/run")
    assert "/3.13.0/bin/python: " in made and made.endswith("-m venv --clear .ci/newest")
    assert "/python3.11: " in then_made and then_made.endswith("-m venv --clear .ci/oldest")
    assert installed.startswith(".ci/newest/bin/python: .ci/newest.txt, -m pip")
    assert then_installed.startswith(".ci/oldest/bin/python: .ci/oldest.txt, -m pip")
    core = "tests/sampling tests/decoding tests/models tests/mesh"
    assert ran == [
        ".ci/newest/bin/python: none, -m pytest --complete --slow -k not further_cases",
        f".ci/oldest/bin/python: none, -m pytest --complete {core}",
        ".ci/newest/bin/python: none, .ci/house.py",
    ]


def requirements(monkeypatch):
    """Returns the requirements of setup.py for running and testing, with the extra for TPUs."""
    found = {}
    monkeypatch.setattr("setuptools.setup", lambda **options: found.update(options))
    monkeypatch.setattr("sys.argv", ["setup.py"])
    runpy.run_path(str(ROOT / "setup.py"))
    extras = found["extras_require"]
    return [
        Requirement(text) for text in (*found["install_requires"], *extras["test"], *extras["tpu"])
    ]


def versions(name, python):
    """Returns the versions that a file of constraints pins for a version of Python on Linux."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    here = {"python_version": python, "python_full_version": f"{python}.1"}
    here |= {"sys_platform": "linux", "platform_machine": "x86_64"}
    pins = [
        pin for pin in map(Requirement, lines) if pin.marker is None or pin.marker.evaluate(here)
    ]
    assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) for pin in pins)
    return {pin.name: Version(str(pin.specifier).removeprefix("==")) for pin in pins}


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_newest_versions_are_fixed_for_every_python(monkeypatch, python):
    pins = versions(".ci/newest.txt", python)
    for required in requirements(monkeypatch):
        assert pins[required.name] in required.specifier, required


def test_oldest_versions_are_those_that_setup_names(monkeypatch):
    """A bound below the pinned version is tested with no set of versions: raise it."""
    pins = versions(".ci/oldest.txt", "3.11")
    of_the_core = [one for one in requirements(monkeypatch) if one.name != "gcsfs"]
    assert len(of_the_core) > 25
    for required in of_the_core:
        (bound,) = required.specifier
        assert (bound.operator, Version(bound.version)) == (">=", pins[required.name]), required
