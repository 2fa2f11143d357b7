"""The layers of the decoder, as Linen modules.

Weights of the attention keep one layout for every number of tokens: Q, K, V head-major ``[N, D, H]``
and the output ``[N, H, D]`` (on a CPU, what `flatten` makes of them). With any other the TPU compiler
lays weights out again for a loop that uses them at different T, and XLA's CPU backend transposes
``[D, N, H]`` in every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specsamp.models.config import TransformerConfig
from specsamp.models.kv_cache import write_rows
from specsamp.models.positions import align_distances, rotate, sinusoids
from specsamp.models.products import contract

Array = jax.Array

# Up to this many rows a projection is one small product per head; beyond, a single large one.
MAX_BATCHED_ROWS = 256

# Names of the weights of the CPU's layout; see `flatten`.
FLAT_ATTENTION, FLAT_LOGITS = "query_key_value", "unembedding"


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x_BTD, start_B, rotary, memory, table):
        config = self.config
        with jax.named_scope("attention"):
            y_BTD = RMSNorm(config.norm_epsilon, name="attention_norm")(x_BTD)
            y_BTD, memory = Attention(config, name="attention")(y_BTD, start_B, rotary, memory, table)
            x_BTD = x_BTD + y_BTD
        with jax.named_scope("mlp"):
            y_BTD = RMSNorm(config.norm_epsilon, name="mlp_norm")(x_BTD)
            x_BTD = x_BTD + FeedForward(config, name="mlp")(y_BTD)
        return x_BTD, memory


class RMSNorm(nn.Module):
    """Zhang and Sennrich, arXiv 1910.07467; in float32."""

    epsilon: float

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.with_logical_partitioning(nn.initializers.ones, ("embed",)), x.shape[-1:])
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.epsilon)
        return (normed * _leading(scale.astype(jnp.float32), x.ndim)).astype(x.dtype)


class FeedForward(nn.Module):
    """Ungated, width F."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x_BTD):
        config = self.config
        width, inner = config.width, config.feedforward_width
        up_DF = weight(self, "up", (width, inner), ("embed", "mlp"), fan_in=width)
        down_FD = weight(self, "down", (inner, width), ("mlp", "embed"), fan_in=2 * config.num_layers * inner)
        activation: Callable[[Array], Array] = getattr(jax.nn, config.activation)
        inner_BTF = activation(contract("BTD,DF->BTF", x_BTD, up_DF, dtype=jnp.float32))
        return contract("BTF,FD->BTD", inner_BTF.astype(x_BTD.dtype), down_FD)


class Attention(nn.Module):
    """Multi-head, grouped or multi-query attention over the cache, or over the call alone."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x_BTD, start_B, rotary, memory, table):
        config = self.config
        heads, kv_heads, size, width = config.num_heads, config.num_kv_heads, config.head_size, config.width
        dtype = config.compute_dtype
        batch, length = x_BTD.shape[:2]

        def projection(name, count, axis):
            return weight(self, name, (count, width, size), (axis, "embed", "head"), fan_in=width)

        flat = self.has_variable("params", FLAT_ATTENTION)
        if flat:
            flat_DX = self.get_variable("params", FLAT_ATTENTION)
            heads_BXTH = contract("BTD,DX->BTX", x_BTD, flat_DX).reshape(batch, length, -1, size).swapaxes(1, 2)
            q_BNTH, k_BMTH, v_BMTH = jnp.split(heads_BXTH, [heads, heads + kv_heads], axis=1)
        else:
            q_BNTH = project(x_BTD, projection("query", heads, "heads"))
            k_BMTH = project(x_BTD, projection("key", kv_heads, "kv_heads"))
            v_BMTH = project(x_BTD, projection("value", kv_heads, "kv_heads"))
        output_NHD = weight(
            self, "output", (heads, size, width), ("heads", "head", "embed"),
            fan_in=2 * config.num_layers * heads * size,
        )  # fmt: skip

        if config.positions == "rotary":
            q_BNTH, k_BMTH = rotate(q_BNTH, *rotary), rotate(k_BMTH, *rotary)
        if memory is None:
            keys, values_BMSH = k_BMTH, v_BMTH
        else:
            if flat:
                keys = write_rows(memory[0], k_BMTH.swapaxes(2, 3), start_B, axis=3)
            else:
                keys = write_rows(memory[0], k_BMTH, start_B)
            values_BMSH = write_rows(memory[1], v_BMTH, start_B)
        slots = values_BMSH.shape[2]

        # Queries that share a key head are extra rows of one product.
        rows_shape = (batch, kv_heads, config.queries_per_kv_head * length, size)
        if config.positions == "relative":
            bias = lambda name: weight(self, name, (heads, size), ("heads", "head"), fan_in=size).astype(dtype)
            content_BNTH = q_BNTH + bias("content_bias")[None, :, None, :]
            distance_BNTH = q_BNTH + bias("distance_bias")[None, :, None, :]
            if table is None:
                table = relative_keys(projection("relative", kv_heads, "kv_heads"), slots).astype(dtype)
            table_axes = "MHS" if flat else "MSH"
            by_distance = contract(
                f"BMRH,{table_axes}->BMRS", distance_BNTH.reshape(rows_shape), table, dtype=jnp.float32
            )
            by_slot = align_distances(by_distance.reshape(batch, heads, length, slots), start_B)
        else:
            content_BNTH, by_slot = q_BNTH, 0.0
        content_BMRH = content_BNTH.reshape(rows_shape)
        keys_axes = "BMHS" if flat else "BMSH"
        scores = contract(f"BMRH,{keys_axes}->BMRS", content_BMRH, keys, dtype=jnp.float32)
        scores = scores.reshape(batch, heads, length, slots)
        scores = (scores + by_slot) * (1 / math.sqrt(size))

        queries_BT = start_B[:, None] + jnp.arange(length)[None, :]
        visible_BTS = jnp.arange(slots)[None, None, :] <= queries_BT[:, :, None]
        probs = jax.nn.softmax(jnp.where(visible_BTS[:, None], scores, -jnp.inf), axis=-1).astype(dtype)
        mixed = contract("BMRS,BMSH->BMRH", probs.reshape(rows_shape[:3] + (slots,)), values_BMSH)
        # One contraction over heads and their entries together: as two, the weight is transposed for it.
        mixed_BTX = mixed.reshape(batch, heads, length, size).swapaxes(1, 2).reshape(batch, length, heads * size)
        out_BTD = contract("BTX,XD->BTD", mixed_BTX, output_NHD.reshape(heads * size, width))
        return out_BTD, (keys, values_BMSH)


def project(x_BTD: Array, weight_NDH: Array) -> Array:
    """``BTD,NDH -> BNTH``, without laying the weight out again for few rows."""
    batch, length, width = x_BTD.shape
    heads, _, size = weight_NDH.shape
    if batch * length > MAX_BATCHED_ROWS:
        return contract("BTD,NDH->BNTH", x_BTD, weight_NDH)
    rows_NRD = jnp.broadcast_to(x_BTD.reshape(1, batch * length, width), (heads, batch * length, width))
    rows_NRH = contract("NRD,NDH->NRH", rows_NRD, weight_NDH)
    return rows_NRH.reshape(heads, batch, length, size).swapaxes(0, 1)


def relative_keys(weight_MDH: Array, slots: int) -> Array:
    """``r`` for the distances ``S-1 .. 0``, ``[M, S, H]``; see positions.py."""
    waves_SD = sinusoids(slots, weight_MDH.shape[1]).astype(weight_MDH.dtype)
    # One product per head: its result needs no transpose, which XLA's CPU backend would fold into the
    # product that uses the table and then refuse to run in bfloat16.
    waves_MSD = jnp.broadcast_to(waves_SD[None], (weight_MDH.shape[0], *waves_SD.shape))
    return jnp.einsum("MSD,MDH->MSH", waves_MSD, weight_MDH)


def weight(module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str, ...], *, fan_in: int) -> Array:
    init = nn.with_logical_partitioning(nn.initializers.normal(fan_in**-0.5), axes)
    return module.param(name, init, shape)


def _leading(x: Array, ndim: int) -> Array:
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def flatten(params: Any) -> Any:
    """Decode-time weights of a CPU: products over few rows as ``[T, in] x [in, out]``, few and large.

    Q, K and V become one ``[D, (N+2M) H]``, and the tied output gets a copy ``[D, V]``. Keys are cached
    as ``[B, M, H, S]``.
    """
    flat = dict(params) | {FLAT_LOGITS: params["embedding"].T}
    for name in params:
        if name.startswith("layer_"):
            attention = dict(params[name]["attention"])
            parts = [attention.pop(part) for part in ("query", "key", "value")]
            side_by_side = [part.swapaxes(0, 1).reshape(part.shape[1], -1) for part in parts]
            attention[FLAT_ATTENTION] = jnp.concatenate(side_by_side, axis=1)
            flat[name] = dict(params[name]) | {"attention": attention}
    return flat
