"""Files of runs and results, on a disk or in a bucket (``gs://``): whole or not there at all."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

import fsspec
from etils import epath

LIBRARIES = {"gs://": "gcsfs", "s3://": "s3fs", "az://": "adlfs"}
BUCKETS = tuple(LIBRARIES)


def place(path: str | os.PathLike) -> epath.Path:
    """Returns a path of either kind; ``~`` is the user's home.

    Raises:
      ValueError: a scheme that is not known, or whose library is not installed.
    """
    text = os.fspath(path)
    if "://" in text and not text.startswith(BUCKETS):
        raise ValueError(f"no storage of this kind: {text!r}; use a local path or one of {', '.join(BUCKETS)}")
    if not text.startswith(BUCKETS):
        return epath.Path(text).expanduser()
    scheme = text[: text.index("/") + 2]
    try:
        fsspec.get_filesystem_class(scheme.removesuffix("://"))
    except ImportError as error:
        library = LIBRARIES[scheme]
        raise ValueError(f"{text!r} needs a library that is not installed: pip install {library} ({error})") from error
    return epath.Path(text)


def write(path: str | os.PathLike, content: str | bytes) -> None:
    """Writes a file whole or not at all, creating its folder: a reader, or a crash, never sees half of it."""
    path = place(path)
    content = content.encode() if isinstance(content, str) else content
    if os.fspath(path).startswith(BUCKETS):
        path.write_bytes(content)  # an object appears when it is complete
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # temporary files are private
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: str | os.PathLike, content: Any) -> None:
    """Writes a JSON document for people to read, whole or not at all; see `write`."""
    write(path, json.dumps(content, indent=2) + "\n")


def is_regular_file(path: str | os.PathLike) -> bool:
    """Returns whether there is a file that can be read to its end: no folder, pipe or device."""
    path = place(path)
    return path.is_file() if os.fspath(path).startswith(BUCKETS) else os.path.isfile(path)


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Returns the JSON object that a file holds.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no regular file (a pipe would be waited for), or holds no JSON object in UTF-8, or one that is
        nested too deep to be read.
    """
    path = place(path)
    if path.exists() and not is_regular_file(path):
        raise ValueError(f"{path} is no regular file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of the first kind are wrong UTF-8, wrong JSON and endless numbers
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no JSON object")
    return content


class Lines:
    """A growing text file; in a bucket it is written anew with every line."""

    def __init__(self, path: Any, lines: list[str]):
        self._path, self._lines = place(path), list(lines)
        write(self._path, "".join(self._lines))

    def add(self, line: str) -> None:
        self._lines.append(line)
        if os.fspath(self._path).startswith(BUCKETS):
            write(self._path, "".join(self._lines))
        else:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(line)
