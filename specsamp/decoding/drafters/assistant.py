"""Drafts with an assistant of Gemma 4, which attends to the target's caches.

A round takes K calls of one position.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specsamp.decoding.drafters.feature import HeadDrafter
from specsamp.models.assistant import AssistantHead
from specsamp.sampling.rules import take_row

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class AssistantDrafter(HeadDrafter):
    """Drafts K tokens with ``head``, an assistant made for ``target``.

    Its state is the target's hidden state before the last token, ``[B, W]``; a text of one token
    has none, and nothing is drafted after it.
    """

    head: AssistantHead

    def init(self, batch, slots):
        config = self.head.config
        return jnp.zeros((batch, config.target_width), config.layer.compute_dtype)

    def read(self, weights, state, chunk, cache):
        features_BTW = self.head.fuse(weights.draft, chunk.output.hidden)
        row_B = chunk.lengths_B - 2 - chunk.start_B
        here_B = (row_B >= 0) & (row_B < features_BTW.shape[1])
        feature_BW = self._take(features_BTW, jnp.where(here_B, row_B, 0))
        return jnp.where(here_B[:, None], feature_BW, state), cache

    def propose(self, weights, state, prefix, cache, sample):
        lengths_B = prefix.lengths_B

        def step(offset, token_B, carry):
            cache, feature_B1W = carry
            at_B = lengths_B - 1 + offset
            embedded_B1W, cache = self._embed(weights, token_B[:, None], at_B, cache)
            # A text of one token has nothing to attend to; its draft does not count.
            longer_B = jnp.maximum(lengths_B, 2)
            feature_B1W, logits_B1V = self.head(
                weights.draft, embedded_B1W, feature_B1W, longer_B, cache
            )
            return logits_B1V[:, 0], (cache, feature_B1W)

        carry = cache, state[:, None]
        logits_BV, carry = step(0, prefix.pending_B1[:, 0], carry)
        draft, (cache, _) = sample.chain(self.K, logits_BV, step, carry)
        return draft.only_in(lengths_B >= 2), state, cache

    def commit(self, weights, state, scored, cache):
        features_BTW = self.head.fuse(weights.draft, scored.output.hidden)
        return self._take(features_BTW, scored.verdict.num_accepted_B), cache

    def _take(self, features_BTW: Array, row_B: Array) -> Array:
        row_B = self.head.layout.on_all_devices(row_B)
        return take_row(features_BTW, row_B)
