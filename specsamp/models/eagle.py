"""The heads of EAGLE (Li et al., arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840), with the
switches of public heads.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specsamp.models.attention import Attention
from specsamp.models.cache import KVCache
from specsamp.models.heads import HeadConfig, HeadModule, finish_layer
from specsamp.models.modules import FeedForward, Norm, zero_bias

Array = jax.Array


class Eagle1(HeadModule):
    """The head of EAGLE-1: predicts the stream after the target's final norm, from which the target
    computes logits.

    The layer has no norm before its attention.
    """

    config: Eagle1Config

    def setup(self):
        self.declare_ends()
        config, width = self.config, self.config.layer.width
        self.declare_fc(2 * width)
        if config.fc_bias:
            self.fc_bias = zero_bias(self, "fc_bias", ("embed",), jnp.zeros((1, 1, width)))
        self.attention = Attention(config.layer, kernels=self.kernels)
        self.mlp_norm = Norm(config.layer, kernels=self.kernels)
        self.mlp = FeedForward(config.layer)

    def __call__(
        self, embedded_BTD, features_BTD, start_B, cache, block=None
    ) -> tuple[Array, KVCache]:
        x_BTD = self.join([embedded_BTD, features_BTD])
        if self.config.fc_bias:
            x_BTD = x_BTD + self.fc_bias.astype(x_BTD.dtype)
        return finish_layer(self, x_BTD, x_BTD, start_B, cache, block)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle1Config(HeadConfig):
    """The shape of an EAGLE-1 head."""

    fc_bias: bool = True

    module = Eagle1
    kind = "EAGLE-1"
    reads_final_norm = True


class Eagle3(HeadModule):
    """The head of EAGLE-3: fuses hidden states of three layers to features; a layer predicts the
    next features.
    """

    config: Eagle3Config

    def setup(self):
        self.declare_ends()
        config, layer = self.config, self.config.layer
        self.declare_fc(len(config.hidden_layers) * config.target_width)
        if config.norm_before_fc:
            self.input_norm = Norm(layer, kernels=self.kernels)
        if config.fc_norm:
            self.fc_norm = [Norm(layer, kernels=self.kernels) for _ in config.hidden_layers]
        norms = (Norm(layer, kernels=self.kernels) for _ in range(4))
        self.attention_norm, self.hidden_norm, self.mlp_norm, self.final_norm = norms
        self.attention = Attention(layer, input_width=2 * layer.width, kernels=self.kernels)
        self.mlp = FeedForward(layer)

    def fuse(self, hidden: tuple[Array, ...]) -> Array:
        if self.config.fc_norm:
            hidden = tuple(norm(x_BTD) for norm, x_BTD in zip(self.fc_norm, hidden, strict=True))
        if self.config.norm_before_fc:
            hidden = (self.input_norm(jnp.concatenate(hidden, axis=-1)),)
        return self.join(hidden)

    def normed(self, features_BTD: Array, offset: Array | int) -> Array:
        return features_BTD if self.config.norm_output else self.final_norm(features_BTD)

    def __call__(
        self, embedded_BTD, features_BTD, start_B, cache, block=None
    ) -> tuple[Array, KVCache]:
        normed_BTD = self.hidden_norm(features_BTD)
        x_BTX = jnp.concatenate([self.attention_norm(embedded_BTD), normed_BTD], axis=-1)
        residual_BTD = normed_BTD if self.config.norm_before_residual else features_BTD
        y_BTD, cache = finish_layer(self, x_BTX, residual_BTD, start_B, cache, block)
        return self.final_norm(y_BTD) if self.config.norm_output else y_BTD, cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """The shape of an EAGLE-3 head.

    Attributes:
      norm_before_residual: the residual of the layer is the normalised feature.
      norm_before_fc: a norm of the concatenated hidden states.
      fc_norm: a norm of each hidden state instead (EAGLE-3.1).
      norm_output: the returned features are normalised (EAGLE-3.1).
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    module = Eagle3
    kind = "EAGLE-3"
    fused = ("fc",)

    def __post_init__(self):
        super().__post_init__()
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other: set one of them")

    @classmethod
    def usual_layers(cls, target_layers: int) -> tuple[int, ...]:
        """Returns the layers whose outputs enter layers 2, L/2 and L-3.

        Raises:
          ValueError: a layer would be read twice, as in targets of fewer than seven layers.
        """
        layers = 1, target_layers // 2 - 1, target_layers - 4
        if not 0 <= layers[0] < layers[1] < layers[2]:
            raise ValueError(
                f"the usual layers of a target of {target_layers} layers would be {layers}: choose "
                "three different ones"
            )
        return layers
