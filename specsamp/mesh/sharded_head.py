"""Heads over a mesh: weights and caches split like a model's, hidden states and features on all devices of a shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from specsamp.mesh.layout import Layout, put
from specsamp.models.cache import KVCache
from specsamp.models.heads import FeatureHead, HeadModule


@dataclasses.dataclass(frozen=True)
class ShardedHead(FeatureHead):
    """A `FeatureHead` whose weights and cache are sharded; nothing else is moved but tokens, and logits once per call."""

    layout: Layout

    def param_shardings(self, params: Any) -> Any:
        """Returns the shardings of parameters, or of their shapes."""
        return self.layout.shardings(self.param_axes(), params)

    def fit_slots(self, weights: Any, slots: int) -> Any:
        return put(weights, self.layout.shardings(self.weight_axes(), weights))

    def init_cache(self, batch: int, slots: int) -> KVCache:
        return self.layout.place_cache(self.cache_axes(), super().init_cache(batch, slots))

    def fuse(self, weights: Any, hidden: tuple[jax.Array, ...]) -> jax.Array:
        return self.layout.on_all_devices(super().fuse(weights, hidden))

    def embed(self, weights: Any, tokens_BT: jax.Array) -> jax.Array:
        return self.layout.on_all_devices(super().embed(weights, *self.layout.of_all_rows(tokens_BT)))

    def __call__(
        self,
        weights: Any,
        embedded_BTD: jax.Array,
        features_BTD: jax.Array,
        start_B: jax.Array,
        cache: KVCache | None,
    ) -> tuple[jax.Array, KVCache]:
        # Also what comes in: else the compiler keeps features split in the carry, as their product wants them.
        (start_B,), features_BTD = self.layout.of_all_rows(start_B), self.layout.on_all_devices(features_BTD)
        features_BTD, cache = super().__call__(weights, embedded_BTD, features_BTD, start_B, cache)
        return self.layout.on_all_devices(features_BTD), self.layout.place_cache(self.cache_axes(), cache)

    def logits(
        self,
        weights: Any,
        features_BTD: jax.Array,
        of_target: Callable[[jax.Array], jax.Array],
        offset: jax.Array | int = 0,
    ) -> jax.Array:
        logits = super().logits(weights, features_BTD, of_target, offset)
        return self.layout.by_rows(logits) if self.config.own_output else logits  # the target has placed its own

    def take(self, features_BTD: jax.Array, row_B: jax.Array) -> jax.Array:
        return self.layout.on_all_devices(super().take(features_BTD, *self.layout.of_all_rows(row_B)))

    def _module(self) -> HeadModule:
        return self.config.module(self.config, split=self.layout.split_features)


def shard_head(head: FeatureHead, layout: Layout) -> ShardedHead:
    """Returns the head laid out over a mesh."""
    return ShardedHead(head.config, layout)
