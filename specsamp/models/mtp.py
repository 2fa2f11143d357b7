"""Modules for multi-token prediction (DeepSeek-V3, arXiv 2412.19437), used recursively as a head."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specsamp.models.attention import Attention
from specsamp.models.cache import KVCache
from specsamp.models.heads import HeadConfig, HeadModule, finish_layer
from specsamp.models.modules import FeedForward, Norm, weight
from specsamp.models.products import contract

Array = jax.Array


class MTP(HeadModule):
    """Concatenates normalised token and hidden state, projects them to one stream, and runs a layer."""

    config: MTPConfig

    def setup(self):
        self.declare_ends()
        layer = self.config.layer
        self.fc = weight(self, "fc", (2 * layer.width, layer.width), ("features", "embed"), fan_in=2 * layer.width)
        self.token_norm, self.hidden_norm = Norm(layer), Norm(layer)
        self.attention_norm, self.attention = Norm(layer), Attention(layer)
        self.mlp_norm, self.mlp, self.final_norm = Norm(layer), FeedForward(layer), Norm(layer)

    def normed(self, features_BTD: Array, offset: Array | int) -> Array:
        return features_BTD if self.config.norm_output else self.final_norm(features_BTD)

    def __call__(self, embedded_BTD, features_BTD, start_B, cache, block=None) -> tuple[Array, KVCache]:
        parts = [self.token_norm(embedded_BTD), self.hidden_norm(features_BTD)]
        x_BTX = jnp.concatenate(parts[::-1] if self.config.hidden_first else parts, axis=-1)
        x_BTD = contract("BTX,XD->BTD", self.split(x_BTX), self.fc)
        y_BTD, cache = finish_layer(self, self.attention_norm(x_BTD), x_BTD, start_B, cache, block)
        return self.final_norm(y_BTD) if self.config.norm_output else y_BTD, cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig(HeadConfig):
    """The shape of a module with one dense layer.

    Attributes:
      hidden_first: the hidden state stands before the token in the projected input, as in MiMo-7B; False: behind it.
      norm_output: the returned features are normalised.
    """

    hidden_first: bool = False
    norm_output: bool = False

    module: ClassVar[type[HeadModule]] = MTP
    kind: ClassVar[str] = "MTP"

    def __post_init__(self):
        super().__post_init__()
        if len(self.hidden_layers) != 1:
            raise ValueError(f"an MTP module reads one hidden state; got hidden_layers {self.hidden_layers}")

    @classmethod
    def usual_layers(cls, target_layers: int) -> tuple[int, ...]:
        """Returns the layer before the final norm, as in MiMo: the module has a norm for it."""
        return (target_layers - 1,)
