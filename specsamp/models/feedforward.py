"""The feed-forward part of a layer."""

from __future__ import annotations

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from specsamp.models.config import TransformerConfig
from specsamp.models.parameters import bias, weight
from specsamp.models.products import contract

Array = jax.Array

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
}


class FeedForward(nn.Module):
    """Two products with an activation between them, ``[B, T, D] -> [B, T, F] -> [B, T, D]``, gated or not."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x_BTD):
        config = self.config
        width, inner = config.width, config.feedforward_width

        def biased(name, axis, y):
            return y + bias(self, name, (axis,), y) if config.feedforward_bias else y

        def project(name):
            weight_DF = weight(self, name, (width, inner), ("embed", "mlp"), fan_in=width)
            return biased(f"{name}_bias", "mlp", contract("BTD,DF->BTF", x_BTD, weight_DF, dtype=jnp.float32))

        activation, up_BTF = ACTIVATIONS[config.activation], project("up")
        inner_BTF = activation(project("gate")) * up_BTF if config.gated else activation(up_BTF)
        down_FD = weight(self, "down", (inner, width), ("mlp", "embed"), fan_in=2 * config.num_layers * inner)
        return biased("down_bias", "embed", contract("BTF,FD->BTD", inner_BTF.astype(x_BTD.dtype), down_FD))
