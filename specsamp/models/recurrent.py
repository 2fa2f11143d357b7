"""Recurrent layers: the gated delta rule over a cache whose tokens can be removed.

The state behind the last token cannot be taken back. So the cache of a layer holds an *older*
state, at a multiple of `CHUNK` tokens that no later call begins before, and the inputs since. A
call appends its inputs and computes its outputs from the older state (`mix_chunks`). It moves the
older state on once all tokens of the next chunk are certain: no call may begin more than `REWIND`
tokens before the last call. So a call reads one state and writes one, whatever is rejected.

The inputs are those of the short convolution that comes before the rule. It is computed again.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specsamp.arrays import pad_axis
from specsamp.models.attention import project
from specsamp.models.cache import LayerCache
from specsamp.models.config import RecurrentConfig, TransformerConfig
from specsamp.models.delta_rule import CHUNK, mix_chunks
from specsamp.models.int8 import is_int8
from specsamp.models.interface import Kernels
from specsamp.models.modules import parameter, weight
from specsamp.models.products import contract
from specsamp.models.slots import SLOTS_AXIS, read_slots, write_slots
from specsamp.pytrees import pytree

Array = jax.Array

REWIND = CHUNK // 2  # tokens before the start of the last call
HELD = 2 * CHUNK  # tokens from the older state on: a chunk, REWIND and a call of REWIND + 1 tokens
L2_EPSILON = 1e-6
JOINED = "inputs"  # the projection of `join_parts`
CONVOLVED = ("query", "key", "value")
GATED = (*CONVOLVED, "gate")


@pytree
class RecurrentCache(LayerCache):
    """An older state of a layer, and the inputs of the tokens since.

    The inputs begin with those of the ``taps - 1`` tokens before the state.
    """

    state_BNKV: Array  # float32
    inputs_BMWX: Array
    position_B: Array  # int32, the number of tokens in the state

    @classmethod
    def zeros(
        cls,
        layer: TransformerConfig,
        batch: int,
        slots: int = 0,
        kernels: Kernels | None = None,
    ) -> Self:
        """Returns the cache of empty sequences, of the same size for any number of slots."""
        shape = layer.recurrent
        sizes = shape.num_value_heads, shape.key_size, shape.value_size
        held = shape.num_key_heads, shape.taps - 1 + HELD, shape.input_size
        return cls(
            state_BNKV=jnp.zeros((batch, *sizes), jnp.float32),
            inputs_BMWX=jnp.zeros((batch, *held), layer.compute_dtype),
            position_B=jnp.zeros((batch,), jnp.int32),
        )

    def append(self, inputs_BMTX: Array, start_B: Array) -> Self:
        """Writes the inputs of T tokens; a call at position 0 begins a new sequence.

        The result holds more inputs, until `advance`.
        """
        length = inputs_BMTX.shape[2]
        before = self.inputs_BMWX.shape[2] - HELD
        is_new_B = start_B == 0
        position_B = jnp.where(is_new_B, 0, self.position_B)
        # What an earlier sequence left may be NaN, whose product with 0 is NaN.
        kept = jnp.where(is_new_B[:, None, None, None], 0, self.inputs_BMWX)
        inputs = pad_axis(
            kept.astype(self.inputs_BMWX.dtype), -(-length // CHUNK) * CHUNK, SLOTS_AXIS
        )
        at_B = before + jnp.clip(start_B - position_B, 0, HELD)
        inputs = write_slots(inputs, inputs_BMTX.astype(inputs.dtype), at_B)
        is_before = jnp.arange(inputs.shape[2])[None, None, :, None] < before
        is_before &= (position_B == 0)[:, None, None, None]
        return dataclasses.replace(
            self,
            state_BNKV=jnp.where(is_new_B[:, None, None, None], 0.0, self.state_BNKV),
            inputs_BMWX=jnp.where(is_before, jnp.zeros((), inputs.dtype), inputs),
            position_B=position_B,
        )

    def advance(self, state_BNKV: Array, num_chunks_B: Array, num_held: int) -> Self:
        """Moves on to a state that is ``num_chunks_B`` chunks later."""
        inputs = pad_axis(self.inputs_BMWX, HELD, SLOTS_AXIS)
        return dataclasses.replace(
            self,
            state_BNKV=state_BNKV,
            inputs_BMWX=read_slots(inputs, num_chunks_B * CHUNK, num_held),
            position_B=self.position_B + num_chunks_B * CHUNK,
        )


class GatedDelta(nn.Module):
    """A layer of the gated delta rule, behind a short convolution (Qwen3-Next, Qwen3.5).

    It computes with the result of `join_parts`: of decode-time weights, or of its parameters.
    """

    config: TransformerConfig
    kernels: Kernels | None = None

    @nn.compact
    def __call__(
        self,
        x_BTD: Array,
        start_B: Array,
        cache: RecurrentCache | None,
        lengths_B: Array | None,
    ) -> tuple[Array, RecurrentCache]:
        """Returns ``[B, T, D]`` and the cache with the call's tokens.

        Args:
          cache: None: the call begins its sequences.
          lengths_B: see `LanguageModel.__call__`.

        Raises:
          ValueError: while tracing, if T is too large for a call whose tokens may be removed.
        """
        config, shape = self.config, self.config.recurrent
        (batch, length, width), heads = x_BTD.shape, shape.num_key_heads
        is_step = cache is not None and lengths_B is None
        if cache is None:
            cache = RecurrentCache.zeros(config, batch)
        elif lengths_B is None and length > REWIND + 1:
            raise ValueError(
                f"a recurrent model reads {length} tokens in a call: give lengths_B, since only "
                f"{REWIND + 1} tokens can be removed again"
            )
        is_joined = self.has_variable("params", JOINED)
        params = self.variables["params"] if is_joined else join_parts(self.declare())
        ones = nn.initializers.ones
        scale_V = parameter(self, "norm_scale", (shape.value_size,), ("head",), ones)
        vectors = params["taps"], params["rates"], scale_V
        x_BMTX = self.project_heads(x_BTD, params)
        if is_step and self.kernels is not None and self.kernels.take_delta(shape):
            mixed_BTX, cache = self.kernels.step_delta(config, x_BMTX, start_B, vectors, cache)
        else:
            mixed_BTX, cache = mix(config, x_BMTX, start_B, vectors, cache, lengths_B)
        joined = shape.projections["value"][1]
        output_MXD = weight(
            self,
            "output",
            (heads, joined, width),
            ("kv_heads", "head", "embed"),
            fan_in=2 * config.num_layers * heads * joined,
        )
        output_XD = jax.tree.map(lambda x_MXD: x_MXD.reshape(-1, width), output_MXD)
        return contract("BTX,XD->BTD", mixed_BTX, output_XD), cache

    def declare(self) -> dict[str, Array]:
        """Declares the parameters of `join_parts`; returns their values."""
        shape, width = self.config.recurrent, self.config.width
        axes = "kv_heads", "embed", "head"
        params = {
            name: weight(self, name, (heads, width, size), axes, fan_in=width)
            for name, (heads, size) in shape.projections.items()
        }
        for name in CONVOLVED:
            sizes, axes = (*shape.projections[name], shape.taps), ("kv_heads", "head", None)
            params[f"{name}_taps"] = weight(self, f"{name}_taps", sizes, axes, fan_in=shape.taps)
        for name in ("log_rate", "decay_bias"):
            params[name] = parameter(self, name, shape.projections["decay"], ("kv_heads", "head"))
        return params

    def project_heads(self, x_BTD: Array, params: Mapping[str, Any]) -> Array:
        """Returns the parts of `RecurrentConfig.projections`, ``[B, M, T, X]``."""
        joined_BMTX = self.project_joined(x_BTD, params[JOINED])
        rest = [project(x_BTD, params[name]) for name in ("share", "decay") if name in params]
        return jnp.concatenate([joined_BMTX, *rest], axis=-1)

    def project_joined(self, x_BTD: Array, weight_MDX: Array) -> Array:
        """Multiplies ``BTD,MDX -> BMTX``."""
        return project(x_BTD, weight_MDX)


def join_parts(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a layer with one projection ``[M, D, X]``; the taps of all channels
    ``[M, taps, X]``; and the rates and biases of decays ``[M, 2, N / M]``.

    Beside an int8 projection those of shares and decays, which are not in int8, stay.
    """
    joined = dict(params)
    names = GATED if is_int8(params["query"]) else (*GATED, "share", "decay")
    parts = [joined.pop(name) for name in names]
    joined[JOINED] = jax.tree.map(lambda *each: jnp.concatenate(each, axis=-1), *parts)
    taps = [joined.pop(f"{name}_taps") for name in CONVOLVED]
    joined["taps"] = jnp.concatenate(taps, axis=1).swapaxes(1, 2)
    joined["rates"] = jnp.stack([joined.pop(name) for name in ("log_rate", "decay_bias")], axis=1)
    return joined


def join_axes(axes: Mapping[str, Any], *, in_int8: bool) -> dict[str, Any]:
    """Returns the logical axes of the result of `join_parts`."""
    kept = ("output", "norm_scale", *(("share", "decay") if in_int8 else ()))
    joined = dict.fromkeys((JOINED, "taps", "rates"), PartitionSpec("kv_heads", None, "head"))
    return {name: axes[name] for name in kept} | joined


def mix(
    config: TransformerConfig,
    x_BMTX: Array,
    start_B: Array,
    vectors: tuple[Array, Array, Array],
    cache: RecurrentCache,
    lengths_B: Array | None = None,
) -> tuple[Array, RecurrentCache]:
    """Returns the normalised outputs of the rule ``[B, T, N V]``, and the cache with the inputs.

    Args:
      x_BMTX: the parts of `RecurrentConfig.projections`.
      vectors: taps, and rates and biases of decays, of `join_parts`; and the scale of the norm
        ``[V]``.
    """
    shape, length = config.recurrent, x_BMTX.shape[2]
    *rule_weights, scale_V = vectors
    ends = [2 * shape.key_size + shape.projections["value"][1]]
    ends.append(ends[0] + shape.projections["gate"][1])
    mixed_BMTX, z_BMTX, gates_BMTX = jnp.split(x_BMTX, ends, axis=-1)
    held = cache.inputs_BMWX.shape[2]
    cache = cache.append(jnp.concatenate([mixed_BMTX, gates_BMTX], axis=-1), start_B)
    offset_B = start_B - cache.position_B
    certain_B = start_B
    is_lost_B = (offset_B < 0) | (offset_B > HELD)
    if lengths_B is not None:
        certain_B = jnp.minimum(start_B + length, lengths_B - 1)
        is_lost_B &= start_B < lengths_B
    rule_inputs = _rule_inputs(config, *rule_weights, cache.inputs_BMWX)
    num_chunks_B = (certain_B - REWIND - cache.position_B) // CHUNK
    num_chunks_B = jnp.clip(num_chunks_B, 0, rule_inputs[0].shape[2] // CHUNK)
    out_BNLV, state_BNKV = mix_chunks(cache.state_BNKV, *rule_inputs, num_chunks_B)
    cache = cache.advance(state_BNKV, num_chunks_B, held)
    out_BNTV = read_slots(out_BNLV, jnp.clip(offset_B, 0, HELD), length)
    # Tokens were removed that the state contains: no text may follow from it.
    out_BNTV = jnp.where(is_lost_B[:, None, None, None], jnp.nan, out_BNTV).astype(x_BMTX.dtype)
    gates_BNTV = _per_value_head(z_BMTX, shape)
    out_BNTV = normalise(config, out_BNTV, gates_BNTV, scale_V[None, None, None])
    return out_BNTV.swapaxes(1, 2).reshape(len(x_BMTX), length, -1), cache


def normalise(config: TransformerConfig, x: Array, gates: Array, scale: Array) -> Array:
    """Computes the RMS norm of each head, without an offset, times the gate."""
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    normed = (x32 * jax.lax.rsqrt(mean + config.norm_epsilon)).astype(x.dtype)
    normed = (normed * scale.astype(x.dtype)).astype(jnp.float32)
    return (normed * jax.nn.silu(gates.astype(jnp.float32))).astype(x.dtype)


def _rule_inputs(
    config: TransformerConfig,
    taps_MtX: Array,
    rates_M2g: Array,
    inputs_BMWX: Array,
) -> list[Array]:
    """Returns the arguments of `mix_chunks` for all tokens whose inputs are held."""
    shape, dtype = config.recurrent, config.compute_dtype
    mixed_BMWX, gates_BMWX = jnp.split(inputs_BMWX, [taps_MtX.shape[2]], axis=-1)
    length = mixed_BMWX.shape[2] - shape.taps + 1
    taps_MtX = taps_MtX.astype(jnp.float32)
    log_rate_N, decay_bias_N = rates_M2g.astype(jnp.float32).swapaxes(0, 1).reshape(2, -1)
    convolved = sum(
        mixed_BMWX[:, :, t : t + length].astype(jnp.float32) * taps_MtX[None, :, t, None]
        for t in range(shape.taps)
    ).astype(dtype)
    active = jax.nn.silu(convolved.astype(jnp.float32)).astype(dtype).astype(jnp.float32)
    q, k, v = jnp.split(active, [shape.key_size, 2 * shape.key_size], axis=-1)
    group = shape.num_value_heads // shape.num_key_heads
    q, k = (jnp.repeat(scale_to_unit(x), group, axis=1) for x in (q, k))
    share, decay = (
        _per_value_head(x, shape)[..., 0]
        for x in jnp.split(gates_BMWX[:, :, shape.taps - 1 :], 2, axis=-1)
    )
    decay = jax.nn.softplus(decay.astype(jnp.float32) + decay_bias_N[None, :, None])
    g = -jnp.exp(log_rate_N)[None, :, None] * decay
    beta = jax.nn.sigmoid(share.astype(jnp.float32)).astype(dtype).astype(jnp.float32)
    return [q * shape.key_size**-0.5, k, _per_value_head(v, shape), g, beta]


def _per_value_head(x_BMTX: Array, shape: RecurrentConfig) -> Array:
    """Splits what the value heads of a key head have together, ``[B, N, T, V]``."""
    batch, heads, length, _ = x_BMTX.shape
    group = shape.num_value_heads // heads
    parts = x_BMTX.reshape(batch, heads, length, group, -1).swapaxes(2, 3)
    return parts.reshape(batch, shape.num_value_heads, length, -1)


def scale_to_unit(x: Array) -> Array:
    """Divides rows by their norm."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPSILON)
