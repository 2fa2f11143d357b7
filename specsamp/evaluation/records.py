"""Reads records of data sets from files or the hub: JSON lines (plain or gzip), a JSON array, or
Parquet.
"""

import functools
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from specsamp import storage
from specsamp.checkpoints.hub import ID, library

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet")
CONVERTED = "refs/convert/parquet"  # the hub's own Parquet copy of a data set in another format
SPLIT = "test"  # of a data set on the hub
Record = Mapping[str, Any]


def read_records(source: str, fields: Mapping[str, type], *, key: str = "") -> list[Record]:
    """Returns the records of a data set, checked.

    Args:
      source: a file, on a disk or in a bucket, or the id of a data set on the hub.
      fields: required fields of every record, with their types.
      key: the field whose values must differ.

    Raises:
      FileNotFoundError: there is no such file or data set.
      ValueError: the file is damaged or empty, or a record is wrong; the message has file, line and
        field.
    """
    found: list[Record] = []
    seen: dict[Any, str] = {}
    for path in _find(source):
        for line, record in _parse(path):
            place = f"{os.fspath(path)}, line {line}"
            if not isinstance(record, dict):
                raise ValueError(f"{place}: must be a JSON object; got {str(record)[:40]!r}")
            for name, kind in fields.items():
                if name not in record:
                    raise ValueError(
                        f"{place}: no field {name!r}, there are {', '.join(map(repr, record))}"
                    )
                if not isinstance(record[name], kind):
                    raise ValueError(
                        f"{place}: field {name!r} must be {kind.__name__}, not {record[name]!r:.40}"
                    )
            if key and seen.setdefault(record[key], place) != place:
                raise ValueError(f"{place}: {key} {record[key]!r} is that of {seen[record[key]]}")
            found.append(record)
    if not found:
        raise ValueError(f"{source} is empty: it should hold records with {', '.join(fields)}")
    return found


def _parse(path: epath.Path) -> Sequence[tuple[int, Any]]:
    """Returns the records of a file, with the numbers of their lines."""
    if not storage.is_regular_file(path):
        raise ValueError(f"{path} is no regular file")
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
    if path.suffix == ".parquet":
        return list(enumerate(_parse_parquet(path, content), 1))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 (byte {error.start})") from error
    is_list = text.lstrip().startswith("[")
    found: list[tuple[int, Any]] = []
    for line, part in enumerate([text] if is_list else text.split("\n"), 1):
        try:
            if part.strip():
                found.append((line, json.loads(part)))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {line}: no JSON: {error}") from error
    return list(enumerate(found[0][1], 1)) if is_list else found


def _parse_parquet(path: epath.Path, content: bytes) -> list[Any]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"reading {path} needs a library: pip install pyarrow") from error
    try:
        return pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _find(source: str) -> list[epath.Path]:
    """Returns the files of a data set; files on the hub are downloaded."""
    path = storage.place(source)
    if path.exists():
        return [path]
    if source.startswith(storage.BUCKETS) or not ID.fullmatch(source) or source.endswith(ENDINGS):
        raise FileNotFoundError(f"no file {source!r}; give one, or the id of a data set on the hub")
    hub = library(source)
    try:
        # Fails at once without a network, where a list is tried five times.
        hub.auth_check(source, repo_type="dataset")
        for revision in (None, CONVERTED):
            names = hub.list_repo_files(source, repo_type="dataset", revision=revision)
            if chosen := choose_files(names):
                download = functools.partial(
                    hub.hf_hub_download, source, repo_type="dataset", revision=revision
                )
                return [epath.Path(download(name)) for name in chosen]
    except Exception as error:  # of the network, of the hub, of access rights
        raise FileNotFoundError(
            f"no file {source!r}, and the hub did not send it ({type(error).__name__}: {error})"
        ) from error
    raise FileNotFoundError(
        f"the data set {source!r} has no file of the split {SPLIT!r}: give a file"
    )


def choose_files(names: Sequence[str]) -> list[str]:
    """Returns the files of the split in the first folder that has any; without any, the only data
    file.
    """
    data = sorted(name for name in names if name.endswith(ENDINGS))
    of_split = [name for name in data if re.search(rf"(^|/){SPLIT}[-./]", name)]
    if not of_split:
        return data if len(data) == 1 else []
    return [name for name in of_split if os.path.dirname(name) == os.path.dirname(of_split[0])]
