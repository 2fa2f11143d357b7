"""Routes up to 128 tokens and mixes the results of their experts; of the experts only those that
are chosen are fetched.

A step of a loop multiplies all tokens by a part of the width of a chosen expert, while the next two
parts are on their way: with one, a step would wait for the latency of memory.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specsamp.jax_names import pl, pltpu
from specsamp.models.config import ACTIVATIONS, TransformerConfig
from specsamp.models.int8 import Int8Weight, is_int8
from specsamp.models.kernels.common import einsum_in_float32, in_hbm, iota

Array = jax.Array

NAME = "mix_experts"  # of the kernel in compiled programs
STEP_BYTES = 3 * 2**20  # of matrices, at most
SLOTS = 3  # steps whose matrices are on chip
TILES = {1: 32, 2: 16, 4: 8}  # rows that memory keeps together, by the bytes of an entry
MATRICES = ("gate", "up", "down")


def mix_experts(
    config: TransformerConfig,
    x_RD: Array,
    logits_RE: Array,
    stacked: dict[str, Array | Int8Weight],
    first: Array,
    *,
    interpret: bool,
) -> Array:
    """Returns each token's sum over the experts of this device of share times result, ``[R, D]``
    float32.

    Args:
      x_RD: tokens.
      logits_RE: float32, of the router, for the experts of all devices.
      stacked: matrices ``[E', F, D]`` of the experts ``first ..`` of all, or a part of their width;
        in HBM. Perhaps ``[E', F]`` biases of gate and up.
      interpret: runs on the CPU.
    """
    matrices = [
        stacked[name].values if is_int8(stacked[name]) else stacked[name] for name in MATRICES
    ]
    _, inner, width = matrices[0].shape
    part = part_width(inner, width, matrices[0].dtype.itemsize)
    small = {}  # a row for each part of an expert, or for each expert
    if is_int8(stacked["gate"]):
        small = {name: stacked[name].scale.reshape(-1, part) for name in ("gate", "up")}
        small["down"] = stacked["down"].scale.reshape(-1, width)
    biases = [name for name in stacked if name not in MATRICES]
    small |= {name: stacked[name].reshape(-1, part) for name in biases}
    vmem, smem, anywhere = (
        pl.BlockSpec(memory_space=space) for space in (pltpu.VMEM, pltpu.SMEM, pl.ANY)
    )
    return pl.pallas_call(
        functools.partial(_kernel, config=config, names=tuple(small), part=part),
        out_shape=jax.ShapeDtypeStruct(x_RD.shape, jnp.float32),
        in_specs=[smem, vmem, vmem, *[vmem] * len(small), *[anywhere] * 3],
        out_specs=vmem,
        scratch_shapes=[
            pltpu.VMEM((SLOTS, 3, part, width), matrices[0].dtype),
            pltpu.SemaphoreType.DMA((SLOTS, 3)),
        ],
        interpret=interpret,
        name=NAME,
    )(
        first.reshape(1),
        x_RD,
        logits_RE,
        *small.values(),
        *[in_hbm(matrix, interpret=interpret) for matrix in matrices],
    )


def part_width(inner: int, width: int, itemsize: int) -> int | None:
    """Returns the width of an expert that a step takes, or None if experts cannot be cut into
    parts.
    """
    tile = TILES[itemsize]
    fitting = (each for each in range(tile, inner + 1, tile) if inner % each == 0)
    itemsize = max(itemsize, 2)  # int8 is widened on chip
    return max(
        (each for each in fitting if 3 * each * width * itemsize <= STEP_BYTES), default=None
    )


def _kernel(first, x, logits, *refs, config, names, part):
    """Adds up the results of the chosen experts of this device, a part of an expert's width in each
    step.
    """
    *small, gate, up, down, out, buffer, arrived = refs
    small, experts = dict(zip(names, small, strict=True)), config.experts
    first, (here, inner, _) = first[0], gate.shape
    parts = inner // part
    shares_RE = _shares(logits[...], experts.experts_per_token, experts.normalised)
    lane_1E = iota((1, shares_RE.shape[1]), 1)
    # Also by what is no number.
    is_chosen_1E = jnp.where(shares_RE != 0, 1, 0).max(axis=0, keepdims=True) > 0
    is_here_1E = (lane_1E >= first) & (lane_1E < first + here) & is_chosen_1E
    end = first + here

    def behind(expert):
        """Returns the next expert of this device that a token chose."""
        return jnp.min(jnp.where(is_here_1E & (lane_1E > expert), lane_1E, end))

    def after(expert, number):
        is_last = number == parts - 1
        return jnp.where(is_last, behind(expert), expert), jnp.where(is_last, 0, number + 1)

    def copies(slot, expert, number):
        place = expert - first, pl.ds(pl.multiple_of(number * part, part), part)
        return [
            pltpu.make_async_copy(matrix.at[place], buffer.at[slot, i], arrived.at[slot, i])
            for i, matrix in enumerate((gate, up, down))
        ]

    def fetch(slot, expert, number):
        @pl.when(expert < end)
        def _():
            for copy in copies(slot, expert, number):
                copy.start()

    def step(state):
        slot, expert, number, *following = state
        last = after(*following)
        fetch((slot + 2) % SLOTS, *last)
        for copy in copies(slot, expert, number):
            copy.wait()
        gate_fD, up_fD, down_fD = (buffer[slot, i].astype(x.dtype) for i in range(3))
        gate_Rf, up_Rf = (
            einsum_in_float32("rd,fd->rf", x[...], matrix) for matrix in (gate_fD, up_fD)
        )
        row = (expert - first) * parts + number
        if "gate" in small:
            gate_Rf = gate_Rf * small["gate"][pl.ds(row, 1)]
            up_Rf = up_Rf * small["up"][pl.ds(row, 1)]
        if "gate_bias" in small:
            gate_Rf = gate_Rf + small["gate_bias"][pl.ds(row, 1)]
            up_Rf = up_Rf + small["up_bias"][pl.ds(row, 1)]
        activated_Rf = ACTIVATIONS[config.activation](experts.clamp_gate(gate_Rf))
        inner_Rf = (activated_Rf * experts.clamp_up(up_Rf)).astype(x.dtype)
        made_RD = einsum_in_float32("rf,fd->rd", inner_Rf, down_fD)
        if "down" in small:
            made_RD = made_RD * small["down"][pl.ds(expert - first, 1)]
        share_R1 = jnp.sum(jnp.where(lane_1E == expert, shares_RE, 0.0), axis=1, keepdims=True)
        out[...] += jnp.where(share_R1 != 0, share_R1 * made_RD, 0.0)
        return (slot + 1) % SLOTS, *following, *last

    out[...] = jnp.zeros(out.shape, jnp.float32)
    now = behind(first - 1), jnp.int32(0)
    following = after(*now)
    fetch(0, *now)
    fetch(1, *following)
    jax.lax.while_loop(lambda state: state[1] < end, step, (jnp.int32(0), *now, *following))


def _shares(logits_RE, chosen, normalised):
    """Computes `specsamp.models.experts.route`."""
    weights_RE = jnp.exp(logits_RE - logits_RE.max(axis=1, keepdims=True))
    lane_RE = iota(weights_RE.shape, 1)
    left_RE = weights_RE
    for _ in range(chosen):
        is_most_RE = left_RE == left_RE.max(axis=1, keepdims=True)
        first_R1 = jnp.where(is_most_RE, lane_RE, lane_RE.shape[1]).min(axis=1, keepdims=True)
        left_RE = jnp.where(lane_RE == first_R1, -1.0, left_RE)
    shares_RE = jnp.where(left_RE < 0, weights_RE, 0.0)
    return shares_RE / (shares_RE if normalised else weights_RE).sum(axis=1, keepdims=True)
