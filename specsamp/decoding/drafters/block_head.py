"""A head inside the target drafts a whole block in one call (DFlash, DSpark, DFlash 2).

A round takes one call of the head with b rows, in `propose`, whatever K is; `commit` writes the
context of the K + 1 scored positions. The rows of a block lie in the slots behind the context and
are never kept.

All laws are exact, since the rule gets the distribution that each token was drawn from:

    argmax        the most probable token of each row, given the tokens before it if the head
                  corrects for them. Verified as one-hot: a token is accepted with the target's
                  probability of it
    marginals     drawn from each row's own distribution, independently of the block's other tokens
    conditional   drawn in order, each from the distribution corrected for the token before
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from specsamp import validate
from specsamp.decoding.drafter import Prefix, Weights, depth_of
from specsamp.decoding.drafters.feature import HeadDrafter
from specsamp.sampling.warp import greedy

if TYPE_CHECKING:
    from specsamp.models.dflash import BlockHead, Caches

Array = jax.Array

LAWS = ("argmax", "marginals", "conditional")


@dataclasses.dataclass(frozen=True)
class BlockDrafter(HeadDrafter):
    """Drafts the tokens of a block with ``head``; its state is the caches of the head's layers.

    Attributes:
      target: the pair's target, which embeds tokens and unembeds rows, unless the head does so
        itself.
      head: a head made for this target.
      K: tokens per round, at most those of a block. The block keeps its b rows: a shorter draft
        saves scoring alone.
      law: one of `LAWS`; None: "conditional" if the head corrects its logits, else "marginals".
      threshold: tokens from the first on whose confidence is lower are not submitted; 0: all K are.
        The confidence of a token is known before it is drawn, so this biases nothing. It saves no
        time, since K + 1 tokens are scored.
    """

    head: BlockHead
    law: str | None = None
    threshold: float = 0.0

    def __post_init__(self):
        config = self.head.config
        if self.law is None:
            law = "marginals" if config.correction() is None else "conditional"
            object.__setattr__(self, "law", law)
        validate.choice("law", self.law, LAWS)
        validate.number("threshold", self.threshold, 0, 1)
        super().__post_init__()
        if self.law == "conditional" and config.correction() is None:
            raise ValueError(
                f"law 'conditional' needs a head that corrects its logits; {config.kind} heads do "
                "not"
            )
        if self.threshold and config.confidence is None:
            raise ValueError(
                f"threshold = {self.threshold} needs a head with confidence; this {config.kind} "
                "head has none"
            )

    def init(self, batch, slots):
        # A block at the end of the longest text is longer than the loop's headroom. Without room
        # for it, JAX would move its rows back over the context.
        return self.head.init_cache(batch, slots + self.head.config.block_size)

    def read(self, weights, state, chunk, cache):
        features_BTD = self.head.fuse(weights.draft, chunk.output.hidden)
        return self.head.read(weights.draft, features_BTD, chunk.start_B, state), cache

    def propose(self, weights, state, prefix, cache, sample):
        """A prompt of one token drafts nothing in its first round: there is no context yet."""
        rows_BKD, logits_BKU, state = self._run_block(weights, state, prefix)
        if self.law == "argmax":
            sample = sample.with_warp(greedy())
        independent = self.law == "marginals" or self.head.config.correction() is None
        if independent and not self.threshold and sample.takes_rows and self.target.kernels:
            # On a TPU, one position after the other would copy the logits of all.
            draft = sample.rows(self._expand(weights, logits_BKU))
            return draft.only_in(prefix.lengths_B >= 2), state, cache

        def step(offset, token_B, carry):
            # The state of the head's correction; whether all confidences so far were high enough;
            # the tokens before the first low confidence.
            correction, goes_on_B, num_trusted_B = carry
            x_BD, logits_BU = (
                jax.lax.dynamic_index_in_dim(x, offset, axis=1, keepdims=False)
                for x in (rows_BKD, logits_BKU)
            )
            if self.threshold:
                odds_B = self.head.confidence(weights.draft, x_BD, token_B)
                goes_on_B &= jax.nn.sigmoid(odds_B) >= self.threshold
            if self.law != "marginals":
                logits_BU, correction = self.head.correct(
                    weights.draft, logits_BU, x_BD, token_B, correction
                )
            return self._expand(weights, logits_BU), (
                correction,
                goes_on_B,
                num_trusted_B + goes_on_B,
            )

        correction = self.head.begin(weights.draft, len(prefix.lengths_B))
        nothing = correction, prefix.lengths_B >= 2, jnp.zeros_like(prefix.lengths_B)
        logits_BV, carry = step(0, prefix.pending_B1[:, 0], nothing)
        draft, (_, _, num_trusted_B) = sample.chain(self.K, logits_BV, step, carry)
        num_drafted_B = jnp.minimum(draft.num_drafted_B, num_trusted_B)
        return dataclasses.replace(draft, num_drafted_B=num_drafted_B), state, cache

    def commit(self, weights, state, scored, cache):
        # Rows behind the last accepted token are stale, and the next block is written over them.
        features_BTD = self.head.fuse(weights.draft, scored.output.hidden)
        return self.head.read(
            weights.draft, features_BTD, scored.prefix.lengths_B - 1, state
        ), cache

    def _run_block(
        self, weights: Weights, state: Caches, prefix: Prefix
    ) -> tuple[Array, Array, Caches]:
        """Returns the rows of the first K tokens, their logits without correction, and
        the caches.
        """
        head, first, at_B = self.head, self.head.config.first_row, prefix.lengths_B - 1
        embedded_BTD = head.embed_blocks(
            weights.draft, self.target, weights.target, prefix.pending_B1[:, 0], at_B
        )
        at_B1 = at_B[:, None]
        rows_BTD, state = head(weights.draft, embedded_BTD, at_B1, at_B1, state)
        rows_BKD = rows_BTD[:, first : first + depth_of(self)]
        return rows_BKD, self._logits(weights, rows_BKD), state
