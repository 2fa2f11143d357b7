"""Reads tensors of PyTorch's zip files without PyTorch, and without running the code in them.

Such a file is a zip archive: ``data.pkl`` describes the tensors, and the bytes of each storage are an entry of their
own, not compressed. A pickle is a program. Here it may make tuples, lists, dictionaries, numbers and texts, and call
one function, ours, which notes where a tensor lies; whatever else it names is refused before it runs.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from specsamp import storage
from specsamp.checkpoints.safetensors_io import DTYPES, INTEGERS, Tensor

MOST_DESCRIPTION_BYTES = 16 * 2**20  # of data.pkl: a head has dozens of tensors
KINDS = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "BoolStorage": "BOOL",
}
# Opcodes that PyTorch writes for a dictionary of tensors; others import, call or reserve memory in ways of their own.
OPCODES = frozenset(
    "PROTO STOP MARK GLOBAL BINPUT LONG_BINPUT BINGET LONG_BINGET EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST "
    "APPEND APPENDS EMPTY_DICT SETITEM SETITEMS BINUNICODE SHORT_BINUNICODE BININT BININT1 BININT2 LONG1 BINFLOAT NONE "
    "NEWTRUE NEWFALSE BINPERSID REDUCE BUILD".split()
)
LOCAL_HEADER_BYTES = 30  # of a zip entry, before its name


def read_pickle(file: epath.Path) -> dict[str, Tensor]:
    """Returns the tensors of a file by name; their values stay there until a slice is read.

    Raises:
      ValueError: the file is damaged or in the format of before PyTorch 1.6, holds anything beyond tensors and plain
        containers, or a tensor that is no plain run of its storage; with file and name.
    """
    if not storage.is_regular_file(file):
        raise ValueError(f"{file} is no regular file")
    with file.open("rb") as content:
        try:
            with zipfile.ZipFile(content) as archive:
                return _read_archive(file, content, archive)
        except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError) as error:
            raise ValueError(
                f"{file} is no zip file of PyTorch ({error}): save it anew with torch.save of PyTorch 1.6 or later"
            ) from error


def _read_archive(file: epath.Path, content: Any, archive: zipfile.ZipFile) -> dict[str, Tensor]:
    entries = {entry.filename: entry for entry in archive.infolist()}
    descriptions = [name for name in entries if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(descriptions) != 1:
        raise ValueError(f"{file} is no file of torch.save: it has {len(descriptions)} entries named data.pkl")
    if entries[descriptions[0]].file_size > MOST_DESCRIPTION_BYTES:
        raise ValueError(
            f"{file} describes its tensors in {entries[descriptions[0]].file_size} bytes: too many to read"
        )
    root = descriptions[0].removesuffix("data.pkl")
    if f"{root}byteorder" in entries and archive.read(f"{root}byteorder") != b"little":
        raise ValueError(f"{file} was written on a machine of another byte order: save it anew")
    found = _load(file, archive.read(descriptions[0]))
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping):
        raise ValueError(f"{file} holds {type(found).__name__}, not tensors by name")
    size = content.seek(0, io.SEEK_END)
    tensors = {}
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, _Described):
            raise ValueError(f"{file} holds {name!r}, which is no tensor: only tensors by name are read")
        entry = entries.get(f"{root}data/{value.storage.key}")
        if entry is None or entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{file} lacks the bytes of {name}, or has compressed them: save it anew with torch.save")
        content.seek(entry.header_offset)
        header = content.read(LOCAL_HEADER_BYTES)
        extra = sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))  # name, and padding
        start, kind = entry.header_offset + LOCAL_HEADER_BYTES + extra, value.storage.kind
        width = (DTYPES | INTEGERS)[kind].itemsize
        end = (value.offset + math.prod(value.shape)) * width
        if end > entry.file_size or start + entry.file_size > size:
            raise ValueError(f"{file} is damaged: {name} {value.shape} takes {end} bytes of {entry.file_size}")
        tensors[name] = Tensor(file=file, kind=kind, shape=value.shape, offset=start + value.offset * width)
    return tensors


def _load(file: epath.Path, description: bytes) -> Any:
    try:
        for opcode, argument, _ in pickletools.genops(description):
            if opcode.name not in OPCODES:
                raise ValueError(f"the opcode {opcode.name} is not of a dictionary of tensors")
            if opcode.name == "LONG_BINPUT" and argument > len(description):
                raise ValueError(f"it remembers a value at place {argument}")  # memory would be reserved for it
        return _Unpickler(io.BytesIO(description)).load()
    except Exception as error:  # a hostile pickle can fail in any way
        raise ValueError(
            f"{file} is refused: it holds more than tensors and plain containers, or is damaged "
            f"({type(error).__name__}: {error})"
        ) from error


class _Unpickler(pickle.Unpickler):
    """Knows the names that a dictionary of tensors needs; everything it gives out is ours, and changes nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _Names
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if module == "torch" and name in KINDS:
            return _Kind(KINDS[name])
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, saved: Any) -> _Storage:
        what, kind, key, _, length = saved
        if what != "storage" or not isinstance(kind, _Kind) or not isinstance(key, str) or type(length) is not int:
            raise pickle.UnpicklingError(f"it refers to {what!r}")
        return _Storage(kind.kind, key, length)


# A pickle can neither assign attributes to a plain tuple nor to an object without a dictionary of attributes.


class _Kind(NamedTuple):
    """Stands for a storage's class."""

    kind: str


class _Storage(NamedTuple):
    kind: str
    key: str
    length: int


class _Described(NamedTuple):
    """A tensor: its storage, where it begins there, and its shape."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]


class _Names(dict):
    """Stands for an OrderedDict, whose attributes (versions of modules) are of no use here."""

    __slots__ = ()

    def __init__(self, *items: Any):
        super().__init__(*items)

    def __setstate__(self, state: Any) -> None:
        pass


class _Rebuild:
    """Stands for the function that makes a tensor of a storage."""

    __slots__ = ()

    def __call__(self, of: _Storage, offset: int, shape: tuple, strides: tuple, *_: Any) -> _Described:
        sizes = (offset, *shape, *strides)
        if not isinstance(of, _Storage) or not all(type(size) is int and size >= 0 for size in sizes):
            raise pickle.UnpicklingError("it describes a tensor by other things than sizes")
        plain = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        if any(n > 1 and stride != want for n, stride, want in zip(shape, strides, plain, strict=True)):
            raise pickle.UnpicklingError(f"a tensor {shape} with strides {strides} is a view: save it contiguous")
        return _Described(of, offset, tuple(shape))


_rebuild = _Rebuild()
