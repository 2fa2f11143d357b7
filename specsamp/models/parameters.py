"""Declares the parameters of the decoder's modules: an initialiser and the logical name of every axis."""

from __future__ import annotations

import flax.linen as nn
import jax

from specsamp.models.int8 import Int8Weight

Array = jax.Array


def weight(
    module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str, ...], *, fan_in: int
) -> Array | Int8Weight:
    """Declares a weight, drawn from a normal distribution with variance ``1 / fan_in``; returns its value."""
    init = nn.with_logical_partitioning(nn.initializers.normal(fan_in**-0.5), axes)
    return module.param(name, init, shape)


def bias(module: nn.Module, name: str, axes: tuple[str, ...], y: Array) -> Array:
    """Declares a bias for the last axis of ``y``, zero at first; returns it in the dtype and rank of ``y``."""
    init = nn.with_logical_partitioning(nn.initializers.zeros, axes)
    return with_leading_axes(module.param(name, init, y.shape[-1:]).astype(y.dtype), y.ndim)


def with_leading_axes(x: Array, ndim: int) -> Array:
    """Adds axes of size one in front until ``x`` has ``ndim`` axes."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)
