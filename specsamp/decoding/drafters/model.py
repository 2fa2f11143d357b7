"""A draft language model proposes K tokens, one call each."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specsamp import validate
from specsamp.decoding.drafter import Drafter, DrafterHooks, Weights
from specsamp.decoding.state import gather_tokens, write_tokens
from specsamp.models.interface import LanguageModel, check_logits
from specsamp.sampling.rules import take_row

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ModelDrafter(DrafterHooks, Drafter):
    """Drafts with ``model``, whose weights are ``weights.draft``; its state is its cache.

    Attributes:
      model: any `LanguageModel` with the target's vocabulary.
      K: tokens per round.
    """

    model: LanguageModel
    K: int

    def __post_init__(self):
        validate.integer("K", self.K, 1)

    falls_behind = True

    @property
    def draft_model(self):
        return self.model

    @property
    def max_positions(self):
        return self.model.max_positions

    @property
    def weights_key(self):
        return self.model

    @property
    def first_window(self) -> int:
        """Returns the number of tokens that a round's first call feeds.

        After a round that accepted all K tokens, the draft model has not read the last of them.
        Without this token its cache would have a hole, which lowers acceptance silently. So the
        first call always feeds the token before the pending token too: if the draft model has read
        it already, this costs nothing, and shapes stay static.
        """
        return 2

    def check(self, target, draft, draft_params):
        if self.model.vocab_size != target.vocab_size:
            raise ValueError(
                f"draft vocabulary {self.model.vocab_size} != target vocabulary "
                f"{target.vocab_size}: use a draft trained with the target's tokenizer, or a pair "
                "with a vocabulary, which maps the shared tokens"
            )
        if self.model.rewind is not None and type(self) is not ModelDrafter:
            raise ValueError(
                f"a draft model with recurrent layers drafts with a ModelDrafter, not with a "
                f"{type(self).__name__}"
            )
        if draft_params is None:
            raise ValueError(f"a {type(self).__name__} needs the pair's draft_params")
        if draft not in (None, self.model):
            raise ValueError(
                "the drafter's model is not the pair's draft model, whose parameters it would use: "
                f"{self.model!r} and {draft!r}; make the pair with the model that drafts"
            )

    def prepare(self, params):
        return self.model.prepare(params)

    def fit_slots(self, weights, slots):
        return self.model.fit_slots(weights, slots)

    def init(self, batch, slots):
        return self.model.init_cache(batch, slots)

    def read(self, weights, state, chunk, cache):
        options = self.model.with_lengths(chunk.lengths_B)
        return self.model(
            weights.draft, chunk.tokens_BT, chunk.start_B, state, **options
        ).cache, cache

    def last_logits(
        self, weights: Weights, state: Any, tokens_BS: Array, end_B: Array, width: int
    ) -> tuple[Array, Any]:
        """Reads the ``width`` tokens before ``end_B``; returns the logits after the last token,
        ``[B, V]``, and the state.
        """
        start_B = jnp.maximum(end_B - width, 0)
        output = self.model(weights.draft, gather_tokens(tokens_BS, start_B, width), start_B, state)
        check_logits("draft", self.model, output)
        return take_row(output.logits_BTV, end_B - 1 - start_B), output.cache

    def propose(self, weights, state, prefix, cache, sample):
        lengths_B = prefix.lengths_B

        def step(offset, token_B, carry):
            state, tokens_BS = carry
            end_B = lengths_B + offset
            tokens_BS = write_tokens(tokens_BS, token_B[:, None], end_B - 1)
            logits_BV, state = self.last_logits(weights, state, tokens_BS, end_B, 1)
            return logits_BV, (state, tokens_BS)

        logits_BV, state = self.last_logits(
            weights, state, prefix.tokens_BS, lengths_B, self.first_window
        )
        draft, (state, _) = sample.chain(self.K, logits_BV, step, (state, prefix.tokens_BS))
        return draft, state, cache
