"""Decodes with the gated delta rule: all between the projections of a recurrent layer, in one
kernel.

A step does a key head of a sequence, with its value heads. The corrections of all held tokens are
solved row by row on vector units. A row depends on the rows before it alone, so states have the
same bits for every split into calls.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specsamp.jax_names import pl, pltpu
from specsamp.models.config import TransformerConfig
from specsamp.models.delta_rule import CHUNK
from specsamp.models.kernels.common import einsum_in_float32, iota
from specsamp.models.recurrent import HELD, REWIND, normalise, scale_to_unit

Array = jax.Array

NAME = "delta_step"  # of the kernel in compiled programs
TILE = 8  # rows of a register


def delta_step(
    config: TransformerConfig,
    x_BMTX: Array,
    start_B: Array,
    vectors: tuple[Array, Array, Array],
    cache: tuple[Array, Array, Array],
    *,
    interpret: bool,
) -> tuple[Array, ...]:
    """Returns the layer's outputs ``[B, T, M Y]``, Y of the value heads of a key head, and the
    cache.

    Args:
      x_BMTX: queries, keys, values, gates, and the shares and decays of the value heads.
      vectors: taps ``[M, taps, X']``, rates and biases of decays ``[M, 2, g]``, and the scale of
        the norm ``[1, V]``.
      cache: states, inputs and positions of a `specsamp.models.recurrent.RecurrentCache`.
    """
    shape = config.recurrent
    batch, heads, length, _ = x_BMTX.shape
    group = shape.num_value_heads // shape.num_key_heads
    joined = group * shape.value_size

    states, inputs, position_B = cache
    states = states.reshape(batch, heads, group, *states.shape[2:])
    smem = pl.BlockSpec(memory_space=pltpu.SMEM)

    def block(x, axes):
        """Takes one entry of each of the leading axes."""
        sizes = (1,) * len(axes) + x.shape[len(axes) :]
        rest = (0,) * (x.ndim - len(axes))
        return pl.BlockSpec(sizes, lambda m, b: (*({"m": m, "b": b}[x] for x in axes), *rest))

    of_cache = block(states, "bm"), block(inputs, "bm"), smem
    of_vectors = [block(x, axes) for x, axes in zip(vectors, ("m", "m", ""), strict=True)]
    out_BTX = jax.ShapeDtypeStruct((batch, length, heads * joined), x_BMTX.dtype)
    out_BTX, states, *rest = pl.pallas_call(
        functools.partial(_kernel, config=config),
        out_shape=[
            out_BTX,
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (states, inputs, position_B)),
        ],
        grid=(heads, batch),
        in_specs=[smem, block(x_BMTX, "bm"), *of_vectors, *of_cache],
        out_specs=[pl.BlockSpec((1, length, joined), lambda m, b: (b, 0, m)), *of_cache],
        # Not the positions: the next key head reads the old ones.
        input_output_aliases={5: 1, 6: 2},
        interpret=interpret,
        name=NAME,
    )(start_B, x_BMTX, *vectors, states, inputs, position_B)
    return out_BTX, states.reshape(cache[0].shape), *rest


def _kernel(
    start_B, x, taps, rates, scale, old, held, position_B, out, state, inputs, moved_B, *, config
):
    """Reads the tokens of a sequence for a key head."""
    shape, dtype = config.recurrent, config.compute_dtype
    keys, size = shape.key_size, shape.value_size
    group, before = shape.num_value_heads // shape.num_key_heads, shape.taps - 1
    mixed = 2 * keys + group * size  # columns of the convolution
    length = x.shape[2]
    # Of the held tokens, for any T, since sums over other sizes round differently.
    count = -(-(HELD + REWIND + 1) // TILE) * TILE
    rows = HELD + CHUNK + TILE  # as many, and those before
    row = pl.program_id(1)
    start = start_B[row]
    is_new = start == 0
    position = jnp.where(is_new, 0, position_B[row])
    offset = start - position
    is_chunk = offset >= REWIND + CHUNK  # whose tokens are certain
    moved_B[row] = position + jnp.where(is_chunk, CHUNK, 0)

    at = jnp.clip(offset, 0, HELD)
    i_RX = iota((rows, 1), 0) - before - at
    new_TX = jnp.concatenate([x[0, 0, :, :mixed], x[0, 0, :, mixed + group * size :]], axis=1)
    gates_TY = x[0, 0, :, mixed : mixed + group * size].astype(jnp.float32)
    # What an earlier sequence left may be NaN.
    held_WX = jnp.where(is_new, 0.0, held[0, 0].astype(jnp.float32))
    empty_RX = jnp.zeros((rows - len(held_WX), held_WX.shape[1]), jnp.float32)
    held_RX = jnp.concatenate([held_WX, empty_RX])
    is_token_RT = i_RX == iota((rows, length), 1)
    moved_RX = _product("rt,tx->rx", is_token_RT.astype(new_TX.dtype), new_TX)
    held_RX = jnp.where((i_RX >= 0) & (i_RX < length), moved_RX, held_RX)
    kept = [held_RX[first : first + len(held_WX)] for first in (0, CHUNK)]
    inputs[0, 0] = jnp.where(is_chunk, kept[1], kept[0]).astype(inputs.dtype)

    def convolved(read, number, start, end):
        taps_tX = taps[0, :, start:end].astype(jnp.float32)
        made = sum(read[t : t + number, start:end] * taps_tX[t : t + 1] for t in range(shape.taps))
        made = jax.nn.silu(made.astype(dtype).astype(jnp.float32))
        return made.astype(dtype).astype(jnp.float32)

    k_LK = scale_to_unit(convolved(held_RX, count, keys, 2 * keys))
    v_LY = convolved(held_RX, count, 2 * keys, mixed)
    shape_SR = before + length, rows
    s_SR, r_SR = (iota(shape_SR, axis) for axis in (0, 1))
    queries_RK = held_RX[:, :keys].astype(new_TX.dtype)
    last_SK = _product("sr,rk->sk", (r_SR == s_SR + at).astype(new_TX.dtype), queries_RK)
    q_TK = scale_to_unit(convolved(last_SK, length, 0, keys)) * keys**-0.5
    gates_LX = held_RX[before : before + count, mixed:]
    rates_2g = rates[0].astype(jnp.float32)
    beta_Lg = jax.nn.sigmoid(gates_LX[:, :group]).astype(dtype).astype(jnp.float32)
    g_Lg = -jnp.exp(rates_2g[:1]) * jax.nn.softplus(gates_LX[:, group:] + rates_2g[1:])
    i_LL, j_LL = (iota((count, count), axis) for axis in (0, 1))
    j_TL = iota((length, count), 1)
    i_TL = iota((length, count), 0) + at
    alike_LL = _product("ik,jk->ij", k_LK, k_LK)
    scores_TL = _product("ik,jk->ij", q_TK, k_LK)
    lost = jnp.where((offset < 0) | (offset > HELD), jnp.nan, 0.0)

    def row_of(column_L1):
        return jnp.sum(jnp.where(i_LL == j_LL, column_L1, 0.0), axis=0, keepdims=True)

    for head in range(group):
        of_values = slice(head * size, (head + 1) * size)
        old_KV = jnp.where(is_new, 0.0, old[0, 0, head])
        beta_L1 = beta_Lg[:, head : head + 1]
        decay_L1 = jnp.sum(
            jnp.where(j_LL <= i_LL, row_of(g_Lg[:, head : head + 1]), 0.0), axis=1, keepdims=True
        )
        decay_1L = row_of(decay_L1)
        weights_LL = jnp.exp(jnp.where(j_LL < i_LL, decay_L1 - decay_1L, -jnp.inf))
        weights_LL = weights_LL * alike_LL * beta_L1
        known_LV = _product("ik,kv->iv", k_LK * jnp.exp(decay_L1), old_KV)
        left_LV = (v_LY[:, of_values] - known_LV) * beta_L1
        solved = []
        for first in range(0, count, TILE):
            for i in range(TILE):
                left_LV = (
                    left_LV - weights_LL[first:, first + i : first + i + 1] * left_LV[i : i + 1]
                )
            solved.append(left_LV[:TILE])
            left_LV = left_LV[TILE:]
        solved_LV = jnp.concatenate(solved)
        decay_T1 = jnp.sum(jnp.where(j_TL == i_TL, decay_1L, 0.0), axis=1, keepdims=True)
        between_TL = jnp.exp(jnp.where(j_TL <= i_TL, decay_T1 - decay_1L, -jnp.inf))
        made_TV = _product("ij,jv->iv", scores_TL * between_TL, solved_LV)
        made_TV = made_TV + _product("ik,kv->iv", q_TK * jnp.exp(decay_T1), old_KV)
        # Tokens were removed that the state contains: no text may follow from it.
        made_TV = (made_TV + lost).astype(out.dtype)
        out[0, :, of_values] = normalise(config, made_TV, gates_TY[:, of_values], scale[...])
        whole = decay_L1[CHUNK - 1 : CHUNK]
        last_CK = k_LK[:CHUNK] * jnp.exp(whole - decay_L1[:CHUNK])
        next_KV = old_KV * jnp.exp(whole) + _product("jk,jv->kv", last_CK, solved_LV[:CHUNK])
        state[0, 0, head] = jnp.where(is_chunk, next_KV, old_KV)


_product = einsum_in_float32
