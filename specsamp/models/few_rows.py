"""Products of few rows on a CPU, by a kernel of our own (``few_rows.cc``) that is off until a
command calls `build`.

On a CPU without AVX-512, XLA takes nearly twice as long for two rows of a product as for one row,
so that drafts gain little. The kernel reads every weight once for all rows. Commands build it with
the machine's C++ compiler and keep it in the folder of compiled programs; `generate` never builds
it.
"""

import ctypes
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from specsamp import machine
from specsamp.compilation_cache import use_compilation_cache

Array = jax.Array

SOURCE = pathlib.Path(__file__).with_suffix(".cc")
# A library for each: two compilers at once take half the time.
WEIGHTS = {"float32": "float", "int8": "int8_t"}
SWITCH = "SPECSAMP_CPU_KERNEL"  # 0: the kernel stays off
FAILED = " failed: "  # in the sentence of `build` if compiler or check ended with an error
MOST_ROWS = 16  # of a product; with more rows XLA is as fast, and with a single float32 row faster
FLAGS = ("-O3", "-march=native", "-std=gnu++17", "-shared", "-fPIC", "-w")
SECONDS = 60  # limit for the compiler, and for the check
NEAR = 1e-5  # largest difference from NumPy's product, of sums with a variance of about one

# The name under which XLA knows the kernel, before the type of its weights.
_target: str | None = None


def build() -> str:
    """Builds and checks the kernel unless it is kept already, and turns it on; call it before
    anything is compiled.

    Returns:
      A sentence for the user: the kernel is used in this process, or why it is not. Nothing is
      raised.
    """
    global _target
    if _target is None:
        try:
            _target = _register(_library())
        except (_Off, OSError) as reason:  # OSError: a full disk, or a damaged library
            return f"XLA's products of few rows: {' '.join(str(reason).split())}"
    return f"products of few rows by a kernel of this machine's compiler, {_target}"


def kernel_name() -> str:
    """Returns the name of the kernel in use, with a hash of source, compiler and CPU; empty if it
    is off.
    """
    return _target or ""


class _Off(Exception):
    """Says why the kernel is not used."""


def _library() -> pathlib.Path:
    """Returns the kernel's files, without ``_float32.so`` and ``_int8.so``; builds and checks them
    if one is missing.
    """
    if os.environ.get(SWITCH) == "0":
        raise _Off(f"{SWITCH}=0")
    if sys.platform != "linux" or jax.default_backend() != "cpu":
        raise _Off("the kernel is for CPUs under Linux")
    compiler, folder = shutil.which(os.environ.get("CXX", "g++")), use_compilation_cache()
    if compiler is None:
        raise _Off("there is no C++ compiler (g++, or the environment variable CXX)")
    if folder is None or "://" in folder:
        raise _Off("compiled programs are not kept in a folder of this machine")
    os.makedirs(folder, exist_ok=True)  # JAX makes it only when it writes
    told = _output([compiler, "--version"]), machine.version("jaxlib"), machine.cpu_flags(), FLAGS
    key = hashlib.sha256(SOURCE.read_bytes() + repr(told).encode()).hexdigest()[:12]
    library = pathlib.Path(folder, f"specsamp_few_rows_{key}")
    if not all(os.path.exists(f"{library}_{dtype}.so") for dtype in WEIGHTS):
        with tempfile.TemporaryDirectory(dir=folder) as made, ThreadPoolExecutor() as pool:
            new = pathlib.Path(made, library.name)
            command = [compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", SOURCE]
            list(
                pool.map(
                    lambda one: _output(
                        [*command, f"-DWEIGHT={WEIGHTS[one]}", "-o", f"{new}_{one}.so"]
                    ),
                    WEIGHTS,
                )
            )
            _output([sys.executable, "-m", __name__, new])
            for dtype in WEIGHTS:
                os.replace(f"{new}_{dtype}.so", f"{library}_{dtype}.so")  # whole, or not there
    return library


def _output(command: Sequence[str | os.PathLike]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or "").strip().splitlines()
        raise _Off(
            f"{os.path.basename(command[0])}{FAILED}{said[-1] if said else error}"
        ) from error
    return done.stdout


def _register(library: pathlib.Path) -> str:
    for dtype in WEIGHTS:
        handler = jax.ffi.pycapsule(ctypes.CDLL(f"{library}_{dtype}.so").few_rows)
        jax.ffi.register_ffi_target(f"{library.name}_{dtype}", handler, platform="cpu")
    return library.name


def takes(spec: str, x: Array, y: Array) -> bool:
    """Returns whether the kernel is on and computes ``einsum(spec, x, y)``: few float32 rows times
    a matrix ``[D, N]``.
    """
    if _target is None or y.ndim != 2 or x.dtype != jnp.float32 or str(y.dtype) not in WEIGHTS:
        return False
    fewest = 1 if y.dtype == jnp.int8 else 2
    is_product = re.fullmatch(r"(\w*)(\w),\2(\w)->\1\3", spec)
    return bool(is_product) and fewest * y.shape[0] <= x.size <= MOST_ROWS * y.shape[0]


def multiply(x: Array, y: Array) -> Array:
    """Multiplies float32 ``x`` ``[..., D]`` by a matrix ``[D, N]`` of float32 or int8; accumulates
    in float32.
    """
    return _multiply(x.reshape(-1, y.shape[0]), y).reshape(*x.shape[:-1], y.shape[1])


@jax.custom_batching.custom_vmap
def _multiply(x_TD: Array, y_DN: Array) -> Array:
    result = jax.ShapeDtypeStruct((x_TD.shape[0], y_DN.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(f"{_target}_{y_DN.dtype}", result)(x_TD, y_DN)


@_multiply.def_vmap
def _multiply_each(
    axis_size: int, in_batched: Sequence[bool], x_TD: Array, y_DN: Array
) -> tuple[Array, bool]:
    axes = [0 if is_batched else None for is_batched in in_batched]
    return jax.vmap(lambda x, y: x @ y.astype(x.dtype), axes)(x_TD, y_DN), True


def check(product: Callable[[Array, Array], Array] = multiply) -> None:
    """Compares the kernel with NumPy, including sizes that fill no vector; raises ValueError if
    they differ.
    """
    noise, cases = np.random.default_rng(0), []
    sizes = [(rows, 67, 129) for rows in (*range(1, 10), MOST_ROWS)]
    for rows, summed, outputs in [*sizes, (4, 512, 1536), (2, 5, 3)]:
        x_TD = noise.normal(0, summed**-0.5, (rows, summed)).astype(np.float32)
        cases.append((x_TD, noise.normal(size=(summed, outputs)).astype(np.float32)))
        cases.append((x_TD, noise.integers(-2, 3, (summed, outputs)).astype(np.int8)))
    for (x_TD, y_DN), found_TN in zip(
        cases, jax.jit(lambda cases: [product(*case) for case in cases])(cases)
    ):
        gap = np.abs(np.asarray(found_TN) - x_TD @ y_DN.astype(np.float32)).max()
        if not gap < NEAR:
            raise ValueError(f"{len(x_TD)} rows by {y_DN.shape} of {y_DN.dtype}: off by {gap:.1e}")


# In a process of its own, which may crash: checks the library of its argument.
if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    _target = _register(pathlib.Path(sys.argv[1]))
    check()
