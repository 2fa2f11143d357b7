"""The layers of the decoder, as Linen modules.

Weights of the attention keep one layout for every number of tokens: Q, K, V head-major ``[N, D, H]``
and the output ``[N, H, D]`` (on a CPU, what `flatten` makes of them). With any other the TPU compiler
lays weights out again for a loop that uses them at different T, and XLA's CPU backend transposes
``[D, N, H]`` in every call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specsamp.models.cache import write_slots
from specsamp.models.config import TransformerConfig
from specsamp.models.positions import align_distances, rotate, sinusoids
from specsamp.models.products import contract

Array = jax.Array

# Up to this many rows a projection is one small product per head; beyond, a single large one.
MAX_BATCHED_ROWS = 256

# Names of the weights of the CPU's layout; see `flatten`.
FLAT_ATTENTION, FLAT_ATTENTION_BIAS, FLAT_LOGITS = "query_key_value", "query_key_value_bias", "unembedding"
OUTPUT_EMBEDDING = "output_embedding"  # of a model whose output is not tied


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
}


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    config: TransformerConfig
    window: int | None = None  # see `Attention`

    @nn.compact
    def __call__(self, x_BTD, start_B, rotary, memory, table):
        config = self.config

        def after(name, y_BTD):
            return Norm(config, name=f"{name}_post_norm")(y_BTD) if config.post_norms else y_BTD

        with jax.named_scope("attention"):
            y_BTD = Norm(config, name="attention_norm")(x_BTD)
            y_BTD, memory = Attention(config, self.window, name="attention")(y_BTD, start_B, rotary, memory, table)
            attended_BTD = x_BTD + after("attention", y_BTD)
        with jax.named_scope("mlp"):
            y_BTD = Norm(config, name="mlp_norm")(x_BTD if config.parallel else attended_BTD)
            x_BTD = attended_BTD + after("mlp", FeedForward(config, name="mlp")(y_BTD))
        return x_BTD, memory


class Norm(nn.Module):
    """RMS (Zhang and Sennrich, arXiv 1910.07467) or layer normalisation of the last axis; in float32."""

    config: TransformerConfig
    axis: str = "embed"  # the logical name of the last axis

    @nn.compact
    def __call__(self, x):
        config = self.config

        def vector(name, init):
            return _leading(
                self.param(name, nn.with_logical_partitioning(init, (self.axis,)), x.shape[-1:]).astype(jnp.float32),
                x.ndim,
            )

        scale = vector("scale", nn.initializers.zeros if config.norm_offset else nn.initializers.ones)
        x32 = x.astype(jnp.float32)
        if config.norm == "layer":
            x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + config.norm_epsilon)
        normed = normed * (1 + scale if config.norm_offset else scale)
        if config.norm == "layer":
            normed = normed + vector("bias", nn.initializers.zeros)
        return normed.astype(x.dtype)


class FeedForward(nn.Module):
    """Width F, gated or not."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x_BTD):
        config = self.config
        width, inner = config.width, config.feedforward_width

        def biased(name, axis, y):
            return y + _bias(self, name, (axis,), y) if config.feedforward_bias else y

        def inwards(name):
            weight_DF = weight(self, name, (width, inner), ("embed", "mlp"), fan_in=width)
            return biased(f"{name}_bias", "mlp", contract("BTD,DF->BTF", x_BTD, weight_DF, dtype=jnp.float32))

        activation, up_BTF = ACTIVATIONS[config.activation], inwards("up")
        inner_BTF = activation(inwards("gate")) * up_BTF if config.gated else activation(up_BTF)
        down_FD = weight(self, "down", (inner, width), ("mlp", "embed"), fan_in=2 * config.num_layers * inner)
        return biased("down_bias", "embed", contract("BTF,FD->BTD", inner_BTF.astype(x_BTD.dtype), down_FD))


class Attention(nn.Module):
    """Multi-head, grouped or multi-query attention over the cache, or over the call alone.

    With a ``window``, a token sees itself and the ``window - 1`` slots before it. That is a mask: the cache
    keeps every slot, so taking tokens back across the window's edge is moving lengths, as anywhere.
    """

    config: TransformerConfig
    window: int | None = None

    @nn.compact
    def __call__(self, x_BTD, start_B, rotary, memory, table):
        config = self.config
        heads, kv_heads, size, width = config.num_heads, config.num_kv_heads, config.head_size, config.width
        dtype = config.compute_dtype
        batch, length = x_BTD.shape[:2]
        flat = self.has_variable("params", FLAT_ATTENTION)

        q_BNTH, k_BMTH, v_BMTH = self._heads(x_BTD, flat)
        output_NHD = weight(
            self,
            "output",
            (heads, size, width),
            ("heads", "head", "embed"),
            fan_in=2 * config.num_layers * heads * size,
        )
        if config.query_key_norm:
            q_BNTH = Norm(config, "head", name="query_norm")(q_BNTH)
            k_BMTH = Norm(config, "head", name="key_norm")(k_BMTH)
        if config.positions == "rotary":
            q_BNTH, k_BMTH = rotate(q_BNTH, *rotary), rotate(k_BMTH, *rotary)
        if memory is None:
            keys, values_BMSH = k_BMTH, v_BMTH
        else:
            if flat:
                keys = write_slots(memory[0], k_BMTH.swapaxes(2, 3), start_B, axis=3)
            else:
                keys = write_slots(memory[0], k_BMTH, start_B)
            values_BMSH = write_slots(memory[1], v_BMTH, start_B)
        slots = values_BMSH.shape[2]

        # Queries that share a kv head are extra rows of one product.
        rows_shape = (batch, kv_heads, config.queries_per_kv_head * length, size)
        if config.positions == "relative":

            def bias(name):
                return weight(self, name, (heads, size), ("heads", "head"), fan_in=size).astype(dtype)

            content_BNTH = q_BNTH + bias("content_bias")[None, :, None, :]
            distance_BNTH = q_BNTH + bias("distance_bias")[None, :, None, :]
            if table is None:
                table = relative_keys(self._projection("relative", kv_heads, "kv_heads"), slots).astype(dtype)
            table_axes = "MHS" if flat else "MSH"
            by_distance = contract(
                f"BMRH,{table_axes}->BMRS", distance_BNTH.reshape(rows_shape), table, dtype=jnp.float32
            )
            by_slot = align_distances(by_distance.reshape(batch, heads, length, slots), start_B)
        else:
            content_BNTH, by_slot = q_BNTH, None
        content_BMRH = content_BNTH.reshape(rows_shape)
        keys_axes = "BMHS" if flat else "BMSH"
        scores = contract(f"BMRH,{keys_axes}->BMRS", content_BMRH, keys, dtype=jnp.float32)
        scores = scores.reshape(batch, heads, length, slots)
        if by_slot is not None:
            scores = scores + by_slot
        scores = scores * (config.attention_scale or 1 / math.sqrt(size))
        if config.attention_cap is not None:
            scores = soft_cap(scores, config.attention_cap)

        queries_BT = start_B[:, None] + jnp.arange(length)[None, :]
        visible_BTS = jnp.arange(slots)[None, None, :] <= queries_BT[:, :, None]
        if self.window is not None:
            visible_BTS &= jnp.arange(slots)[None, None, :] > queries_BT[:, :, None] - self.window
        probs = jax.nn.softmax(jnp.where(visible_BTS[:, None], scores, -jnp.inf), axis=-1).astype(dtype)
        mixed = contract("BMRS,BMSH->BMRH", probs.reshape(rows_shape[:3] + (slots,)), values_BMSH)
        # One contraction over heads and their entries together: as two, the weight is transposed for it.
        mixed_BTX = mixed.reshape(batch, heads, length, size).swapaxes(1, 2).reshape(batch, length, heads * size)
        out_BTD = contract("BTX,XD->BTD", mixed_BTX, output_NHD.reshape(heads * size, width))
        if config.output_bias:
            out_BTD = out_BTD + _bias(self, "output_bias", ("embed",), out_BTD)
        return out_BTD, (keys, values_BMSH)

    def _heads(self, x_BTD: Array, flat: bool) -> tuple[Array, Array, Array]:
        """Queries ``[B, N, T, H]``, keys and values ``[B, M, T, H]``."""
        config, (batch, length) = self.config, x_BTD.shape[:2]
        heads, kv_heads = config.num_heads, config.num_kv_heads
        if flat:
            heads_BTX = contract("BTD,DX->BTX", x_BTD, self.get_variable("params", FLAT_ATTENTION))
            if config.attention_bias:
                heads_BTX = heads_BTX + self.get_variable("params", FLAT_ATTENTION_BIAS)[None, None]
            heads_BXTH = heads_BTX.reshape(batch, length, -1, config.head_size).swapaxes(1, 2)
            return jnp.split(heads_BXTH, [heads, heads + kv_heads], axis=1)

        def projected(name, count, axis):
            y_BNTH = project(x_BTD, self._projection(name, count, axis))
            if not config.attention_bias:
                return y_BNTH
            init = nn.with_logical_partitioning(nn.initializers.zeros, (axis, "head"))
            bias_NH = self.param(f"{name}_bias", init, (count, config.head_size))
            return y_BNTH + bias_NH.astype(y_BNTH.dtype)[None, :, None]

        return (
            projected("query", heads, "heads"),
            projected("key", kv_heads, "kv_heads"),
            projected("value", kv_heads, "kv_heads"),
        )

    def _projection(self, name: str, count: int, axis: str) -> Array:
        shape = (count, self.config.width, self.config.head_size)
        return weight(self, name, shape, (axis, "embed", "head"), fan_in=self.config.width)


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


def soft_cap(x: Array, cap: float) -> Array:
    """As good as ``x`` where it is small beside the cap, and never beyond it (Gemma 2, arXiv 2408.00118)."""
    return cap * jnp.tanh(x / cap)


def _bias(module: nn.Module, name: str, axes: tuple[str, ...], y: Array) -> Array:
    """Of the last axis of ``y``, ready to be added."""
    init = nn.with_logical_partitioning(nn.initializers.zeros, axes)
    return _leading(module.param(name, init, y.shape[-1:]).astype(y.dtype), y.ndim)


def _leading(x: Array, ndim: int) -> Array:
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def flatten(params: Any) -> Any:
    """Decode-time weights of a CPU: products over few rows as ``[T, in] x [in, out]``, few and large.

    Q, K and V become one ``[D, (N+2M) H]``, and the output is ``[D, V]``, a copy if it is tied. Keys are cached
    as ``[B, M, H, S]``.
    """
    flat = dict(params)
    flat[FLAT_LOGITS] = flat.pop(OUTPUT_EMBEDDING, params["embedding"]).T
    for name in params:
        if name.startswith("layer_"):
            attention = dict(params[name]["attention"])
            parts = [attention.pop(part) for part in ("query", "key", "value")]
            side_by_side = [part.swapaxes(0, 1).reshape(part.shape[1], -1) for part in parts]
            attention[FLAT_ATTENTION] = jnp.concatenate(side_by_side, axis=1)
            if "query_bias" in attention:
                biases = [attention.pop(f"{part}_bias").reshape(-1) for part in ("query", "key", "value")]
                attention[FLAT_ATTENTION_BIAS] = jnp.concatenate(biases)
            flat[name] = dict(params[name]) | {"attention": attention}
    return flat
