"""Files are written whole or not at all, on a disk and in a bucket, whose library has a stand-in
without a network.
"""

import os
import stat

import fsspec
import numpy as np
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from specsamp import storage
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.training import run_folder
from specsamp.training.data import train_tokenizer
from specsamp.training.run_folder import MetricsLog, read_metrics
from support.refusals import refusal


class Bucket(DirFileSystem):
    protocol = "gs"

    def __init__(self):
        here = Bucket.path
        super().__init__(here, LocalFileSystem(auto_mkdir=True))
        del self.path  # uses the path of the class

    @classmethod
    def _strip_protocol(cls, path):
        return str(path).removeprefix("gs://")


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """Maps gs:// to a folder. etils keeps the first file system, so the folder is an attribute of
    its class.
    """
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


def test_nothing_is_left_of_a_write_that_fails(tmp_path, monkeypatch):
    storage.write(tmp_path / "kept", "old")
    monkeypatch.setattr(os, "replace", None)
    with pytest.raises(TypeError):
        storage.write(tmp_path / "kept", "new")
    assert os.listdir(tmp_path) == ["kept"] and (tmp_path / "kept").read_text() == "old"


def test_content_is_synced_before_the_rename(tmp_path, monkeypatch):
    """Otherwise a crash of the machine could result in an empty file under the name."""
    path, calls, fsync = tmp_path / "a.json", [], os.fsync

    def note(handle):
        calls.append((path.exists(), os.fstat(handle).st_size))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    storage.write(path, "text")
    assert calls == [(False, 4)] and path.read_text() == "text"


def test_permissions_follow_umask_or_replaced_file(tmp_path):
    """Writing through a link keeps the link."""
    private, link = tmp_path / "private", tmp_path / "link"
    before = os.umask(0o022)
    try:
        storage.write(private, "old")
        assert private.stat().st_mode & 0o777 == 0o644
        private.chmod(0o600)
        link.symlink_to("private")
        storage.write(link, "new")
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert private.read_text() == "new"
    assert private.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["link", "private"]


def test_special_files_are_never_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        storage.write(tmp_path / "pipe", "x")
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        storage.write(tmp_path, "x")
    assert os.listdir(tmp_path) == ["pipe"] and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_devices_and_streams_are_written_to_directly(tmp_path):
    storage.write("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(OSError, match="No space left.*/dev/full"):
        storage.write("/dev/full", "x")
    reading, writing = os.pipe()
    storage.write(f"/dev/fd/{writing}", "a document")
    assert os.read(reading, 100) == b"a document"
    os.close(reading)
    os.close(writing)
    assert storage.is_stream("/dev/stdout") and not storage.is_stream(tmp_path / "new")


@pytest.mark.parametrize(
    "content, message",
    [
        (b"\xff\xfe", "is no text in UTF-8"),
        (b"[" * 100_000, "is no JSON"),
        (b"[]", "is no JSON object"),
    ],
)
def test_damaged_json_is_named(tmp_path, content, message):
    (tmp_path / "x.json").write_bytes(content)
    with refusal(f"x.json {message}"):
        storage.read_json(tmp_path / "x.json")


def test_results_and_runs_in_a_bucket(bucket):
    storage.write_json("gs://mine/results/r.json", {"x": 1})
    assert (bucket / "mine/results/r.json").read_text() == '{\n  "x": 1\n}\n'
    trained = JsonTokenizer.from_tokenizer(
        train_tokenizer(["def f(x):\n    return x\n"] * 9, 300), "<eos>"
    )
    run_folder.open_run("gs://mine/run", {"model": {}}, trained.to_json(), corpus={"sha256": "0"})
    assert JsonTokenizer("gs://mine/run/tokenizer.json", "<eos>").to_json() == trained.to_json()
    with refusal("no tokenizer at gs://mine/other.json", FileNotFoundError):
        JsonTokenizer("gs://mine/other.json")
    run_folder.check_run("gs://mine/run", {"model": {}})
    with refusal("another configuration: model.width was 'absent', is 3"):
        run_folder.check_run("gs://mine/run", {"model": {"width": 3}})
    with refusal("another corpus"):
        run_folder.check_same("gs://mine/run", "corpus", {"sha256": "1"})
    run_folder.write_array("gs://mine/run/rows.npy", np.arange(3))
    np.testing.assert_array_equal(run_folder.read_array("gs://mine/run/rows.npy"), np.arange(3))
    log = MetricsLog("gs://mine/metrics.jsonl")
    for step in (1, 2, 3):
        log.write(step, loss=1.0 / step)
    MetricsLog("gs://mine/metrics.jsonl", resumed_at=2).write(3, loss=9.0)
    assert [record["loss"] for record in read_metrics("gs://mine/metrics.jsonl")] == [1.0, 0.5, 9.0]


def test_unreachable_places_are_refused(monkeypatch):
    with refusal("'ftp://x/y'.*gs://"):
        storage.place("ftp://x/y")

    def missing(name):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with refusal("'s3://a/b'.*pip install s3fs"):
        storage.place("s3://a/b")
    assert str(storage.place("~/x")) == os.path.expanduser("~/x")
