"""Parts of all models: declarations of weights and biases, the norm, and the feed-forward part of a
layer.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from specsamp.models.config import ACTIVATIONS, TransformerConfig
from specsamp.models.int8 import Int8Weight, whole_tiles
from specsamp.models.interface import Kernels
from specsamp.models.products import contract

Array = jax.Array


def weight(
    module: nn.Module,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    fan_in: int | None = None,
) -> Array | Int8Weight:
    """Declares a weight, drawn from a normal distribution with variance ``1 / fan_in``; returns its
    value.

    Args:
      fan_in: the terms of a sum over the weight; None: the size of the first axis.
    """
    init = nn.initializers.normal((fan_in or shape[0]) ** -0.5)
    return parameter(module, name, shape, axes, init)


def parameter(
    module: nn.Module,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init: Callable[..., Array] = nn.initializers.zeros,
) -> Array | Int8Weight:
    """Declares a parameter with the logical names of its axes; returns its value."""
    return module.param(name, nn.with_logical_partitioning(init, axes), shape)


def table(
    module: nn.Module, name: str, rows: int, width: int, fan_in: int | None = None
) -> Array | Int8Weight:
    """Declares a weight ``[rows, width]`` with a row for each token; returns its value.

    Args:
      fan_in: see `weight`; None: the width.
    """
    return weight(module, name, (rows, width), ("vocab", "embed"), fan_in=fan_in or width)


def embedding(module: nn.Module, rows: int, width: int) -> Array | Int8Weight:
    """Declares the table ``[rows, width]`` that embeds tokens; returns its value, whose rows are
    padded in weights for a TPU, see `pad_rows`.
    """
    name, read = "embedding", width
    if module.has_variable("params", name):
        found = jax.tree.leaves(module.get_variable("params", name))[0].shape[1]
        read = found if found == whole_tiles(width) else width
    return table(module, name, rows, read, fan_in=width)


def zero_bias(module: nn.Module, name: str, axes: tuple[str, ...], y: Array) -> Array:
    """Declares a bias for the last axis of ``y``, initially zero; returns it in the dtype and rank
    of ``y``.
    """
    return _with_rank(parameter(module, name, y.shape[-1:], axes).astype(y.dtype), y.ndim)


def _with_rank(x: Array, ndim: int) -> Array:
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


class Norm(nn.Module):
    """RMS (Zhang and Sennrich, arXiv 1910.07467) or layer normalisation of the last axis; in
    float32.
    """

    config: TransformerConfig
    axis: str = "embed"  # the logical name of the last axis
    kernels: Kernels | None = None  # of the stream, which all devices have

    def __call__(self, x):
        function, vectors = functools.partial(normalise, self.config), self.vectors(x.shape[-1])
        if self.kernels is not None and self.kernels.take_small(x):
            return self.kernels.fuse(function, (x, *vectors), (None,))
        return function(x, *vectors)

    def after(self, x, y):
        """Returns the sum of two streams ``[..., D]``, and its norm, on a TPU in one kernel."""
        if self.kernels is None or not self.kernels.take_small(x):
            added = x + y
            return added, self(added)

        def function(x, y, *vectors):
            added = (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
            return added, normalise(self.config, added, *vectors)

        vectors = self.vectors(x.shape[-1])
        return self.kernels.fuse(function, (x, y, *vectors), (None, None))

    @nn.compact
    def vectors(self, size: int) -> tuple[Array, ...]:
        """Declares the scale, and the bias of a layer norm."""
        inits = {
            "scale": nn.initializers.zeros if self.config.norm_offset else nn.initializers.ones
        }
        if self.config.norm == "layer":
            inits["bias"] = nn.initializers.zeros
        return tuple(
            parameter(self, name, (size,), (self.axis,), init) for name, init in inits.items()
        )


def normalise(
    config: TransformerConfig,
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    axes: int | tuple[int, ...] = -1,
) -> Array:
    """Computes the norm of some axes of ``x``, see `Norm`."""
    x32 = x.astype(jnp.float32)
    if scale is not None:
        scale = _with_rank(scale.astype(jnp.float32), x.ndim)
    if config.norm == "layer":
        x32 = x32 - jnp.mean(x32, axis=axes, keepdims=True)
    normed = x32 * jax.lax.rsqrt(
        jnp.mean(x32 * x32, axis=axes, keepdims=True) + config.norm_epsilon
    )
    if scale is not None:
        normed = normed * (1 + scale if config.norm_offset else scale)
    if bias is not None:
        normed = normed + _with_rank(bias.astype(jnp.float32), x.ndim)
    return normed.astype(x.dtype)


class FeedForward(nn.Module):
    """A feed-forward layer, ``[B, T, D] -> [B, T, F] -> [B, T, D]``, gated or not."""

    config: TransformerConfig
    inner: int | None = None  # F; None: of the config

    @nn.compact
    def __call__(self, x_BTD):
        config = self.config
        width, inner = config.width, self.inner or config.feedforward_width

        def biased(name, axis, y):
            return y + zero_bias(self, name, (axis,), y) if config.feedforward_bias else y

        def project(name):
            weight_DF = weight(self, name, (width, inner), ("embed", "mlp"))
            return biased(
                f"{name}_bias", "mlp", contract("BTD,DF->BTF", x_BTD, weight_DF, dtype=jnp.float32)
            )

        activation, up_BTF = ACTIVATIONS[config.activation], project("up")
        inner_BTF = activation(project("gate")) * up_BTF if config.gated else activation(up_BTF)
        down_FD = weight(
            self, "down", (inner, width), ("mlp", "embed"), fan_in=2 * config.num_layers * inner
        )
        return biased(
            "down_bias", "embed", contract("BTF,FD->BTD", inner_BTF.astype(x_BTD.dtype), down_FD)
        )


class SharedExpert(nn.Module):
    """The expert that all tokens have, times a sigmoid of the input (Qwen2-MoE)."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x_BTD):
        width = self.config.width
        gate_D = weight(self, "share", (width,), ("embed",))
        share_BT = contract("BTD,D->BT", x_BTD, gate_D)
        made_BTD = FeedForward(self.config, self.config.experts.shared_width, name="mlp")(x_BTD)
        return jax.nn.sigmoid(share_BT)[..., None] * made_BTD
