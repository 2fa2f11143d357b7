"""Whole or not there at all, on a disk and in a bucket (whose library is stood in for: there is no network here)."""

import os

import fsspec
import numpy as np
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from specsamp import storage
from specsamp.analysis import report
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.training import run
from specsamp.training.data import train_tokenizer
from specsamp.training.log import MetricsLog, read_metrics


class Bucket(DirFileSystem):
    protocol = "gs"

    def __init__(self):
        here = Bucket.path
        super().__init__(here, LocalFileSystem(auto_mkdir=True))
        del self.path  # that of the class

    @classmethod
    def _strip_protocol(cls, path):
        return str(path).removeprefix("gs://")


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """gs:// as a folder. (etils asks for the file system once and keeps it: so its folder changes, not it.)"""
    (tmp_path / "cloud").mkdir()
    monkeypatch.setattr(fsspec, "filesystem", lambda name, **_: Bucket())
    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda name: Bucket)
    monkeypatch.setattr(Bucket, "path", str(tmp_path / "cloud"), raising=False)
    return tmp_path / "cloud"


def test_a_file_is_written_with_its_folder(tmp_path):
    storage.write(tmp_path / "a" / "b.txt", "ü")
    storage.write(tmp_path / "a" / "b.txt", b"new")
    assert (tmp_path / "a" / "b.txt").read_bytes() == b"new"
    assert os.listdir(tmp_path / "a") == ["b.txt"]
    assert (tmp_path / "a" / "b.txt").stat().st_mode & 0o777 == 0o644


def test_nothing_is_left_of_a_write_that_fails(tmp_path, monkeypatch):
    storage.write(tmp_path / "kept", "old")

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        storage.write(tmp_path / "kept", "new")
    assert os.listdir(tmp_path) == ["kept"] and (tmp_path / "kept").read_text() == "old"


def test_results_and_runs_in_a_bucket(bucket):
    report.write_json("gs://mine/results/r.json", {"x": 1})
    assert (bucket / "mine/results/r.json").read_text() == '{\n "x": 1\n}\n'
    run.open_run("gs://mine/run", {"model": {}}, "{}", corpus={"sha256": "0"})
    run.check_run("gs://mine/run", {"model": {}})
    with pytest.raises(ValueError, match="another configuration: model.width was 'absent', is 3"):
        run.check_run("gs://mine/run", {"model": {"width": 3}})
    with pytest.raises(ValueError, match="another corpus"):
        run.check_same("gs://mine/run", "corpus", {"sha256": "1"})
    run.write_array("gs://mine/run/rows.npy", np.arange(3))
    np.testing.assert_array_equal(run.read_array("gs://mine/run/rows.npy"), np.arange(3))


def test_a_tokenizer_in_a_bucket(bucket):
    trained = JsonTokenizer.from_tokenizer(train_tokenizer(["def f(x):\n    return x\n"] * 9, 300), "<eos>")
    run.open_run("gs://mine/run", {}, trained.to_json())
    again = JsonTokenizer("gs://mine/run/tokenizer.json", "<eos>")
    assert again.to_json() == trained.to_json() and again.eos_id == trained.eos_id
    with pytest.raises(FileNotFoundError, match="no tokenizer at gs://mine/other.json"):
        JsonTokenizer("gs://mine/other.json")


def test_a_log_in_a_bucket_grows(bucket):
    log = MetricsLog("gs://mine/metrics.jsonl")
    for step in (1, 2, 3):
        log.write(step, loss=1.0 / step)
    assert [record["step"] for record in read_metrics("gs://mine/metrics.jsonl")] == [1, 2, 3]
    MetricsLog("gs://mine/metrics.jsonl", resumed_at=2).write(3, loss=9.0)
    assert [record["loss"] for record in read_metrics("gs://mine/metrics.jsonl")] == [1.0, 0.5, 9.0]


def test_unknown_kinds_of_storage():
    with pytest.raises(ValueError, match="no storage of this kind: 'ftp://x/y'; use a local path or one of gs://"):
        storage.place("ftp://x/y")


def test_a_bucket_without_its_library(monkeypatch):
    def missing(name):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(ValueError, match="'s3://a/b' needs a library that is not installed: pip install s3fs"):
        storage.place("s3://a/b")


def test_home_is_expanded():
    assert str(storage.place("~/x")) == os.path.expanduser("~/x")
