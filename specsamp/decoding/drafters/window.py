"""Self-drafting with a window: the target drafts, and attends to a few first and the last tokens
alone.

With long contexts or large batches a step takes longer to read caches than weights (MagicDec, arXiv
2408.11049). Attention to the first tokens, the sinks, keeps the model stable (StreamingLLM, arXiv
2309.17453). Weights and cache are the target's: there is no second model and nothing to prefill.

A round begins with a copy of the slots of these tokens, to which its draft steps add their own. The
target's cache is not written, so it holds the keys and values of scoring calls alone.
"""

import dataclasses

import jax.numpy as jnp

from specsamp import validate
from specsamp.decoding.drafter import Drafter, check_is_target, positions_of
from specsamp.decoding.drafters.early_exit import self_draft
from specsamp.models.interface import Block, LanguageModel


@dataclasses.dataclass(frozen=True)
class WindowDrafter(Drafter):
    """Drafts with the target, which attends to ``sinks + window`` tokens of the text and to the
    draft.

    In a target with relative positions the sinks get the score of the largest distance in the copy;
    ``sinks=0`` leaves them out.

    Attributes:
      model: the pair's target, ``pair.target``; a model with `LanguageModel.cut_cache`.
      K: tokens per round.
      window: the last tokens of the text before the pending token that are attended to.
      sinks: the first tokens of the text that are attended to.
    """

    model: LanguageModel
    K: int
    window: int = 512
    sinks: int = 4

    def __post_init__(self):
        validate.integer("K", self.K, 1)
        validate.integer("window", self.window, 1)
        validate.integer("sinks", self.sinks, 0)
        longest = positions_of(self.model)
        if self.sinks + self.window >= longest:
            raise ValueError(
                f"{self.sinks} sinks and a window of {self.window} are the whole context of "
                f"{longest} tokens: shorten the window"
            )

    @property
    def weights_key(self):
        return None

    def check(self, target, draft, draft_params):
        check_is_target(self.model, target)
        if target.rewind is not None:
            raise ValueError(
                "the target has recurrent layers, whose states hold all tokens: it cannot draft "
                "with a window"
            )

    def propose(self, weights, state, prefix, cache, sample):
        batch, longest = prefix.tokens_BS.shape
        sinks = min(self.sinks, longest - 1)
        window = min(self.window, longest - sinks)
        before_B = prefix.lengths_B - 1  # the pending token is not in the cache
        held_B = jnp.minimum(before_B, sinks + window)
        first_B = jnp.maximum(before_B - window, sinks)
        copy = self.model.cut_cache(cache, sinks, first_B, window, self.K)
        itself_B11 = jnp.ones((batch, 1, 1), bool)

        def call(token_B1, offset, copy):
            block = Block(
                start_B=held_B + offset,
                positions_BT=(before_B + offset)[:, None],
                visible_BTR=itself_B11,
                skipped_B=before_B - held_B,
                num_kept=sinks,
            )
            return self.model(weights.target, token_B1, block.start_B, copy, block=block)

        draft, _ = self_draft(prefix, sample, self.K, copy, call)
        return draft, state, cache
