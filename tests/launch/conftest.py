"""A cloud to run the scripts against, and one with a slice that is there."""

import pytest

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
