"""Files of runs and results, on a disk or in a bucket (``gs://``): whole or not there at all."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import fsspec
from etils import epath

LIBRARIES = {"gs://": "gcsfs", "s3://": "s3fs", "az://": "adlfs"}
BUCKETS = tuple(LIBRARIES)


def place(path: str | os.PathLike) -> epath.Path:
    """A path of either kind; ``~`` is the user's home.

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
    """All of it or nothing, creating the folder: a reader, or a crash, never sees half a file."""
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
