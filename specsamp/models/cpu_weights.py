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
import numpy as np

from specsamp.models.attention import Attention
from specsamp.models.decoder import OUTPUT_EMBEDDING, Decoder
from specsamp.models.experts import Experts
from specsamp.models.int8 import Int8Blocks, is_int8
from specsamp.models.products import contract
from specsamp.models.recurrent import JOINED, GatedDelta

Array = jax.Array

HEADS, HEADS_BIAS, UNEMBEDDING = "query_key_value", "query_key_value_bias", "unembedding"


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
            joined = jax.tree.map(_join_heads, layer["recurrence"][JOINED])
            layer["recurrence"] = layer["recurrence"] | {JOINED: joined}
        else:
            layer["attention"] = _join_attention(layer["attention"])
        if "experts" in layer:
            experts = {part: layer["experts"][part] for part in ("gate", "up")}
            turned = jax.tree.map(lambda x: x.swapaxes(1, 2), experts)
            layer["experts"] = layer["experts"] | turned
    return jax.tree.map(
        lambda x: Int8Blocks(x.values, x.scale) if is_int8(x) else x, arranged, is_leaf=is_int8
    )


def _join_attention(params: Any) -> Any:
    joined = dict(params)
    parts = [joined.pop(part) for part in ("query", "key", "value", "gate") if part in joined]
    joined[HEADS] = jax.tree.map(_join_heads, *parts)  # of int8 weights the scales too
    if "query_bias" in joined:
        biases = [joined.pop(f"{part}_bias").reshape(-1) for part in ("query", "key", "value")]
        joined[HEADS_BIAS] = jnp.concatenate(biases)
    return joined


def _join_heads(*parts_NDH: Array) -> Array:
    """Concatenates all heads, ``[D, N H + ...]``."""
    return jnp.concatenate(
        [part.swapaxes(0, 1).reshape(part.shape[1], -1) for part in parts_NDH], axis=1
    )


class CPUAttention(Attention):
    """`Attention` with one projection for queries, keys and values."""

    table_axes = "MHS"

    def project_heads(self, x_BTD: Array) -> tuple[Array, ...]:
        config, (batch, length) = self.config, x_BTD.shape[:2]
        heads_BTX = contract("BTD,DX->BTX", x_BTD, self.get_variable("params", HEADS))
        if config.attention_bias:
            heads_BTX = heads_BTX + self.get_variable("params", HEADS_BIAS)[None, None]
        heads_BXTH = heads_BTX.reshape(batch, length, -1, config.head_size).swapaxes(1, 2)
        sizes = [config.num_heads] + [config.num_kv_heads] * (1 if config.keys_as_values else 2)
        sizes += [config.num_heads] * config.attention_gate
        parts = jnp.split(heads_BXTH, np.cumsum(sizes[:-1]).tolist(), axis=1)
        return (*parts, parts[1]) if config.keys_as_values else parts


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
