"""Reads slices of tensors in safetensors files, on a disk or in a bucket.

A file holds the length of its header, a JSON header and the bytes of all tensors. The library
safetensors reads only local files.
"""

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from specsamp import storage, validate

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLE = "pytorch_model.bin"  # only heads are read from pickles, see pickles.py
MEDUSA_SINGLE, MEDUSA_PICKLE = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
INTEGERS = {
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(bool),
}
# Not a path or a pattern, which the hub would expand.
PLAIN_NAME = re.compile(r"(?!\.\.?$)[^/\\\0*?\[\]]+")
NO_WEIGHTS = (
    f"neither {SINGLE} nor {INDEX}. Weights in pickles are refused: reading a pickle runs any code "
    "that its author put there. If you trust it, convert it with PyTorch and transformers: "
    "AutoModelForCausalLM.from_pretrained(NAME).save_pretrained('converted'), then copy its "
    "tokenizer files and give 'converted'"
)
MOST_HEADER_BYTES = 100 * 2**20  # the limit of the library
BLOCK_BYTES = 64 * 2**20  # of a tensor at a time, for comparing or quantising values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor in a file."""

    file: epath.Path
    kind: str  # its dtype by the name in the file; `DTYPES` and `INTEGERS` can be read
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    @property
    def dtype(self) -> np.dtype:
        return (DTYPES | INTEGERS)[self.kind]

    def read(self, index: Sequence[slice]) -> np.ndarray:
        """Returns a slice of the values: ``index`` has slices for the first axes, without a step
        for the first.

        For a local file, the slice is a memory map, whose pages are read on access. From a bucket,
        whole rows are read.
        """
        index = tuple(index)
        if not storage.in_bucket(self.file):
            if 0 in self.shape:
                return np.empty(self.shape, self.dtype)[index]
            return np.memmap(self.file, self.dtype, "r", self.offset, self.shape)[index]
        first, last, _ = index[0].indices(self.shape[0])
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        with self.file.open("rb") as file:
            file.seek(self.offset + first * row_bytes)
            rows = np.frombuffer(file.read((last - first) * row_bytes), self.dtype)
        return rows.reshape(last - first, *self.shape[1:])[(slice(None), *index[1:])]


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors hold the same values; False for dtypes that cannot be read."""
    if one.shape != other.shape or not {one.kind, other.kind} <= DTYPES.keys():
        return False
    rows = max(BLOCK_BYTES // (4 * max(math.prod(one.shape[1:]), 1)), 1)
    blocks = [[slice(start, start + rows)] for start in range(0, one.shape[0], rows)]
    return all(np.array_equal(one.read(block), other.read(block)) for block in blocks)


def find_tensors(folder: epath.Path) -> dict[str, Tensor]:
    """Returns all tensors of a checkpoint by name; only the headers of its files are read.

    Raises:
      FileNotFoundError: the files, or some files of the index, are missing.
      ValueError: a file is truncated or damaged, or the index names a file outside of the folder.
    """
    files = read_index(folder) if (folder / INDEX).exists() else [SINGLE]
    missing = [file for file in files if not (folder / file).exists()]
    if missing == [SINGLE]:
        raise FileNotFoundError(f"{folder} has {NO_WEIGHTS}")
    if missing:
        raise FileNotFoundError(
            f"{folder / INDEX} names files that are missing: {', '.join(missing)}: download them "
            "again"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= read_header(folder / file)
    return tensors


def read_index(folder: epath.Path) -> list[str]:
    """Returns the names of the files that the index of a checkpoint lists.

    Raises:
      ValueError: the file is not an index, or it names files outside of its folder, which could be
        any file that this user can read.
    """
    of_tensor = storage.read_json(folder / INDEX).get("weight_map")
    if not isinstance(of_tensor, dict):
        raise ValueError(
            f"{folder / INDEX} is not an index of tensors: weight_map must be an object; got "
            f"{of_tensor!r:.60}"
        )
    for tensor, file in of_tensor.items():
        if not isinstance(file, str) or not PLAIN_NAME.fullmatch(file):
            raise ValueError(
                f"{folder / INDEX} is not an index of tensors: the file of {tensor!r} must be the "
                f"name of a file in its folder; got {file!r}"
            )
    return sorted(set(of_tensor.values()))


def read_header(file: epath.Path) -> dict[str, Tensor]:
    """Returns the tensors of a file by name; raises ValueError if it is truncated or damaged."""
    if not storage.is_regular_file(file):
        raise ValueError(f"{file} is no regular file")  # reading a pipe would block
    size = file.stat().length

    def damaged(why):
        return ValueError(f"{file} is damaged ({why}): download or copy it again")

    with file.open("rb") as content:
        start = content.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            raise ValueError(
                f"{file} is a pointer of git LFS instead of the file: run git lfs pull in its "
                "folder"
            )
        if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
            raise damaged(
                f"truncated: {size} bytes, of which the header alone would take {8 + length}"
            )
        try:
            header: dict[str, Any] = json.loads(content.read(length))
            header.pop("__metadata__", None)
            tensors, filled = {}, 0
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                begin, end = validate.integers("data_offsets", entry["data_offsets"], limit=2**63)
                shape, kind = (
                    tuple(validate.integers("shape", entry["shape"], limit=2**63)),
                    str(entry["dtype"]),
                )
                dtype = (DTYPES | INTEGERS).get(kind)
                if not filled == begin <= end or (
                    dtype and end - begin != math.prod(shape) * dtype.itemsize
                ):
                    raise ValueError(
                        f"{name} {shape} of {kind} takes bytes {begin} to {end}, behind byte "
                        f"{filled}"
                    )
                tensors[name] = Tensor(file=file, kind=kind, shape=shape, offset=8 + length + begin)
                filled = end
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise damaged(f"its header cannot be read: {type(error).__name__}: {error}") from error
    if size != 8 + length + filled:
        raise damaged(f"truncated or too long: {size} bytes; its header says {8 + length + filled}")
    return tensors
