"""Attention, as a Linen module. Its cache stores keys and values, and computes scores from them.

Weights have the same order of axes for every number of tokens: Q, K, V head-major ``[N, D, H]`` and
the output ``[N, H, D]``. With any other order the TPU compiler rearranges weights in a loop that
uses them at different T. On CPUs the order is different, see `specsamp.models.cpu_weights`.
"""

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specsamp.models.cache import KVCache, LayerCache
from specsamp.models.config import TransformerConfig
from specsamp.models.int8 import Int8Weight
from specsamp.models.interface import Block, Kernels
from specsamp.models.modules import Norm, normalise, parameter, weight, zero_bias
from specsamp.models.positions import apply_rope, relative_keys
from specsamp.models.products import contract
from specsamp.models.visibility import Visibility

Array = jax.Array

# Up to this many rows a projection is one small product per head; beyond, a single large one.
MAX_BATCHED_ROWS = 256


class Attention(nn.Module):
    """Multi-head, grouped or multi-query attention over a cache, or over the call alone.

    With a ``window``, a token attends to itself and the ``window - 1`` slots before it. The window
    is a mask: the cache keeps every slot, so that tokens can be removed across the window's edge.
    """

    config: TransformerConfig
    window: int | None = None
    # Of the input of queries, keys and values; None: the stream's width.
    input_width: int | None = None
    kernels: Kernels | None = None

    table_axes = "MSH"  # of the table of relative keys

    @nn.compact
    def __call__(
        self,
        x_BTD: Array,
        start_B: Array,
        rope: tuple[Array, Array] | None,
        cache: LayerCache | None,
        table: Array | None,
        block: Block | Any,
    ) -> tuple[Array, LayerCache]:
        """Returns ``[B, T, D]`` and the cache with the call's tokens.

        Args:
          rope: from `Rotary.angles`, of models with rotary positions.
          cache: None: the tokens of the call attend to each other only.
          table: relative keys for all slots of the cache; None: computed in the call.
          block: a token tree; the blocks of a head (`BlockVisibility`); None: a chain.
        """
        config = self.config
        heads, size, width = config.num_heads, config.head_size, config.width
        length = x_BTD.shape[1]
        q_BNTH, k_BMTH, v_BMTH, *gates_BNTH = self.project_heads(x_BTD)
        fan_in = 2 * config.num_layers * heads * size
        output_NHD = weight(
            self, "output", (heads, size, width), ("heads", "head", "embed"), fan_in=fan_in
        )
        if config.joint_norm:
            q_BNTH = self.norm_jointly("query_norm", q_BNTH, "heads")
            k_BMTH = self.norm_jointly("key_norm", k_BMTH, "kv_heads")
        vectors = ()
        if config.query_key_norm:
            vectors = [
                Norm(config, "head", name=name).vectors(size) for name in ("query_norm", "key_norm")
            ]
        q_BNTH, k_BMTH = self.turn_heads(q_BNTH, k_BMTH, vectors, rope)
        if config.value_norm:
            v_BMTH = normalise(config, v_BMTH)
        if cache is None:
            cache = KVCache.of(k_BMTH, v_BMTH)
        else:
            cache = cache.append(k_BMTH, v_BMTH, start_B)
        visible = block
        if block is None or isinstance(block, Block):
            visible = Visibility(
                start_B=start_B, num_queries=length, window=self.window, block=block
            )
        distances_BNTS = None
        if config.positions == "relative":
            q_BNTH, distances_BNTS = self.score_distances(q_BNTH, table, cache.num_slots)
        scale = config.attention_scale or 1 / math.sqrt(size)
        sinks_N = None
        if config.attention_sinks:
            sinks_N = parameter(self, "sinks", (heads,), ("heads",)).astype(jnp.float32)
        mixed_BNTH = cache.attend(
            q_BNTH,
            visible,
            scale=scale,
            distances_BNTS=distances_BNTS,
            cap=config.attention_cap,
            sinks_N=sinks_N,
        )
        # With kernels a layer keeps its tokens on one axis, without padding for each sequence.
        rows = x_BTD.shape[:2] if self.kernels is None else (1, len(x_BTD) * length)
        out_BTD = join_heads(mixed_BNTH, output_NHD, gates_BNTH, rows)
        out_BTD = out_BTD.reshape(len(x_BTD), length, width)
        if config.output_bias:
            out_BTD = out_BTD + zero_bias(self, "output_bias", ("embed",), out_BTD)
        return out_BTD, cache

    def project_heads(self, x_BTD: Array) -> tuple[Array, ...]:
        """Returns queries ``[B, N, T, H]``, keys and values ``[B, M, T, H]``; and with an
        ``attention_gate`` the gates of all queries.
        """
        config = self.config

        def project_part(name, count, axis):
            y_BNTH = project(x_BTD, self._projection(name, count, axis))
            if not config.attention_bias:
                return y_BNTH
            bias_NH = parameter(self, f"{name}_bias", (count, config.head_size), (axis, "head"))
            return y_BNTH + bias_NH.astype(y_BNTH.dtype)[None, :, None]

        q_BNTH = project_part("query", config.num_heads, "heads")
        k_BMTH = project_part("key", config.num_kv_heads, "kv_heads")
        if config.keys_as_values:
            return q_BNTH, k_BMTH, k_BMTH
        parts = q_BNTH, k_BMTH, project_part("value", config.num_kv_heads, "kv_heads")
        if not config.attention_gate:
            return parts
        return (*parts, project_part("gate", config.num_heads, "heads"))

    def norm_jointly(self, name: str, x_BNTH: Array, axis: str) -> Array:
        """Returns heads after one norm of all of them."""
        shape = x_BNTH.shape[1], x_BNTH.shape[3]
        scale_NH = parameter(self, name, shape, (axis, "head"), nn.initializers.ones)
        return normalise(self.config, x_BNTH, scale_NH[:, None], axes=(1, 3))

    def turn_heads(
        self,
        q_BNTH: Array,
        k_BMTH: Array,
        vectors: Sequence[tuple[Array, ...]],
        rope: tuple[Array, Array] | None,
    ) -> tuple[Array, Array]:
        """Returns queries and keys after their norms and their rotation."""

        def turn(q_BNTH, k_BMTH, vectors, rope):
            heads = (q_BNTH, k_BMTH)
            if vectors:
                heads = [
                    normalise(self.config, x, *each) for x, each in zip(heads, vectors, strict=True)
                ]
            return tuple(x if rope is None else apply_rope(x, *rope) for x in heads)

        if self.kernels is None or not (vectors or rope) or not self.kernels.take_small(q_BNTH):
            return turn(q_BNTH, k_BMTH, vectors, rope)
        return self.kernels.fuse(turn, (q_BNTH, k_BMTH, vectors, rope), ("heads", "kv_heads"))

    def score_distances(
        self, q_BNTH: Array, table: Array | None, num_slots: int
    ) -> tuple[Array, Array]:
        """Returns the queries for the keys, and their scores by reversed distance, ``[B, N, T, S]``
        float32.

        See `specsamp.models.positions`.
        """
        config = self.config
        batch, heads, length, size = q_BNTH.shape

        def head_bias(name):
            value_NH = weight(self, name, (heads, size), ("heads", "head"), fan_in=size)
            return value_NH.astype(q_BNTH.dtype)[None, :, None, :]

        content_BNTH = q_BNTH + head_bias("content_bias")
        distance_BNTH = q_BNTH + head_bias("distance_bias")
        if table is None:
            weight_MDH = self._projection("relative", config.num_kv_heads, "kv_heads")
            table, axes = relative_keys(weight_MDH, num_slots).astype(q_BNTH.dtype), "MSH"
        else:
            axes = self.table_axes
            table = _of_nearest(table, num_slots, axes.index("S"))
        distance_BMRH = distance_BNTH.reshape(batch, config.num_kv_heads, -1, size)
        scores = contract(f"BMRH,{axes}->BMRS", distance_BMRH, table, dtype=jnp.float32)
        return content_BNTH, scores.reshape(batch, heads, length, num_slots)

    def _projection(self, name: str, count: int, axis: str) -> Array:
        width = self.input_width or self.config.width
        return weight(
            self, name, (count, width, self.config.head_size), (axis, "embed", "head"), fan_in=width
        )


def project(x_BTD: Array, weight_NDH: Array | Int8Weight) -> Array:
    """Multiplies ``BTD,NDH -> BNTH``; for few rows the weight is not rearranged."""
    batch, length, width = x_BTD.shape
    heads, _, size = weight_NDH.shape
    if batch * length > MAX_BATCHED_ROWS:
        return contract("BTD,NDH->BNTH", x_BTD, weight_NDH)
    rows_1RD = x_BTD.reshape(1, batch * length, width)
    rows_NRH = contract("NRD,NDH->NRH", rows_1RD, weight_NDH, copies=heads)
    return rows_NRH.reshape(heads, batch, length, size).swapaxes(0, 1)


def join_heads(
    mixed_BNTH: Array,
    output_NHD: Array | Int8Weight,
    gates_BNTH: Sequence[Array] = (),
    rows: tuple[int, int] | None = None,
) -> Array:
    """Multiplies ``BNTH,NHD -> BTD``, after the gates of the heads; with ``rows``, these are the
    sizes of the first two axes instead of B and T.

    One contraction over heads and their entries together: as two, the weight is transposed for it.
    """
    batch, heads, length, size = mixed_BNTH.shape
    mixed_BTX = mixed_BNTH.swapaxes(1, 2).reshape(batch, length, heads * size)
    for gate_BNTH in gates_BNTH:
        gate_BTX = gate_BNTH.swapaxes(1, 2).reshape(batch, length, heads * size)
        mixed_BTX = mixed_BTX * jax.nn.sigmoid(gate_BTX)
    width = output_NHD.shape[-1]
    mixed_BTX = mixed_BTX.reshape(*(rows or (batch, length)), -1)
    # Of int8 weights the scale too.
    output_XD = jax.tree.map(lambda x_NHD: x_NHD.reshape(-1, width), output_NHD)
    return contract("BTX,XD->BTD", mixed_BTX, output_XD)


def _of_nearest(table: Array, count: int, axis: int) -> Array:
    """Returns the entries of the ``count`` smallest distances, for a cache that was cut; the
    farthest is repeated.
    """
    missing = count - table.shape[axis]
    if missing > 0:
        return jnp.pad(
            table, [(missing if at == axis else 0, 0) for at in range(table.ndim)], mode="edge"
        )
    return jax.lax.slice_in_dim(table, -missing, table.shape[axis], axis=axis)
