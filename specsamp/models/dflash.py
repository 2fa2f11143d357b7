"""Heads that draft a block of tokens in one call: DFlash, and what is built on it
(`block_corrections.py`).

The rows of a block are the pending token and mask tokens. In each layer they see the *context*,
which is keys and values made of the target's hidden states before the pending token, and each other
in both directions. Each row predicts one token, without seeing the tokens of the block before it.
So the tokens of a draft are independent, unless a `Correction` makes each depend on the tokens
before it.

The context of position t lies in slot t of each layer's cache. The rows of a block are written in
the slots behind the context, and the next round writes over them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specsamp import validate
from specsamp.models.attention import Attention
from specsamp.models.cache import LayerCache
from specsamp.models.heads import Head, HeadConfig, HeadModule
from specsamp.models.interface import Kernels, LayeredModel
from specsamp.models.modules import FeedForward, Norm
from specsamp.models.products import soft_cap
from specsamp.models.visibility import BlockVisibility, positions_of

Array = jax.Array
Caches = tuple[LayerCache, ...]


class Correction(nn.Module):
    """Corrects the logits of one token, given the tokens of the block before it; see
    `BlockConfig.correction`.
    """

    config: BlockConfig

    def begin(self, batch: int) -> Any:
        """Returns the state before the first token; every leaf leads with the batch."""
        return ()

    def __call__(
        self, logits_BU: Array, x_BD: Array, token_B: Array, state: Any
    ) -> tuple[Array, Any]:
        """Returns corrected logits and the next state.

        Args:
          logits_BU: of the block's row.
          x_BD: the row, as its logits read it.
          token_B: the token before.
        """
        raise NotImplementedError

    def confidence(self, x_BD: Array, token_B: Array) -> Array:
        """Returns the log-odds ``[B]`` that the token of the row will be accepted; see
        `BlockConfig.confidence`.
        """
        raise NotImplementedError


class BlockLayer(nn.Module):
    """A decoder layer whose attention also sees the context."""

    config: BlockConfig
    kernels: Kernels | None = None

    def setup(self):
        layer = self.config.layer
        self.attention_norm, self.mlp_norm = (Norm(layer, kernels=self.kernels) for _ in range(2))
        self.attention, self.mlp = Attention(layer, kernels=self.kernels), FeedForward(layer)
        self.attention_around, self.mlp_around = self.config.around(), self.config.around()

    def read(self, features_BTD: Array, start_B: Array, rope: Any, cache: LayerCache) -> LayerCache:
        """Writes keys and values of features in slots ``start_B ..``; the compiler drops the rest
        of attention.
        """
        return self.attention(features_BTD, start_B, rope, cache, None, None)[1]

    def __call__(
        self, x_BTD: Array, start_B: Array, rope: Any, cache: LayerCache, visible: BlockVisibility
    ) -> tuple[Array, LayerCache]:
        with jax.named_scope("attention"):
            y_BTD, finish = _begin(self.attention_around, self.attention_norm(x_BTD))
            y_BTD, cache = self.attention(y_BTD, start_B, rope, cache, None, visible)
        with jax.named_scope("mlp"):
            x_BTD, y_BTD = self.mlp_norm.after(x_BTD, finish(y_BTD))
            y_BTD, finish = _begin(self.mlp_around, y_BTD)
            return x_BTD + finish(self.mlp(y_BTD)), cache


def _begin(around: nn.Module | None, x_BTD: Array) -> tuple[Array, Callable[[Array], Array]]:
    return (x_BTD, lambda y_BTD: y_BTD) if around is None else around(x_BTD)


class BlockModule(HeadModule):
    """The module of all block heads."""

    config: BlockConfig

    def setup(self):
        self.declare_ends()
        config, layer = self.config, self.config.layer
        self.declare_fc(len(config.hidden_layers) * config.target_width)
        self.hidden_norm, self.final_norm = (Norm(layer, kernels=self.kernels) for _ in range(2))
        self.layer = [BlockLayer(config, self.kernels) for _ in range(layer.num_layers)]
        self.correction = config.correction()

    def fuse(self, hidden: tuple[Array, ...]) -> Array:
        return self.hidden_norm(self.join(hidden))

    def read(self, features_BTD: Array, start_B: Array, caches: Caches) -> Caches:
        ropes = self._ropes(positions_of(start_B, features_BTD.shape[1]))
        return tuple(
            layer.read(features_BTD, start_B, rope, cache)
            for layer, rope, cache in zip(self.layer, ropes, caches, strict=True)
        )

    def __call__(
        self, embedded_BTD: Array, anchors_BA: Array, first_BA: Array, caches: Caches
    ) -> tuple[Array, Caches]:
        config, size = self.config, self.config.block_size
        positions_BT = (anchors_BA[..., None] + jnp.arange(size)[None, None]).reshape(
            len(anchors_BA), -1
        )
        x_BTD, after = embedded_BTD * config.embedding_scale, []
        for i, (layer, rope, cache) in enumerate(
            zip(self.layer, self._ropes(positions_BT), caches, strict=True)
        ):
            window = config.layer.window_of(i)
            visible = BlockVisibility(
                anchors_BA=anchors_BA,
                first_BA=first_BA,
                block_size=size,
                window=window,
                both_ways=config.windows_both_ways if window is not None else not config.causal,
            )
            x_BTD, cache = layer(x_BTD, first_BA[:, 0], rope, cache, visible)
            after.append(cache)
        return self.final_norm(x_BTD), tuple(after)

    def correct(
        self, logits_BU: Array, x_BD: Array, token_B: Array, state: Any
    ) -> tuple[Array, Any]:
        return self.correction(logits_BU, x_BD, token_B, state)

    def confidence(self, x_BD: Array, token_B: Array) -> Array:
        return self.correction.confidence(x_BD, token_B)

    def everything(self, hidden: tuple[Array, ...], start_B: Array) -> Array:
        config = self.config
        self.fuse(hidden)
        embedded_BTD = jnp.zeros(
            (1, config.block_size, config.layer.width), config.layer.compute_dtype
        )
        anchors_BA = start_B[:, None]
        caches = BlockHead(config).init_cache(1, config.block_size)
        x_BTD, _ = self(embedded_BTD, anchors_BA, anchors_BA, caches)
        if self.correction is not None:
            token_B, logits_BU = jnp.zeros((1,), jnp.int32), jnp.zeros((1, config.num_outputs))
            self.correction(logits_BU, x_BTD[:, 0], token_B, self.correction.begin(1))
            if config.confidence is not None:
                self.correction.confidence(x_BTD[:, 0], token_B)
        return x_BTD

    def _ropes(self, positions_BT: Array) -> list[tuple[Array, Array]]:
        layer = self.config.layer
        kinds = [layer.rotary_of(layer.window_of(i)) for i in range(layer.num_layers)]
        angles = {kind: kind.angles(positions_BT) for kind in dict.fromkeys(kinds)}
        return [angles[kind] for kind in kinds]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadConfig):
    """The shape of a DFlash head; of ``layer`` the number of layers, the windows and the soft cap
    of logits count too.

    Attributes:
      block_size: b, the rows of a block. A head works with the size that it was trained with only.
      mask_id: the token of the rows behind the first.
      from_anchor: row k predicts the token behind its own position, and the first row, of the
        pending token, drafts too; False: rows from the second on predict the tokens of their own
        positions.
      causal: rows of layers without a window do not see the rows behind them.
      windows_both_ways: rows of layers with a window see all rows of their block; False: those
        before them.
      embedding_scale, output_scale: multiply embedded tokens, and logits before the soft cap.
    """

    block_size: int
    mask_id: int
    from_anchor: bool = False
    causal: bool = False
    windows_both_ways: bool = False
    embedding_scale: float = 1.0
    output_scale: float = 1.0

    module = BlockModule
    kind = "DFlash"
    fused = ("fc",)
    drafts_blocks = True
    least = {"mask_id": 0}
    # What the log-odds of acceptance are made of; None: there are none.
    confidence = None

    def __post_init__(self):
        validate.integer("block_size", self.block_size, 1 if self.from_anchor else 2)
        validate.integer("mask_id", self.mask_id, 0, self.layer.vocab_size)
        super().__post_init__()
        if self.causal and self.windows_both_ways:
            raise ValueError(
                "causal = True with windows_both_ways = True: a block is causal or sees both ways"
            )
        if self.windows_both_ways and self.layer.window is None:
            raise ValueError(
                "windows_both_ways = True, but the layers have no window: set window, or leave it "
                "False"
            )

    def head(self) -> BlockHead:
        return BlockHead(self)

    def correction(self) -> Correction | None:
        """Returns the module that corrects logits; None: tokens are independent."""
        return None

    def around(self) -> nn.Module | None:
        """Returns a module that is called on the input of a part of a layer.

        It returns the new input, and a function of the part's output. None: there is no such
        module.
        """
        return None

    @classmethod
    def usual_layers(cls, target_layers: int) -> tuple[int, ...]:
        """Returns five layers from the second to the fourth last, as in DFlash; with fewer than
        eight layers some twice.
        """
        return tuple(round(1 + i * (target_layers - 4) / 4) for i in range(5))

    @property
    def first_row(self) -> int:
        """Returns the row that predicts the first token of a draft."""
        return 0 if self.from_anchor else 1

    @property
    def max_tokens(self) -> int:
        return self.block_size - self.first_row


@dataclasses.dataclass(frozen=True)
class BlockHead(Head):
    """A head that drafts a block in one call."""

    config: BlockConfig

    def init_cache(self, batch: int, slots: int) -> Caches:
        """Returns an empty cache for each layer."""
        caches = tuple(self._empty_layer(batch, slots) for _ in range(self.config.layer.num_layers))
        return self.layout.place_cache(self.cache_axes(), caches)

    def cache_axes(self) -> Caches:
        """Returns the logical axis names of `init_cache`'s result."""
        return (self._layer_axes(),) * self.config.layer.num_layers

    def read(self, weights: Any, features_BTD: Array, start_B: Array, caches: Caches) -> Caches:
        """Writes the context of positions ``start_B ..``, from `fuse`; slots and positions are the
        same.
        """
        features_BTD, start_B = self.layout.on_all_devices((features_BTD, start_B))
        caches = self._apply("read", weights, features_BTD, start_B, caches)
        return self.layout.place_cache(self.cache_axes(), caches)

    def __call__(
        self, weights: Any, embedded_BTD: Array, anchors_BA: Array, first_BA: Array, caches: Caches
    ) -> tuple[Array, Caches]:
        """Runs A blocks of each sequence; returns their rows ``[B, A b, D]`` behind the final norm.

        Args:
          embedded_BTD: the pending token and mask tokens of each block, ``[B, A b, D]``.
          anchors_BA: the positions of the pending tokens. A block sees the context before it.
          first_BA: the slots that the blocks are written in, the blocks of a sequence one after the
            other.
        """
        embedded_BTD = embedded_BTD.astype(self.config.layer.compute_dtype)
        return self._run("__call__", weights, (embedded_BTD, anchors_BA, first_BA), caches)

    def embed_blocks(
        self,
        weights: Any,
        target: LayeredModel,
        target_weights: Any,
        pending_B: Array,
        positions_B: Array,
    ) -> Array:
        """Returns the embedded rows ``[B, b, D]`` of blocks that begin with the pending tokens, at
        these positions.

        Nothing is written in the target's cache: a block may be longer than the room behind a text.
        """
        masks_BX = jnp.full(
            (len(pending_B), self.config.block_size - 1), self.config.mask_id, jnp.int32
        )
        tokens_Bb = jnp.concatenate([pending_B[:, None].astype(jnp.int32), masks_BX], axis=1)
        return self.embed_tokens(weights, target, target_weights, tokens_Bb, positions_B)

    def run_in_texts(
        self,
        weights: Any,
        target: LayeredModel,
        target_weights: Any,
        tokens_BT: Array,
        anchors_BA: Array,
        caches: Caches,
    ) -> Array:
        """Runs A blocks of each text in one call, each behind the context before its anchor.

        Args:
          tokens_BT: the texts.
          anchors_BA: the positions of the tokens that begin blocks.
          caches: have read the texts, and have room for all blocks behind them.

        Returns:
          The rows that draft, ``[B, A, S, D]``.
        """
        batch, length = tokens_BT.shape
        size = self.config.block_size
        pending_BA = jnp.take_along_axis(tokens_BT, anchors_BA, axis=1)
        embedded_NbD = self.embed_blocks(
            weights, target, target_weights, pending_BA.reshape(-1), anchors_BA.reshape(-1)
        )
        embedded_BTD = embedded_NbD.reshape(batch, -1, embedded_NbD.shape[-1])
        first_A = length + size * jnp.arange(anchors_BA.shape[1])
        first_BA = jnp.broadcast_to(first_A[None], anchors_BA.shape)
        rows_BTD, _ = self(weights, embedded_BTD, anchors_BA, first_BA, caches)
        rows_BASD = rows_BTD.reshape(*anchors_BA.shape, size, -1)
        return rows_BASD[:, :, self.config.first_row :]

    def logits(
        self,
        weights: Any,
        features_BTD: Array,
        of_target: Callable[[Array], Array],
        offset: Array | int = 0,
    ) -> Array:
        """Returns float32 logits ``[B, T, U]`` of rows, without correction; see `Head.logits`."""
        logits_BTU = super().logits(weights, features_BTD, of_target, offset)
        config = self.config
        if config.output_scale != 1:
            logits_BTU = logits_BTU * config.output_scale
        return (
            logits_BTU
            if config.layer.logit_cap is None
            else soft_cap(logits_BTU, config.layer.logit_cap)
        )

    def begin(self, weights: Any, batch: int) -> Any:
        """Returns the state of the correction before the first token, () without a correction."""
        correction = self.config.correction()
        return () if correction is None else correction.begin(batch)

    def correct(
        self, weights: Any, logits_BU: Array, x_BD: Array, token_B: Array, state: Any
    ) -> tuple[Array, Any]:
        """Corrects the logits of one row, given the token before; see `Correction`. Without one
        they stay.
        """
        if self.config.correction() is None:
            return logits_BU, state
        token_B, state = self.layout.on_all_devices((token_B, state))
        logits_BU, state = self._apply("correct", weights, logits_BU, x_BD, token_B, state)
        return self.layout.by_rows(logits_BU[:, None])[:, 0], state

    def confidence(self, weights: Any, x_BD: Array, token_B: Array) -> Array:
        """Returns the log-odds ``[B]`` float32 that the token of a row will be accepted, before it
        is drawn.
        """
        return self._apply("confidence", weights, x_BD, token_B)
