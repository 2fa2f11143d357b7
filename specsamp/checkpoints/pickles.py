"""Reads tensors of PyTorch's zip files without PyTorch, and without running the code in them.

Such a file is a zip archive: ``data.pkl`` describes the tensors, and each storage is an
uncompressed entry with the bytes. A pickle is a program. Here it may make tuples, lists,
dictionaries, numbers and strings, and call a single function, which records the location of a
tensor. Every other name is refused before it is used.
"""

import io
import math
import pickle
import pickletools
import zipfile
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
# Opcodes that PyTorch writes for a dictionary of tensors; all others import, call or reserve memory
# in other ways.
OPCODES = frozenset(
    "PROTO STOP MARK GLOBAL BINPUT LONG_BINPUT BINGET LONG_BINGET EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 "
    "TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS BINUNICODE SHORT_BINUNICODE "
    "BININT BININT1 BININT2 LONG1 BINFLOAT NONE "
    "NEWTRUE NEWFALSE BINPERSID REDUCE BUILD".split()
)
LOCAL_HEADER_BYTES = 30  # of a zip entry, before its name


def read_pickle(file: epath.Path) -> dict[str, Tensor]:
    """Returns the tensors of a file by name; their values are not read before a slice is read.

    Raises:
      ValueError: the file is damaged or older than PyTorch 1.6, holds more than tensors by name, or
        holds a tensor that is not contiguous; names the file.
    """
    if not storage.is_regular_file(file):
        raise ValueError(f"{file} is not a regular file")
    try:
        with file.open("rb") as content, zipfile.ZipFile(content) as archive:
            (root,) = [
                name[: -len("data.pkl")] for name in archive.namelist() if name.endswith("data.pkl")
            ]
            if archive.getinfo(f"{root}data.pkl").file_size > MOST_DESCRIPTION_BYTES:
                raise ValueError("its description of the tensors is too long")
            found = _load(archive.read(f"{root}data.pkl"))
            if not isinstance(found, dict):
                raise ValueError(f"it holds {type(found).__name__}")
            return {
                name: _tensor(file, content, archive, root, name, found[name]) for name in found
            }
    except Exception as error:  # a hostile file can fail in any way
        raise ValueError(
            f"{file} is refused: it is damaged, older than PyTorch 1.6 or holds more than tensors "
            f"by name ({type(error).__name__}: {error})"
        ) from error


def _load(description: bytes) -> Any:
    for opcode, argument, _ in pickletools.genops(description):
        if opcode.name not in OPCODES:
            raise ValueError(
                f"it uses the opcode {opcode.name}, which a dictionary of tensors does not need"
            )
        # Memory would be reserved for it.
        if opcode.name == "LONG_BINPUT" and argument > len(description):
            raise ValueError(f"it stores a value at place {argument}")
    return _Unpickler(io.BytesIO(description)).load()


def _tensor(
    file: epath.Path, content: Any, archive: zipfile.ZipFile, root: str, name: str, value: Any
) -> Tensor:
    """Returns the location of a tensor's bytes in the archive."""
    if not isinstance(name, str) or not isinstance(value, _Described):
        raise ValueError(f"{name!r} is not a tensor")
    entry, dtype = archive.getinfo(f"{root}data/{value.key}"), (DTYPES | INTEGERS)[value.kind]
    content.seek(entry.header_offset)
    header = content.read(LOCAL_HEADER_BYTES)
    # Name, and padding.
    extra = sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    start, size = entry.header_offset + LOCAL_HEADER_BYTES + extra, content.seek(0, io.SEEK_END)
    end = (value.offset + math.prod(value.shape)) * dtype.itemsize
    if (
        entry.compress_type != zipfile.ZIP_STORED
        or end > entry.file_size
        or start + entry.file_size > size
    ):
        raise ValueError(
            f"{name} {value.shape} is compressed, or takes {end} bytes of {entry.file_size}"
        )
    return Tensor(
        file=file, kind=value.kind, shape=value.shape, offset=start + value.offset * dtype.itemsize
    )


class _Unpickler(pickle.Unpickler):
    """Resolves the names that a dictionary of tensors needs, to objects that a pickle cannot
    change.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _Names
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if module == "torch" and name in KINDS:
            return KINDS[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, saved: Any) -> tuple[str, str]:
        what, kind, key, *_ = saved
        if what != "storage" or kind not in KINDS.values() or not isinstance(key, str):
            raise pickle.UnpicklingError(f"it refers to {what!r}")
        return kind, key


# A pickle can assign attributes neither to a named tuple nor to an object without a dictionary of
# attributes.


class _Described(NamedTuple):
    """A tensor: dtype and name of its storage, the offset of its first value, and its shape."""

    kind: str
    key: str
    offset: int
    shape: tuple[int, ...]


class _Names(dict):
    """Replaces OrderedDict, whose attributes (versions of modules) are not needed here."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


class _Rebuild:
    """Replaces the function that makes a tensor from a storage."""

    __slots__ = ()

    def __call__(
        self, of: tuple[str, str], offset: int, shape: tuple, strides: tuple, *_: Any
    ) -> _Described:
        if not all(type(size) is int and size >= 0 for size in (offset, *shape, *strides)):
            raise pickle.UnpicklingError("it describes a tensor by other values than sizes")
        plain = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        if any(
            n > 1 and stride != want for n, stride, want in zip(shape, strides, plain, strict=True)
        ):
            raise pickle.UnpicklingError(
                f"a tensor {shape} with strides {strides} is a view: save it contiguous"
            )
        return _Described(*of, offset, tuple(shape))


_rebuild = _Rebuild()
