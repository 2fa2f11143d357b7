"""Decode-time weights in the order for CPUs: few and large products over few rows, ``[T, in] x [in,
out]``.

Q, K and V are one matrix ``[D, (N+2M) H]``, the output matrix is ``[D, V]`` (a copy, if it is
tied), tables of relative keys are ``[M, H, S]``, and keys are cached as ``[B, M, H, S]``
(`TransposedKVCache`). XLA's CPU backend would transpose ``[D, N, H]`` in every call. Gate and up of
experts are ``[E, D, F]``. Such weights cannot be split over a mesh, because one axis joins several
logical axes.

For a product with an int8 matrix, this backend first writes the whole matrix in float32. Converted
in blocks (`Int8Blocks`), the float32 values stay in the CPU's cache, and a quarter of the bytes is
read from memory.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specsamp.models.attention import JOINED, JOINED_BIAS, Attention
from specsamp.models.decoder import OUTPUT_EMBEDDING, Decoder
from specsamp.models.experts import Experts
from specsamp.models.int8 import Int8Blocks, is_int8
from specsamp.models.products import contract
from specsamp.models.recurrent import JOINED as RECURRENT
from specsamp.models.recurrent import GatedDelta

Array = jax.Array

UNEMBEDDING = "unembedding"


def to_cpu_order(params: Any) -> Any:
    """Rearranges parameters for `CPUDecoder`."""
    arranged = dict(params)
    arranged[UNEMBEDDING] = jax.tree.map(
        jnp.transpose, arranged.pop(OUTPUT_EMBEDDING, params["embedding"])
    )
    for name in params:
        if not name.startswith("layer_"):
            continue
        layer = arranged[name] = dict(params[name])
        if "recurrence" in layer:
            joined = jax.tree.map(_join_heads, layer["recurrence"][RECURRENT])
            layer["recurrence"] = layer["recurrence"] | {RECURRENT: joined}
        else:
            layer["attention"] = _join_attention(layer["attention"])
        if "experts" in layer:
            experts = {part: layer["experts"][part] for part in ("gate", "up")}
            turned = jax.tree.map(lambda x: x.swapaxes(1, 2), experts)
            layer["experts"] = layer["experts"] | turned
    return _in_blocks(arranged)


def head_to_cpu_order(params: Any) -> Any:
    """Rearranges the parameters of a head: queries, keys and values of each layer, and the output
    matrix ``[U, D]``.
    """
    arranged = {name: _arranged(name, part) for name, part in params.items()}
    if "output" in arranged:
        arranged[UNEMBEDDING] = jax.tree.map(jnp.transpose, arranged.pop("output"))
    return _in_blocks(arranged)


def _arranged(name: str, part: Any) -> Any:
    if name == "attention":
        return _join_attention(part)
    if not isinstance(part, dict):
        return part
    return {inner: _arranged(inner, value) for inner, value in part.items()}


def _in_blocks(params: Any) -> Any:
    return jax.tree.map(
        lambda x: Int8Blocks(x.values, x.scale) if is_int8(x) else x, params, is_leaf=is_int8
    )


def _join_attention(params: Any) -> Any:
    joined = dict(params)
    parts = [joined.pop(part) for part in ("query", "key", "value", "gate") if part in joined]
    joined[JOINED] = jax.tree.map(_join_heads, *parts)  # of int8 weights the scales too
    if "query_bias" in joined:
        biases = [joined.pop(f"{part}_bias").reshape(-1) for part in ("query", "key", "value")]
        joined[JOINED_BIAS] = jnp.concatenate(biases)
    return joined


def _join_heads(*parts_NDH: Array) -> Array:
    """Concatenates all heads, ``[D, N H + ...]``."""
    return jnp.concatenate(
        [part.swapaxes(0, 1).reshape(part.shape[1], -1) for part in parts_NDH], axis=1
    )


class CPUAttention(Attention):
    """`Attention` with tables of relative keys in the order for CPUs."""

    table_axes = "MHS"


class CPUGatedDelta(GatedDelta):
    """`GatedDelta` whose projection joins all heads."""

    def project_joined(self, x_BTD: Array, weight_DX: Array) -> Array:
        heads_BTX = contract("BTD,DX->BTX", x_BTD, weight_DX)
        heads = self.config.recurrent.num_key_heads
        return heads_BTX.reshape(*x_BTD.shape[:2], heads, -1).swapaxes(1, 2)


class CPUExperts(Experts):
    """`Experts` whose gate and up are ``[E, D, F]``."""

    inner_spec = "RD,DF->RF"

    def declare(self, name: str, fan_in: int) -> Array:
        return self.get_variable("params", name)


class CPUDecoder(Decoder):
    """`Decoder` for the weights of `to_cpu_order`."""

    attention = CPUAttention
    experts = CPUExperts
    recurrence = CPUGatedDelta

    def declare_output(self) -> Array:
        return self.get_variable("params", UNEMBEDDING)

    def project_to_vocabulary(self, x_BTD: Array) -> Array:
        return contract("BTD,DV->BTV", x_BTD, self.output_embedding, dtype=jnp.float32)
