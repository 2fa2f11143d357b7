"""Drafts with an assistant of Gemma 4, which attends to the target's caches.

A round takes K calls of one position. The state is the target's hidden state before the last token
of the text.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specsamp import validate
from specsamp.decoding.drafter import Prefix, PromptChunk, Proposal, ScoredRound
from specsamp.decoding.drafters.feature import HeadDrafter
from specsamp.decoding.sampler import Drawn, Sampler
from specsamp.decoding.state import Weights
from specsamp.decoding.tokens import gather_tokens
from specsamp.models.assistant import AssistantHead

Array = jax.Array
_Carry = tuple[Any, Array, Array, Array]  # the target's cache, features, logits, tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AssistantState:
    """The state of an assistant for each row, between rounds."""

    feature_BW: Array  # the target's hidden state before the last token
    ready_B: Array  # bool, whether there is one: a text of one token has none


@dataclasses.dataclass(frozen=True)
class AssistantDrafter(HeadDrafter):
    """Drafts K tokens with ``head``, an assistant made for ``target``."""

    head: AssistantHead

    def __post_init__(self):
        validate.integer("K", self.K, 1)

    def init(self, batch: int, slots: int) -> AssistantState:
        config = self.head.config
        return AssistantState(
            feature_BW=jnp.zeros((batch, config.target_width), config.layer.compute_dtype),
            ready_B=jnp.zeros((batch,), bool),
        )

    def read(self, weights: Weights, state: Any, chunk: PromptChunk, cache: Any) -> tuple[Any, Any]:
        features_BTW = self.head.fuse(weights.draft, chunk.output.hidden)
        row_B = chunk.lengths_B - 2 - chunk.start_B
        here_B = (row_B >= 0) & (row_B < features_BTW.shape[1])
        feature_BW = self._take(features_BTW, jnp.where(here_B, row_B, 0))
        return AssistantState(
            feature_BW=jnp.where(here_B[:, None], feature_BW, state.feature_BW),
            ready_B=chunk.lengths_B >= 2,
        ), cache

    def propose(
        self, weights: Weights, state: Any, prefix: Prefix, cache: Any, sample: Sampler
    ) -> Proposal:
        lengths_B = prefix.lengths_B
        tokens_BK = jnp.zeros((len(lengths_B), self.K), jnp.int32)

        def call(token_B1: Array, feature_B1W: Array, offset: Array | int, cache: Any) -> Any:
            at_B = lengths_B - 1 + offset
            embedded_B1W, cache = self._embed(weights, token_B1, at_B, cache)
            # A text of one token has nothing to attend to; its draft does not count.
            longer_B = jnp.maximum(lengths_B, 2)
            return cache, *self.head(weights.draft, embedded_B1W, feature_B1W, longer_B, cache)

        def draw(offset: Array | int, carry: _Carry, drawn: Drawn) -> tuple[_Carry, Drawn]:
            cache, feature_B1W, logits_B1V, tokens_BK = carry
            token_B, drawn = sample.draw(logits_B1V[:, 0], offset, drawn, self.K)
            tokens_BK = jax.lax.dynamic_update_index_in_dim(tokens_BK, token_B, offset, axis=1)
            return (cache, feature_B1W, logits_B1V, tokens_BK), drawn

        def step(offset: Array, carry: _Carry, drawn: Drawn) -> tuple[_Carry, Drawn]:
            cache, feature_B1W, _, tokens_BK = carry
            token_B1 = jax.lax.dynamic_slice_in_dim(tokens_BK, offset - 1, 1, axis=1)
            return draw(offset, (*call(token_B1, feature_B1W, offset, cache), tokens_BK), drawn)

        pending_B1 = gather_tokens(prefix.tokens_BS, lengths_B - 1, 1)
        carry = *call(pending_B1, state.feature_BW[:, None], 0, cache), tokens_BK
        (cache, _, _, tokens_BK), drawn = sample.chain(self.K, draw, step, carry)
        draft = sample.draft(tokens_BK, drawn)
        num_drafted_B = jnp.where(state.ready_B, draft.num_drafted_B, 0)
        return dataclasses.replace(draft, num_drafted_B=num_drafted_B), state, cache

    def commit(
        self, weights: Weights, state: Any, scored: ScoredRound, cache: Any
    ) -> tuple[Any, Any]:
        features_BTW = self.head.fuse(weights.draft, scored.output.hidden)
        feature_BW = self._take(features_BTW, scored.verdict.num_accepted_B)
        return AssistantState(feature_BW=feature_BW, ready_B=jnp.ones_like(state.ready_B)), cache

    def _take(self, features_BTW: Array, row_B: Array) -> Array:
        row_B = self.head.layout.on_all_devices(row_B)
        return jnp.take_along_axis(features_BTW, row_B[:, None, None], axis=1)[:, 0]
