"""A cloud to run the scripts against, and one with a slice that is there."""

import importlib

import pytest

from support.run_script import ROOT
from support.stand_in_cloud import Cloud


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """A narrow terminal gets one line for each number of a table."""
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def cloud(tmp_path):
    return Cloud(tmp_path)


@pytest.fixture
def ready(cloud):
    """A slice that is there, with the code on its workers."""
    cloud.states("ACTIVE")
    assert (done := cloud.run("setup", "--name=pod")).returncode == 0, done.stderr
    (cloud.fake / "calls").unlink()
    return cloud


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A corpus of a few files."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(12):
        body = "\n\n".join(
            f"def function_{i}_{j}(x, y={j}):\n    return x + {i * j} * y\n" for j in range(12)
        )
        (folder / f"module_{i}.py").write_text(body)
    return folder


@pytest.fixture
def train(monkeypatch):
    """The script as a module; on its first import it reads its default configuration."""
    monkeypatch.chdir(ROOT)
    return importlib.import_module("launch.train")
