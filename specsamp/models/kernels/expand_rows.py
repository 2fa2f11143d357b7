"""Moves the logits of a reduced vocabulary to their ids in the whole one.

Ids increase, so the 128 ids of a block have ranks that lie in two neighbouring blocks of the
reduced vocabulary: two gathers within registers and a choice move them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specsamp.jax_names import pl, pltpu
from specsamp.models.kernels.common import LANES

Array = jax.Array

NAME = "expand_rows"  # of the kernel in compiled programs
ROWS = 8  # of a step
BLOCKS = 64  # of `LANES` ids, of a step


def expand_rows(x_RU: Array, ranks_V: Array, *, interpret: bool = False) -> Array:
    """Returns ``[R, V]``, ``x_RU[:, ranks_V]``, on one device; -inf where the rank is U.

    Args:
      x_RU: float32.
      ranks_V: int32; those below U increase.
    """
    (rows, size), num_ids = x_RU.shape, len(ranks_V)
    padding = max(-size % LANES, 2 * LANES - size)
    if padding:
        x_RU = jnp.pad(x_RU, ((0, 0), (0, padding)))
    of_block_JL = jnp.pad(ranks_V, (0, -num_ids % LANES), constant_values=size).reshape(-1, LANES)
    first_J = jnp.minimum(of_block_JL.min(-1) & -LANES, size + padding - 2 * LANES)
    steps = pl.cdiv(len(first_J), BLOCKS)
    first_J = jnp.pad(first_J, (0, steps * BLOCKS - len(first_J)))
    rows_here = min(rows, ROWS)
    return pl.pallas_call(
        functools.partial(_kernel, size=size),
        out_shape=jax.ShapeDtypeStruct((rows, num_ids), x_RU.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(rows, rows_here), steps),
            in_specs=[
                pl.BlockSpec((rows_here, size + padding), lambda row, step, first_J: (row, 0)),
                pl.BlockSpec((1, BLOCKS * LANES), lambda row, step, first_J: (0, step)),
            ],
            out_specs=pl.BlockSpec(
                (rows_here, BLOCKS * LANES), lambda row, step, first_J: (row, step)
            ),
        ),
        # On both cores of a chip.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name=NAME,
    )(first_J, x_RU, ranks_V[None])


def _kernel(first_J, x, ranks, out, *, size):
    """Moves the entries of some rows to `BLOCKS` blocks of ids."""
    for block in range(BLOCKS):
        ids = pl.ds(block * LANES, LANES)
        first = first_J[pl.program_id(1) * BLOCKS + block]
        ranks_RL = jnp.broadcast_to(ranks[:, ids], (x.shape[0], LANES))
        lane_RL = (ranks_RL - first) & LANES - 1
        low, high = (
            jnp.take_along_axis(
                x[:, pl.ds(pl.multiple_of(first + start, LANES), LANES)],
                lane_RL,
                axis=1,
                mode="promise_in_bounds",
            )
            for start in (0, LANES)
        )
        moved = jnp.where(ranks_RL - first < LANES, low, high)
        out[:, ids] = jnp.where(ranks_RL < size, moved, -jnp.inf)
