"""What all entry points share."""

import importlib
import sys

import pytest


@pytest.fixture
def entry():
    return importlib.import_module("entry")


def test_a_place_to_write_is_tried_before_the_work(entry, tmp_path):
    entry.check_output(None)
    entry.check_output(str(tmp_path / "new" / "result.json"))
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--output=.*/new is a folder: name a file in it"):
        entry.check_output(str(tmp_path / "new"))
    with pytest.raises(ValueError, match="--output=.*/file/result.json cannot be written"):
        entry.check_output(f"{tmp_path}/file/result.json")
    with pytest.raises(ValueError, match="'ftpx://bucket/result.json'"):
        entry.check_output("ftpx://bucket/result.json")


def test_the_command_is_the_one_that_was_typed(entry, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch/x.py", "--prompt=a b"])
    assert entry.command() == "python launch/x.py '--prompt=a b'"
