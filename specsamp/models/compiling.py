"""Compiler options for programs that call a model.

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

# Of a CPU: Eigen multiplies few rows; LLVM optimises little, so compiling takes a fifth less time,
# and programs are as fast.
FEW_ROWS = (("xla_cpu_experimental_ynn_fusion_type", ""), ("xla_backend_optimization_level", "1"))
# Of TPUs. All-reduces stay whole: with few rows, chains of collective-permutes that overlap a
# product take longer. Matrices keep the tiles of arguments: for others the compiler for v7x copied
# every weight before a loop.
ON_TPU = (
    ("xla_jf_spmd_threshold_for_windowed_einsum_mib", "1000000"),
    ("xla_tpu_control_large_2nd_minor_layout_for_x16", "false"),
)


@functools.cache
def options_on(backend: str, options: Options) -> Options:
    """Returns those of ``options`` that the compiler accepts, if ``backend`` is the default
    backend; else ().
    """
    if jax.default_backend() != backend:
        return ()
    return tuple(option for option in options if _is_accepted(option))


def _is_accepted(option: tuple[str, str]) -> bool:
    try:
        jax.jit(jnp.negative, compiler_options=dict([option])).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:  # "No such compile option"
        return False
    return True


def is_out_of_memory(error: Exception) -> bool:
    """Returns True for errors of JAX's runtime or compiler that report insufficient memory."""
    text = str(error)
    return not is_full_disk(error) and ("RESOURCE_EXHAUSTED" in text or "Ran out of memory" in text)


def is_full_disk(error: Exception) -> bool:
    """Returns True for errors of JAX's runtime that report a full disk."""
    return any(
        os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    )
