"""Normalisation of the last axis."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from specsamp.models.config import TransformerConfig
from specsamp.models.parameters import with_leading_axes


class Norm(nn.Module):
    """RMS (Zhang and Sennrich, arXiv 1910.07467) or layer normalisation of the last axis; in float32."""

    config: TransformerConfig
    axis: str = "embed"  # the logical name of the last axis

    @nn.compact
    def __call__(self, x):
        config = self.config

        def vector(name, init):
            value = self.param(name, nn.with_logical_partitioning(init, (self.axis,)), x.shape[-1:])
            return with_leading_axes(value.astype(jnp.float32), x.ndim)

        scale = vector("scale", nn.initializers.zeros if config.norm_offset else nn.initializers.ones)
        x32 = x.astype(jnp.float32)
        if config.norm == "layer":
            x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + config.norm_epsilon)
        normed = normed * (1 + scale if config.norm_offset else scale)
        if config.norm == "layer":
            normed = normed + vector("bias", nn.initializers.zeros)
        return normed.astype(x.dtype)
