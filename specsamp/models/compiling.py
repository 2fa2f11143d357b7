"""Options that a model asks of the compiler of the programs that call it.

XLA's CPU backend hands float32 products to YNNPACK, whose time grows with every row: scoring 5 to 7
rows took 20 to 40% longer than with Eigen, which takes as long for seven rows as for two. Eigen is
several times *slower* where both sides contract their last axis; so only a model whose weights are laid
out for it asks for it (`TransformerLM.compiler_options`).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

Options = tuple[tuple[str, str], ...]

# Row by row, unrolled, is the cheapest way to read and write at every row's own offset, up to about this many
# rows; beyond it the program grows too large and the compiler gets a loop over the rows instead.
MAX_UNROLLED_ROWS = 32


@functools.cache
def few_rows_on_cpu() -> Options:
    """Returns options that give products of few rows to Eigen.

    Returns nothing on other platforms, or where the compiler knows no such option.
    """
    return _if_known((("xla_cpu_experimental_ynn_fusion_type", ""),)) if jax.default_backend() == "cpu" else ()


# All-reduces as they stand: with few rows, chains of collective-permutes that overlap a product wait longer.
FEWEST_COLLECTIVES = (("xla_jf_spmd_threshold_for_windowed_einsum_mib", "1000000"),)


@functools.cache
def fewest_collectives_on_tpu() -> Options:
    """Returns `FEWEST_COLLECTIVES`; nothing on other platforms, or where the compiler knows no such option."""
    return _if_known(FEWEST_COLLECTIVES) if jax.default_backend() == "tpu" else ()


def _if_known(options: Options) -> Options:
    try:
        jax.jit(jnp.negative, compiler_options=dict(options)).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:  # "No such compile option"
        return ()
    return options


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether an error of JAX's runtime or compiler says that a program does not fit into memory."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Ran out of memory" in str(error)
