"""A loop whose compiled programs are kept on disk, so that later processes need not even trace
them.

The keys of JAX's own compilation cache come from the traced program, and tracing a pair takes
longer than decoding a text. Here the key of a program comes from its inputs: the loop's repr, the
shapes, the source files, JAX, and the CPU.
"""

import collections
import dataclasses
import functools
import hashlib
import os
import pathlib
import pickle
import platform
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from specsamp import machine, storage
from specsamp.compilation_cache import find_compilation_cache
from specsamp.decoding.loop import Loop
from specsamp.jax_names import serialize_executable
from specsamp.models import few_rows

_DIGEST_BYTES = hashlib.sha256().digest_size
# What programs are made of.
_SOURCES = [machine.PACKAGE / name for name in ("sampling", "models", "decoding", "mesh")]
# Packages of values in a loop; the versions of all but the first are part of a program's digest.
_KNOWN = ("specsamp", "builtins", "numpy", "jax", "jaxlib", "flax")
_found = collections.Counter()  # events of JAX's own cache, by thread
jax.monitoring.register_event_listener(
    lambda event, **_: _found.update([(event, threading.get_ident())])
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptLoop(Loop):
    """A `Loop` that reads its programs from the folder of the compilation cache, or compiles and
    writes them.

    If reading or writing fails for any reason, the program is compiled as usual. As with JAX's own
    cache, write access to the folder is permission to run code.
    """

    @classmethod
    def of(cls, loop: Loop) -> Loop:
        """Returns the loop with kept programs; without a cache on disk, without jit, on a mesh, or
        with classes from outside of the package, whose source is not known, the loop itself.
        """
        is_alone = loop.shards.mesh is None and jax.process_count() == 1
        # The repr is the same in other processes.
        is_named = not re.search(r" at 0x[0-9a-f]+>", repr(loop))
        parts = [type(value).__module__ for value in _values_in(loop)]
        is_named &= all(name.split(".")[0] in _KNOWN for name in parts)
        folder = find_compilation_cache()
        if (
            jax.config.jax_disable_jit
            or folder is None
            or "://" in folder
            or not is_alone
            or not is_named
        ):
            return loop
        return cls(**{field.name: getattr(loop, field.name) for field in dataclasses.fields(loop)})

    def prefill(self, *arrays: Any, **sizes: int) -> Any:
        """Runs `Loop.prefill`, kept on disk."""
        lower = functools.partial(Loop.prefill.lower, self, **sizes)
        return _program(f"prefill {sizes} {self!r}", lower, arrays)(*arrays)

    @property
    def program(self) -> Callable[..., Any]:
        """Returns `Loop.program`, kept on disk."""
        jitted, options = super().program, self.target.compiler_options
        return lambda *arrays: _program(f"run {options} {self!r}", jitted.lower, arrays)(*arrays)


def _values_in(value: Any) -> Iterator[Any]:
    """Yields a value, and all values of its fields and entries."""
    yield value
    inner: Iterable[Any] = ()
    if dataclasses.is_dataclass(value):
        inner = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, (tuple, list)):
        inner = value
    elif isinstance(value, Mapping):
        inner = value.values()
    for part in inner:
        yield from _values_in(part)


_programs: dict[str, Callable[..., Any]] = {}  # of this process


def _program(made_of: str, lower: Callable[..., Any], arrays: Any) -> Callable[..., Any]:
    leaves, structure = jax.tree.flatten(arrays)
    name = hashlib.sha256(
        repr((made_of, [jax.typeof(x) for x in leaves], structure)).encode()
    ).hexdigest()[:16]
    if name not in _programs:
        # A program of another source or CPU is replaced, so that the folder does not grow.
        path = pathlib.Path(find_compilation_cache() or os.devnull) / f"specsamp_program_{name}"
        _programs[name] = _read(path) or _compiled(path, lower(*arrays))
    return _programs[name]


def _read(path: pathlib.Path) -> Callable[..., Any] | None:
    try:
        content = path.read_bytes()
        kept = content[_DIGEST_BYTES:]
        if content[:_DIGEST_BYTES] != _digest(kept):
            return None
        one_device = jax.local_devices()[:1]  # that of programs outside of a mesh
        return serialize_executable.deserialize_and_load(
            *pickle.loads(kept), execution_devices=one_device
        )
    except Exception:  # of another JAX or platform, which may raise anything
        return None


def _compiled(path: pathlib.Path, lowered: Any) -> Callable[..., Any]:
    hit = "/jax/compilation_cache/cache_hits", threading.get_ident()
    before, program = _found[hit], lowered.compile()
    if _found[hit] > before:
        # XLA's CPU programs that came from JAX's cache lose their code when they are written again.
        return program
    try:
        kept = pickle.dumps(serialize_executable.serialize(program))
        storage.write(path, _digest(kept) + kept)
    except Exception:  # a full disk, or a platform whose programs cannot be kept
        pass
    return program


def _digest(kept: bytes) -> bytes:
    """Returns a digest of a program, and of the source, versions, kernels and hardware by which it
    was made.
    """
    made_by = f"{_installed()} {few_rows.kernel_name()}"
    return hashlib.sha256(made_by.encode() + kept).digest()


@functools.cache
def _installed() -> str:
    versions = platform.python_version(), *map(machine.version, ("jax", "jaxlib", "flax", "numpy"))
    flags = {name: os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    known = machine.source_digest(_SOURCES), versions, flags, sorted(jax.config.values.items())
    return repr(
        (
            *known,
            machine.host_facts(),
            machine.cpu_flags(),
            [str(d.device_kind) for d in jax.devices()],
        )
    )
