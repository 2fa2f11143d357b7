"""The assistant of Gemma 4: a few layers without keys and values, which attend to those of the
target.

A call reads the pair of the last token of a text and the target's hidden state before it, and
returns features in the place of the next hidden state. All tokens of a draft have the position of
the text's last token, and attend to the tokens before it: the target's caches hold no others.

An assistant may score few tokens: those of the clusters whose centroids score best. The logits of
all others are -inf, so tokens are drawn from exactly this distribution.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specsamp import validate
from specsamp.models.attention import Attention, join_heads, project
from specsamp.models.cache import KVCache, LayerCache
from specsamp.models.decoder import Layer
from specsamp.models.heads import Head, HeadConfig, HeadModule
from specsamp.models.modules import Norm, normalise, parameter, weight
from specsamp.models.positions import apply_rope
from specsamp.models.products import contract
from specsamp.models.visibility import Visibility

Array = jax.Array

CLUSTERS = "clusters"  # int32 [V], the cluster of each token


class SharedAttention(Attention):
    """Attention of one query to the keys and values in a layer of the target."""

    @nn.compact
    def __call__(
        self,
        x_BTD: Array,
        start_B: Array,
        rope: tuple[Array, Array],
        cache: LayerCache,
        *_: None,
    ) -> tuple[Array, LayerCache]:
        """Returns ``[B, 1, D]`` and the cache; queries attend to the slots up to ``start_B``."""
        config = self.config
        heads, size, width = config.num_heads, config.head_size, config.width
        q_BNTH = project(x_BTD, self._projection("query", heads, "heads"))
        vectors = Norm(config, "head", name="query_norm").vectors(size)
        q_BNTH = apply_rope(normalise(config, q_BNTH, *vectors), *rope)
        # As in transformers, the window is counted from the last token with keys, inclusive.
        window = self.window and self.window + 1
        visible = Visibility(start_B=start_B, num_queries=1, window=window)
        scale = config.attention_scale or 1 / math.sqrt(size)
        mixed_BNTH = cache.attend(q_BNTH, visible, scale=scale)
        axes = ("heads", "head", "embed")
        output_NHD = weight(self, "output", (heads, size, width), axes, fan_in=heads * size)
        return join_heads(mixed_BNTH, output_NHD), cache


class Assistant(HeadModule):
    """Projects a pair to the assistant's width, runs its layers, and projects back."""

    config: AssistantConfig

    def setup(self):
        self.declare_ends()
        layer, width = self.config.layer, self.config.target_width
        self.declare_fc(2 * width)
        self.linear = weight(self, "linear", (layer.width, width), ("embed", "embed"))
        self.layer = [
            Layer(layer.of_layer(i), layer.window_of(i), SharedAttention)
            for i in range(layer.num_layers)
        ]
        self.final_norm = Norm(layer)
        count, size = self.config.num_centroids, layer.vocab_size
        if count is not None:
            shape, axes = (count, layer.width), (None, "embed")
            self.centroids = weight(self, "centroids", shape, axes, fan_in=layer.width)

            def even(_, shape):
                return jnp.arange(size, dtype=jnp.int32) * count // size

            self.clusters = parameter(self, CLUSTERS, (size,), (None,), even)

    def __call__(
        self,
        embedded_BTW: Array,
        features_BTW: Array,
        lengths_B: Array,
        caches: tuple[LayerCache, ...],
    ) -> tuple[Array, Array]:
        layer = self.config.layer
        x_BTD = self.join([embedded_BTW, features_BTW])
        position_BT = lengths_B[:, None] - 1
        for i, (run, cache) in enumerate(zip(self.layer, caches, strict=True)):
            rope = layer.of_layer(i).rotary_of(layer.window_of(i)).angles(position_BT)
            x_BTD, _ = run(x_BTD, lengths_B - 2, rope, cache, None, None)
        x_BTD = self.final_norm(x_BTD)
        logits_BTV = self.multiply(self.output, x_BTD)
        if self.config.num_centroids is not None:
            scores_BTC = contract("BTD,CD->BTC", x_BTD, self.centroids, dtype=jnp.float32)
            _, best_BTk = jax.lax.top_k(scores_BTC, self.config.top_centroids)
            is_best_BTC = jax.nn.one_hot(best_BTk, scores_BTC.shape[-1], dtype=bool).any(-2)
            is_scored_BTV = jnp.take(
                is_best_BTC, self.clusters, axis=-1, mode="fill", fill_value=False
            )
            logits_BTV = jnp.where(is_scored_BTV, logits_BTV, -jnp.inf)
        return contract("BTD,DW->BTW", x_BTD, self.linear), logits_BTV

    def everything(self, hidden: tuple[Array, ...], start_B: Array) -> tuple[Array, Array]:
        layer = self.config.layer
        shapes = [layer.of_layer(i) for i in range(layer.num_layers)]
        caches = tuple(KVCache.zeros(shape, batch=1, slots=1) for shape in shapes)
        return self(*hidden, *hidden, start_B + 2, caches)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssistantConfig(HeadConfig):
    """The shape of an assistant.

    Attributes:
      layer: of all its layers.
      read_layers: the layer of the target whose keys and values each layer reads.
      num_centroids: C, clusters of tokens; None: all tokens are scored.
      top_centroids: the clusters whose tokens are scored.
    """

    read_layers: tuple[int, ...]
    num_centroids: int | None = None
    top_centroids: int = 32

    module = Assistant
    kind = "assistant"
    reads_final_norm = True
    takes_target_width = True

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "read_layers", tuple(self.read_layers))
        validate.integers("read_layers", self.read_layers, 0, self.target_layers)
        if self.num_centroids is not None:
            validate.integer("top_centroids", self.top_centroids, 1, self.num_centroids + 1)

    def head(self) -> AssistantHead:
        return AssistantHead(self)


@dataclasses.dataclass(frozen=True)
class AssistantHead(Head):
    """A head that reads the target's caches, and has none."""

    config: AssistantConfig

    def __call__(
        self,
        weights: Any,
        embedded_BTW: Array,
        features_BTW: Array,
        lengths_B: Array,
        cache: Any,
    ) -> tuple[Array, Array]:
        """Reads one pair; returns the features ``[B, 1, W]`` of the next, and float32 logits
        ``[B, 1, V]``.

        Args:
          embedded_BTW: the last token of a text, or of its draft.
          features_BTW: the target's hidden state before it, or the features of the last call.
          lengths_B: of the texts, without drafted tokens, at least 2.
          cache: of the target.
        """
        given = self.layout.on_all_devices((embedded_BTW, features_BTW, lengths_B))
        dtype = self.config.layer.compute_dtype
        embedded_BTW, features_BTW = (x_BTW.astype(dtype) for x_BTW in given[:2])
        caches = tuple(cache.layers[i] for i in self.config.read_layers)
        features_BTW, logits_BTV = self._apply(
            "__call__", weights, embedded_BTW, features_BTW, given[2], caches
        )
        return self.layout.on_all_devices(features_BTW), self.layout.by_rows(logits_BTV)
