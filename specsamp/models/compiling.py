"""Compiler options for programs that call a model, and the number of rows that are unrolled.

XLA's CPU backend computes float32 products with YNNPACK, whose time grows with every row: scoring 5
to 7 rows took 20 to 40% longer than with Eigen, which takes as long for seven rows as for two. For
products that contract the last axis of both sides, Eigen is several times *slower*, so only models
in the weight order of CPUs use it.
"""

import errno
import functools
import os

import jax
import jax.numpy as jnp

Options = tuple[tuple[str, str], ...]

# Up to about this many rows, unrolled code is the cheapest way to read and write at a different
# offset in each row. With more rows the program would grow too large, and the compiler makes a loop
# over the rows.
MAX_UNROLLED_ROWS = 32


# Of a CPU: Eigen multiplies few rows; LLVM optimises little, so compiling takes a fifth less time,
# and programs are as fast.
FEW_ROWS = (("xla_cpu_experimental_ynn_fusion_type", ""), ("xla_backend_optimization_level", "1"))
# Of TPUs: all-reduces stay whole. With few rows, chains of collective-permutes that overlap a
# product take longer.
FEWEST_COLLECTIVES = (("xla_jf_spmd_threshold_for_windowed_einsum_mib", "1000000"),)


@functools.cache
def options_on(backend: str, options: Options) -> Options:
    """Returns ``options`` if ``backend`` is the default backend and its compiler accepts them; else
    ().
    """
    if jax.default_backend() != backend:
        return ()
    try:
        jax.jit(jnp.negative, compiler_options=dict(options)).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:  # "No such compile option"
        return ()
    return options


def is_out_of_memory(error: Exception) -> bool:
    """Returns True for errors of JAX's runtime or compiler that report insufficient memory."""
    text = str(error)
    return not is_full_disk(error) and ("RESOURCE_EXHAUSTED" in text or "Ran out of memory" in text)


def is_full_disk(error: Exception) -> bool:
    """Returns True for errors of JAX's runtime that report a full disk."""
    return any(
        os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    )
