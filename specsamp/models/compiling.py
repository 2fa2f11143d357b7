"""Compiler options for programs that call a model, and the number of rows that are unrolled.

XLA's CPU backend gives float32 products to YNNPACK, whose time grows with every row: scoring 5 to 7 rows took 20 to 40%
longer than with Eigen, which takes as long for seven rows as for two. Eigen is several times *slower* where both sides
contract their last axis, so only models in the weight order of CPUs use it (`TransformerLM.compiler_options`).
"""

from __future__ import annotations

import errno
import functools
import os

import jax
import jax.numpy as jnp

Options = tuple[tuple[str, str], ...]

# Unrolled row by row is the cheapest way to read and write at every row's own offset, up to about this many rows. With
# more rows the program would grow too large, and the compiler makes a loop over the rows.
MAX_UNROLLED_ROWS = 32


FEW_ROWS = (("xla_cpu_experimental_ynn_fusion_type", ""),)  # of a CPU: Eigen multiplies few rows
# Of TPUs: all-reduces stay whole. With few rows, chains of collective-permutes that overlap a product take longer.
FEWEST_COLLECTIVES = (("xla_jf_spmd_threshold_for_windowed_einsum_mib", "1000000"),)


@functools.cache
def options_on(backend: str, options: Options) -> Options:
    """Returns ``options`` if ``backend`` is the default backend and its compiler knows them; else nothing."""
    if jax.default_backend() != backend:
        return ()
    try:
        jax.jit(jnp.negative, compiler_options=dict(options)).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:  # "No such compile option"
        return ()
    return options


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether an error of JAX's runtime or compiler says that a program does not fit into memory."""
    text = str(error)
    return not is_full_disk(error) and ("RESOURCE_EXHAUSTED" in text or "Ran out of memory" in text)


def is_full_disk(error: Exception) -> bool:
    """Returns whether an error of JAX's runtime says that a file could not be written any further."""
    return any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
