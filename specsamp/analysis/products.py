"""Times the products of one call of the target alone: what remains of a call if nothing but its weights is read.

They run many times inside one `lax.fori_loop`, so that the cost of dispatching a program does not count. Matrices keep
the layout they have, each product waits for the one before, and the compiler is asked what the loop asks of it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.decoding.loop import Loop
from specsamp.decoding.state import Weights
from specsamp.mesh.distributed import gather_objects
from specsamp.models import compiling
from specsamp.models.int8 import Int8Blocks, Int8Weight, is_int8
from specsamp.models.interface import LanguageModel
from specsamp.models.products import contract

Array = jax.Array

SECONDS_PER_SAMPLE = 0.06  # long against the dispatch of a program, short enough for many turns
MOST_ITERATIONS = 1 << 15


def product_timer(loop: Loop, weights: Weights, batch: int, tokens: int) -> Callable[[], float]:
    """Compiles the products of a call for so many tokens of each row; returns a function that measures milliseconds.

    A device multiplies ``batch / num_shards * max(tokens, window)`` rows. Each sample follows one that is not counted:
    where the weights half fit a CPU's last cache, they are slow to read after anything else.
    """
    matrices = matrices_of(loop.target, weights.target)
    rows = max(batch // loop.shards.count, 1) * max(tokens, loop.window)

    def seconds(iterations: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(stream(loop, matrices, iterations, rows=rows))
        return time.perf_counter() - start

    iterations = find_iterations(seconds, SECONDS_PER_SAMPLE)

    def milliseconds() -> float:
        seconds(iterations)
        return seconds(iterations) / iterations * 1e3

    return milliseconds


def find_iterations(run: Callable[[int], float], seconds: float) -> int:
    """Compiles ``run``, then returns how many iterations, an even number, take about ``seconds``."""
    run(1)
    n = 2
    while n < MOST_ITERATIONS and (spent := gather_objects(run(n))[0]) < seconds / 2:
        n = 2 * int(n * min(max(seconds / spent, 2), 16) / 2)
    return min(n, MOST_ITERATIONS)


@functools.partial(
    compiling.jit, options_of=lambda loop, *_, **__: loop.compiler_options, static_argnames=("loop", "rows")
)
def stream(loop: Loop, matrices: list[Array | Int8Weight], iterations: Array | int, *, rows: int) -> Array:
    """Multiplies ``rows`` rows by every matrix, one after the other: a lower bound of a call of the target."""

    def step(_: Any, x: Array) -> Array:
        for matrix in matrices:
            rows_out = jax.lax.optimization_barrier(_multiply(x, matrix, rows))
            x = jnp.where(rows_out.ravel()[0] > 0, 1.0, 0.5)
        return x

    return jax.lax.fori_loop(0, iterations, step, jnp.ones((), jnp.float32))


def _multiply(x: Array, matrix: Array | Int8Weight, rows: int) -> Array:
    """Multiplies ``rows`` rows that are ``x`` everywhere; of int8 matrices each is widened anew, as a call does it."""
    if isinstance(matrix, Int8Blocks):
        matrix = jax.tree.map(lambda part: part.reshape(-1, part.shape[-1]), matrix)
        return contract("TD,DF->TF", jnp.full((rows, matrix.shape[0]), x), matrix)
    dtype = jnp.float32 if is_int8(matrix) else matrix.dtype
    rows_in = jnp.full(matrix.shape[:-2] + (rows, matrix.shape[-2]), x, dtype)
    if is_int8(matrix):
        rows_in, values = jax.lax.optimization_barrier((rows_in, matrix.values))
        matrix = values.astype(dtype)
    return rows_in @ matrix


def matrices_of(model: LanguageModel, weights: Any) -> list[Array | Int8Weight]:
    """Returns the matrices that a call of the model reads; if it does not say, all leaves with two axes or more.

    Of experts it is as many as one token chooses, whichever they are. On a mesh, the parts that one device holds:
    products of parts need no collective.
    """
    said = model.streamed(weights)
    matrices = said if said is not None else [leaf for leaf in jax.tree.leaves(weights) if jnp.ndim(leaf) >= 2]

    def spread(leaf):
        return isinstance(leaf, Array) and len(leaf.sharding.device_set) > 1

    def here(tree):
        return jax.tree.map(lambda leaf: leaf.addressable_shards[0].data if spread(leaf) else leaf, tree)

    matrices = here(matrices)
    for stack, share in model.chosen(weights, 1):
        stack = here(stack)
        count = max(round(share * stack.shape[0]), 1)
        matrices += [jax.tree.map(lambda y, i=i: y[i], stack) for i in range(count)]
    return matrices
