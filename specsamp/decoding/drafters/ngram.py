"""Prompt lookup: proposes the tokens that followed the last occurrence of the current n-gram in the
context.

A retrieved token is a one-hot proposal: it is accepted with the target's probability of it, and the
residual is the target's distribution without it (Leviathan et al., arXiv 2211.17192; the copying is
Saxena's prompt lookup). Copying the input of an editing task is also called aggressive decoding
(Sun et al., arXiv 2106.04970). At the end of the context the copy goes on with the tokens that it
has just copied, so that a repetition of any period continues for all K tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specsamp import validate
from specsamp.decoding.drafter import Drafter, DrafterHooks, Prefix, Proposal
from specsamp.decoding.sampler import Sampler
from specsamp.decoding.state import Weights
from specsamp.sampling.rules import Draft

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class NgramDrafter(DrafterHooks, Drafter):
    """Looks up the last ``max_ngram`` tokens in the sequence, then shorter n-grams.

    Attributes:
      K: tokens per round; without a match, nothing is drafted.
      max_ngram: the longest n-gram. The longest match wins, and of these the most recent.
    """

    K: int
    max_ngram: int = 3

    def __post_init__(self):
        validate.integer("K", self.K, 1)
        validate.integer("max_ngram", self.max_ngram, 1)

    @property
    def weights_key(self) -> None:
        return None

    def draft_lengths(self, state: Any, prefix: Prefix) -> Array:
        return jnp.where(self._found(prefix) > 0, self.K, 0).astype(jnp.int32)

    def propose(
        self, weights: Weights, state: Any, prefix: Prefix, cache: Any, sample: Sampler
    ) -> Proposal:
        best_B = self._found(prefix)
        period_B1 = jnp.maximum(prefix.lengths_B - best_B, 1)[:, None]
        copied_BK = jnp.arange(self.K)[None, :] % period_B1
        tokens_BK = jnp.take_along_axis(prefix.tokens_BS, best_B[:, None] + copied_BK, axis=1)
        num_drafted_B = jnp.where(best_B > 0, self.K, 0).astype(jnp.int32)
        return Draft(tokens_BK=tokens_BK, num_drafted_B=num_drafted_B), state, cache

    def _found(self, prefix: Prefix) -> Array:
        """Returns the slot after the best match, where the continuation begins, ``[B]``; 0 without
        a match.
        """
        tokens_BS, lengths_B = prefix.tokens_BS, prefix.lengths_B
        slots = tokens_BS.shape[1]
        # A match ends just before slot `end`, its continuation starts there.
        ends = jnp.arange(slots)[None, :]
        best_B = jnp.zeros_like(lengths_B)
        matches_BS = (ends >= 1) & (ends < lengths_B[:, None])
        for n in range(1, self.max_ngram + 1):
            matches_BS = self._also(n, matches_BS, prefix, ends)
            found_B = jnp.max(jnp.where(matches_BS, ends, 0), axis=1)
            best_B = jnp.where(found_B > 0, found_B, best_B)
        return best_B

    def lengths_of_matches(self, prefix: Prefix) -> Array:
        """Returns the length of the longest n-gram that matches before each slot, int32 ``[B, S]``;
        0 for none.
        """
        ends = jnp.arange(prefix.tokens_BS.shape[1])[None, :]
        matches_BS = (ends >= 1) & (ends < prefix.lengths_B[:, None])
        found_BS = jnp.zeros_like(prefix.tokens_BS)
        for n in range(1, self.max_ngram + 1):
            matches_BS = self._also(n, matches_BS, prefix, ends)
            found_BS = jnp.where(matches_BS, n, found_BS)
        return found_BS

    def _also(self, n: int, matches_BS: Array, prefix: Prefix, ends: Array) -> Array:
        """Extends matches by one token: n-grams match where the shorter n-grams match and one more
        token agrees.
        """
        last_B1 = jnp.take_along_axis(
            prefix.tokens_BS, jnp.maximum(prefix.lengths_B - n, 0)[:, None], axis=1
        )
        before_BS = jnp.pad(prefix.tokens_BS, ((0, 0), (n, 0)))[:, : prefix.tokens_BS.shape[1]]
        return matches_BS & ((before_BS == last_B1) & (ends >= n))
