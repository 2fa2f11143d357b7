"""Fixtures: a stand-in cloud, a ready slice, a corpus, and the training script as a module."""

import importlib

import pytest

from support.run_script import ROOT
from support.stand_in_cloud import Cloud
from support.training import quiet, write_texts


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Sets a wide terminal: a narrow one gets one line for each number of a table."""
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def cloud(tmp_path):
    return Cloud(tmp_path)


@pytest.fixture
def ready(cloud):
    """Returns a cloud whose slice is active and has the code on its workers."""
    cloud.states("ACTIVE")
    cloud.run("setup", "--name=pod")
    (cloud.fake / "calls").unlink()
    return cloud


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture
def no_pair(monkeypatch):
    """Fails the test if weights are read or made."""

    def fail(*_, **__):
        raise AssertionError("a pair was read")

    for name in ("load_pair", "read_pair", "bare_pair"):
        monkeypatch.setattr(importlib.import_module("launch.lib.experiment"), name, fail)


@pytest.fixture
def train(monkeypatch):
    """Imports the script, which reads its default configuration on its first import."""
    monkeypatch.chdir(ROOT)
    return importlib.import_module("launch.train")


@pytest.fixture
def run_training(train, tmp_path):
    """Returns a function that trains by a configuration, silently, in a folder of this name."""
    return lambda config, name: train.run_training(config, tmp_path / name, quiet())
