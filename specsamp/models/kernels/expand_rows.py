"""Moves the logits of a reduced vocabulary to their ids in the whole one.

Ids increase, so the 128 ids of a block have ranks that lie in two neighbouring blocks of the
reduced vocabulary: two gathers within registers and a choice move them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specsamp.arrays import pad_axis
from specsamp.jax_names import pl, pltpu
from specsamp.models.kernels.common import LANES

Array = jax.Array

NAME = "expand_rows"  # of the kernel in compiled programs
ROWS = 8  # of a step
BLOCKS = 16  # of `LANES` ids, of a step


def expand_rows(x_RU: Array, ranks_1V: Array, first_J: Array, *, interpret: bool) -> Array:
    """Returns ``[R, V]``, ``x_RU[:, ranks_1V[0]]``, on one device; -inf where the rank is U.

    Args:
      x_RU: float32.
      ranks_1V: int32; those below U increase. A single axis would be copied to another layout.
      first_J: int32, the least rank of each `LANES` ids.
    """
    (rows, size), num_ids = x_RU.shape, ranks_1V.shape[1]
    padding = max(-size % LANES, 2 * LANES - size)
    if padding:
        x_RU = pad_axis(x_RU, padding)
    steps = pl.cdiv(num_ids, BLOCKS * LANES)
    rows_here = min(rows, ROWS)
    return pl.pallas_call(
        functools.partial(_kernel, size=size, unroll=not interpret),
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
    )(first_J, x_RU, ranks_1V)


def _kernel(first_J, x, ranks, out, *, size, unroll):
    """Moves the entries of some rows to `BLOCKS` blocks of ids."""
    shape = max(x.shape[0], 2), LANES  # single rows cannot be gathered
    start_of_step = pl.program_id(1) * BLOCKS

    def move(block, _):
        ids = pl.ds(pl.multiple_of(block * LANES, LANES), LANES)
        number = jnp.minimum(start_of_step + block, len(first_J) - 1)
        first = jnp.minimum(first_J[number] & -LANES, x.shape[1] - 2 * LANES)
        ranks_RL = jnp.broadcast_to(ranks[:, ids], shape)
        lanes_RL = (ranks_RL - first) & LANES - 1
        found = []
        for start in (0, LANES):
            part = x[:, pl.ds(pl.multiple_of(first + start, LANES), LANES)]
            part_RL = jnp.broadcast_to(part, shape)
            found.append(jnp.take_along_axis(part_RL, lanes_RL, axis=1, mode="promise_in_bounds"))
        moved_RL = jnp.where(ranks_RL - first < LANES, *found)
        out[:, ids] = jnp.where(ranks_RL < size, moved_RL, -jnp.inf)[: x.shape[0]]

    # Interpreted, an unrolled loop takes twenty times as long to compile.
    jax.lax.fori_loop(0, BLOCKS, move, None, unroll=unroll)
