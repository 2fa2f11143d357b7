"""Modules for multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

One module is used again and again, as a head of EAGLE is. Of several, each drafts one token: module
k, counted from 0, reads the features of module k - 1 and the token k + 1 positions later
(`ModuleChain`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from specsamp.models.attention import Attention
from specsamp.models.cache import KVCache
from specsamp.models.experts import SparseFeedForward
from specsamp.models.heads import FeatureHead, HeadConfig, HeadModule, finish_layer
from specsamp.models.modules import FeedForward, Norm

Array = jax.Array


class Module(HeadModule):
    """Projects the normalised token and hidden state, and runs a layer."""

    config: MTPConfig

    def setup(self):
        layer = self.config.layer
        self.declare_fc(2 * layer.width)
        norms = [Norm(layer, kernels=self.kernels) for _ in range(5)]
        self.token_norm, self.hidden_norm, self.attention_norm, self.mlp_norm, self.final_norm = (
            norms
        )
        self.attention = Attention(layer, kernels=self.kernels)
        if layer.experts is None:
            self.mlp = FeedForward(layer)
        else:
            self.mlp = SparseFeedForward(layer, self.layout, self.kernels)

    def __call__(self, embedded_BTD, features_BTD, start_B, cache, block) -> tuple[Array, KVCache]:
        parts = [self.token_norm(embedded_BTD), self.hidden_norm(features_BTD)]
        x_BTD = self.join(parts[::-1] if self.config.hidden_first else parts)
        y_BTD, cache = finish_layer(self, self.attention_norm(x_BTD), x_BTD, start_B, cache, block)
        return self.final_norm(y_BTD) if self.config.norm_output else y_BTD, cache

    def normed(self, features_BTD: Array, offset: Array | int) -> Array:
        return features_BTD if self.config.norm_output else self.final_norm(features_BTD)


class MTP(HeadModule):
    """All modules of a target."""

    config: MTPConfig

    def setup(self):
        self.declare_ends()
        self.module = [
            Module(self.config, self.layout, self.kernels) for _ in range(self.config.num_modules)
        ]

    def __call__(
        self, embedded_BTD, features_BTD, start_B, cache, block=None, number=0
    ) -> tuple[Array, KVCache]:
        return self.module[number](embedded_BTD, features_BTD, start_B, cache, block)

    def normed(self, features_BTD: Array, offset: Array | int) -> Array:
        return self.module[0 if self.config.num_modules == 1 else offset].normed(
            features_BTD, offset
        )

    def everything(self, hidden: tuple[Array, ...], start_B: Array) -> list[Array]:
        return [
            module.normed(module(*hidden, *hidden, start_B, None, None)[0], 0)
            for module in self.module
        ]


@dataclasses.dataclass(frozen=True)
class ModuleChain(FeatureHead):
    """Several modules, each with a cache of its own; module 0 reads the target's features."""

    def init_cache(self, batch: int, slots: int) -> tuple[KVCache, ...]:
        return tuple(self._one.init_cache(batch, slots) for _ in range(self.config.num_modules))

    def cache_axes(self) -> tuple[KVCache, ...]:
        return (self._one.cache_axes(),) * self.config.num_modules

    @property
    def _one(self) -> FeatureHead:
        """Returns a head with the cache of one module."""
        return FeatureHead(self.config, self.layout, self.kernels)

    def __call__(
        self,
        weights: Any,
        embedded_BTD: Array,
        features_BTD: Array,
        start_B: Array,
        cache: tuple[KVCache, ...] | None,
        number: int = 0,
    ) -> tuple[Array, tuple[KVCache, ...] | None]:
        """Reads pairs with one module, see `FeatureHead`; returns its features and the caches of
        all modules.

        Args:
          embedded_BTD: the tokens x_{t+1+number}.
          features_BTD: of positions t, from `fuse` or the module before.
        """
        own = None if cache is None else cache[number]
        features_BTD, own = self._one(
            weights, embedded_BTD, features_BTD, start_B, own, number=number
        )
        return features_BTD, None if cache is None else (*cache[:number], own, *cache[number + 1 :])


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig(HeadConfig):
    """The shape of modules with one layer.

    Attributes:
      num_modules: 1 drafts any number of tokens; of several, each drafts one.
      hidden_first: in the projected input the hidden state comes before the token, as in MiMo-7B;
        False: after it.
      norm_output: the returned features are normalised.
    """

    num_modules: int = 1
    hidden_first: bool = False
    norm_output: bool = False

    module = MTP
    kind = "MTP"

    def __post_init__(self):
        super().__post_init__()
        if len(self.hidden_layers) != 1:
            raise ValueError(
                f"an MTP module reads one hidden state; got hidden_layers {self.hidden_layers}"
            )

    @classmethod
    def usual_layers(cls, target_layers: int) -> tuple[int, ...]:
        """Returns the layer before the final norm, as in MiMo: the module has a norm for it."""
        return (target_layers - 1,)

    def head(self) -> FeatureHead:
        return FeatureHead(self) if self.num_modules == 1 else ModuleChain(self)

    def is_read_by_a_step(self, name: str) -> bool:
        """Returns whether it belongs to the first module, or to all: a step runs one module, and
        all have equal sizes.
        """
        return name in ("module_0", "output")

    @property
    def max_tokens(self) -> int | None:
        return None if self.num_modules == 1 else self.num_modules
