"""A draft model that was trained to draft in one call: PARD (An et al., arXiv 2504.18583).

Mask tokens are written behind the text. One causal call reads the last K + 1 known tokens, some of
them again, and K - 1 masks. Its last K positions give the distributions of K tokens, each
independent of the other drafted tokens. The next call overwrites the masks' entries in the cache.
Where a text is read on, masks are read over (``looks_ahead``).
"""

import dataclasses

import jax.numpy as jnp

from specsamp import validate
from specsamp.decoding.drafter import positions_of
from specsamp.decoding.drafters.model import ModelDrafter
from specsamp.decoding.state import gather_tokens, write_tokens
from specsamp.models.interface import check_logits
from specsamp.sampling.rules import take_row
from specsamp.sampling.warp import greedy

LAWS = ("argmax", "marginals")


@dataclasses.dataclass(frozen=True)
class ParallelDrafter(ModelDrafter):
    """Drafts K tokens with one call of ``model``.

    Attributes:
      mask_id: the mask token of the model's training.
      law: "marginals" draws each token from its own distribution; "argmax" takes the most probable
        tokens, verified as one-hot.
      masked: slots behind the text that may hold masks of longer drafts.
    """

    mask_id: int = dataclasses.field(kw_only=True)
    law: str = dataclasses.field(default="marginals", kw_only=True)
    masked: int = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        validate.integer("mask_id", self.mask_id, 0, self.model.vocab_size)
        validate.choice("law", self.law, LAWS)
        validate.integer("masked", self.masked, 0)

    @property
    def first_window(self) -> int:
        """Returns the most tokens of a round, of this or a longer draft: in their slots the cache
        may hold masks.
        """
        return max(self.masked, self.K) + 1

    @property
    def looks_ahead(self):
        """Returns how many slots before the last two may hold masks."""
        return self.first_window - 2

    def of_length(self, K):
        """Returns the drafter of shorter drafts, which reads over the masks of longer ones."""
        return dataclasses.replace(self, K=K, masked=max(self.masked, self.K))

    def init(self, batch, slots):
        return self.model.init_cache(batch, max(slots, self._width))

    @property
    def _width(self) -> int:
        """Returns the number of tokens of a call."""
        return self.first_window + self.K - 1

    def propose(self, weights, state, prefix, cache, sample):
        lengths_B, width = prefix.lengths_B, self._width
        batch, slots = prefix.tokens_BS.shape
        tokens_BS = jnp.pad(prefix.tokens_BS, ((0, 0), (0, max(width - slots, 0))))
        masks_BK = jnp.full((batch, self.K), self.mask_id, tokens_BS.dtype)
        start_B = jnp.maximum(lengths_B - self.first_window, 0)
        tokens_BT = gather_tokens(write_tokens(tokens_BS, masks_BK, lengths_B), start_B, width)
        output = self.model(weights.draft, tokens_BT, start_B, state)
        check_logits("draft", self.model, output)
        last_B = lengths_B - 1 - start_B  # the row of the last known token
        if self.law == "argmax":
            sample = sample.with_warp(greedy())

        def step(offset, token_B, carry):
            return take_row(output.logits_BTV, last_B + offset), carry

        draft, _ = sample.chain(self.K, step(0, None, ())[0], step, ())
        return draft, output.cache, cache

    def check(self, target, draft, draft_params):
        super().check(target, draft, draft_params)
        most = positions_of(self.model)
        if 2 * self.K > most:
            raise ValueError(
                f"K = {self.K} reads {2 * self.K} tokens per call, more than the draft's {most} "
                "positions"
            )
