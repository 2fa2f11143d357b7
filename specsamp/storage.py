"""Files of runs and results, on a disk or in a bucket (``gs://``): whole or not there at all."""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any

import fsspec
from etils import epath
from flax.traverse_util import flatten_dict

from specsamp import validate

LIBRARIES = {"gs://": "gcsfs", "s3://": "s3fs", "az://": "adlfs"}
BUCKETS = tuple(LIBRARIES)


def place(path: str | os.PathLike) -> epath.Path:
    """Returns ``path`` as a path on a disk or in a bucket; ``~`` is the user's home.

    Raises:
      ValueError: the scheme is unknown, or its library is not installed.
    """
    text = validate.path("a file", path)
    if "://" in text and not in_bucket(text):
        raise ValueError(
            f"no storage of this kind: {text!r}; use a local path or one of {', '.join(BUCKETS)}"
        )
    if not in_bucket(text):
        return epath.Path(text).expanduser()
    scheme = text[: text.index("/") + 2]
    try:
        fsspec.get_filesystem_class(scheme.removesuffix("://"))
    except ImportError as error:
        library = LIBRARIES[scheme]
        raise ValueError(
            f"{text!r} needs a library that is not installed: pip install {library} ({error})"
        ) from error
    return epath.Path(text)


def in_bucket(path: str | os.PathLike) -> bool:
    """Returns whether ``path`` is in a bucket, not on a disk."""
    return os.fspath(path).startswith(BUCKETS)


def is_stream(path: str | os.PathLike) -> bool:
    """Returns whether ``path`` is a device (/dev/null) or an open stream (/dev/stdout).

    Such a path is written to directly, and nothing is ever read from it.
    """
    if in_bucket(path):
        return False
    text = os.path.abspath(os.path.expanduser(path))
    if text in ("/dev/stdout", "/dev/stderr") or text.startswith(("/dev/fd/", "/proc/self/fd/")):
        return True
    try:
        return stat.S_ISCHR(os.stat(text).st_mode)
    except OSError:
        return False


def check_regular(path: str | os.PathLike) -> None:
    """Refuses to replace a path that exists and is no regular file: a folder, a pipe, a socket or a
    block device.

    Raises:
      IsADirectoryError, OSError: with the path and its kind.
    """
    path = place(path)
    if in_bucket(path) or not os.path.exists(path):
        return
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder: name a file in it", os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(
            errno.EINVAL, "it is no regular file and is left alone: choose another", os.fspath(path)
        )


def write(path: str | os.PathLike, content: str | bytes) -> None:
    """Writes all of ``content`` or nothing, creating the folder: a reader, or a crash, never sees
    half a file.

    A new file gets the permissions of the umask; a replaced file keeps its permissions. A symbolic
    link stays, and its target is replaced. A device or a stream, see `is_stream`, is written to as
    it is.

    Raises:
      OSError: it cannot be written, or something is there that is no regular file.
    """
    content = content.encode() if isinstance(content, str) else content
    if is_stream(path):
        sys.stdout.flush()  # earlier output comes first
        try:
            with open(os.open(os.path.expanduser(path), os.O_WRONLY | os.O_APPEND), "wb") as file:
                file.write(content)
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        return
    path = place(path)
    if in_bucket(path):
        path.write_bytes(content)  # an object appears when it is complete
        return
    check_regular(path)
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, f".{name[:100]}.{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # less the umask
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            # Otherwise the file may be empty after a crash of the machine.
            os.fsync(file.fileno())
        if os.path.exists(target):
            os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def locked(path: str | os.PathLike, *, wait: bool = True) -> Iterator[None]:
    """Holds a lock on ``path`` during the block; other processes are blocked.

    The lock is a file in the folder of ``path``, removed afterwards. It holds between processes of
    a machine, and on shared disks that support ``flock``. A process that is killed leaves the file
    behind, unlocked: the next holder takes and removes it. A bucket and a stream have no lock:
    there the last of two writers wins.

    Raises:
      ValueError: another process holds it, and ``wait`` is false.
    """
    if is_stream(path) or in_bucket(place(path)):
        yield
        return
    folder, name = os.path.split(os.path.realpath(place(path)))
    os.makedirs(folder, exist_ok=True)
    lock = os.path.join(folder, f".{name[:100]}.lock")
    with contextlib.ExitStack() as files:
        while True:
            file = files.enter_context(open(lock, "a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"{path} is being written by another run: wait for it, or give another path"
                ) from error
            with contextlib.suppress(FileNotFoundError):  # its previous holder has removed it
                if os.path.samestat(os.stat(lock), os.fstat(file.fileno())):
                    break
        try:
            yield
        finally:
            os.unlink(lock)


def write_json(path: str | os.PathLike, content: Any) -> None:
    """Writes a JSON document for people to read, whole or not at all; see `write`."""
    write(path, json.dumps(content, indent=2) + "\n")


def is_regular_file(path: str | os.PathLike) -> bool:
    """Returns whether there is a file that can be read to its end: no folder, pipe or device."""
    path = place(path)
    return path.is_file() if in_bucket(path) else os.path.isfile(path)


def read_text(path: str | os.PathLike) -> str:
    """Returns the text of a file, without the byte order mark that some editors begin it with.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: it is no regular file (a pipe would be waited for), or is not UTF-8; the message
        names it.
    """
    path = place(path)
    if path.exists() and not is_regular_file(path):
        raise ValueError(f"{path} is no regular file")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 (byte {error.start})") from error


def read_json_value(path: str | os.PathLike) -> Any:
    """Returns the value in a JSON file: an object, a list or anything else.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: as `read_text`, or it holds no JSON, or JSON that is nested too deep to be read.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: wrong JSON, and endless numbers
        raise ValueError(f"{os.fspath(path)} is no JSON: {error}") from error


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Returns the JSON object that a file holds.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: as `read_json_value`, or the value is no object.
    """
    content = read_json_value(path)
    if not isinstance(content, dict):
        raise ValueError(f"{os.fspath(path)} is no JSON object")
    return content


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns a text for each different value of two JSON objects, for example "train.seed was 0,
    is 1"; None is absent.
    """
    before, now = flatten_dict(before, sep="."), flatten_dict(now, sep=".")
    return [
        f"{name} was {before.get(name, 'absent')!r}, is {now.get(name, 'absent')!r}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


class Lines:
    """Keeps a text file that grows line by line; in a bucket it is written anew.

    Where the disk is full, a new line is dropped and the earlier lines stay whole.
    """

    def __init__(self, path: Any, lines: list[str], *, bucket_seconds: float = 0.0):
        """Writes the first lines.

        Args:
          bucket_seconds: a bucket gets new lines at most so often; `flush` gives it the last ones.
        """
        self._path, self._lines, self._bucket_seconds = place(path), list(lines), bucket_seconds
        self._in_bucket = in_bucket(self._path)
        self._write_all()

    def add(self, line: str) -> None:
        if self._in_bucket:
            self._lines.append(line)
            if time.monotonic() - self._written >= self._bucket_seconds:
                self._write_all()
            return
        with open(self._path, "ab") as file:
            end = file.tell()
            try:
                file.write(line.encode())
                file.flush()
            except OSError:
                file.truncate(end)
                raise

    def flush(self) -> None:
        """Gives a bucket the lines that it has not yet."""
        if self._in_bucket:
            self._write_all()

    def _write_all(self) -> None:
        write(self._path, "".join(self._lines))
        self._written = time.monotonic()
