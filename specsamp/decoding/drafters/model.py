"""A draft language model proposes K tokens, one call each."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.decoding.tokens import gather_tokens, write_tokens
from specsamp.decoding.types import Draft, LanguageModel, Output, Sampler, Verdict, Weights
from specsamp.models.interface import check_logits

Array = jax.Array
_Carry = tuple[Any, Array, Array | None]  # draft cache, tokens, distributions


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """Drafts with ``model``, whose weights are ``weights.draft``; its state is its cache.

    Attributes:
      model: any `LanguageModel` with the target's vocabulary.
      K: tokens per round.
      window: tokens fed per call, see `Loop.window`.
    """

    model: LanguageModel
    K: int
    window: int = 1
    exact = True
    hidden_layers = ()

    def __post_init__(self):
        if self.K < 1 or self.window < 1:
            raise ValueError(f"K and window must be at least 1; got {self.K} and {self.window}")

    @property
    def first_window(self) -> int:
        """Tokens fed by a round's first call: after a full acceptance the draft has not seen its last token.

        Without the second one its cache would keep a hole there, which costs acceptance silently. If it
        was seen, feeding it again costs nothing, and shapes stay static.
        """
        return max(self.window, 2)

    def prepare(self, params: Any, slots: int) -> Any:
        return self.model.prepare(params, slots)

    def init(
        self, weights: Weights, tokens_BP: Array, lengths_B: Array, slots: int, target_output: Output, cache: Any
    ) -> tuple[Any, Any]:
        empty = self.model.init_cache(tokens_BP.shape[0], slots)
        return self.model(weights.draft, tokens_BP, jnp.zeros_like(lengths_B), empty).cache, cache

    def propose(
        self, weights: Weights, state: Any, tokens_BS: Array, lengths_B: Array, cache: Any, sample: Sampler
    ) -> tuple[Draft, Any, Any]:
        def step(carry: _Carry, offset: Array | int, width: int) -> _Carry:
            state, tokens_BS, log_probs_BKV = carry
            end_B = lengths_B + offset
            start_B = jnp.maximum(end_B - width, 0)
            output = self.model(weights.draft, gather_tokens(tokens_BS, start_B, width), start_B, state)
            last_B11 = (end_B - 1 - start_B)[:, None, None]
            check_logits("draft", self.model, output)
            logits_BV = jnp.take_along_axis(output.logits_BTV, last_B11, axis=1)[:, 0]
            tokens_B, log_probs_BV = sample(logits_BV, offset)
            if log_probs_BV is not None:
                if log_probs_BKV is None:
                    log_probs_BKV = jnp.zeros((len(tokens_BS), self.K, self.model.vocab_size), log_probs_BV.dtype)
                log_probs_BKV = jax.lax.dynamic_update_index_in_dim(log_probs_BKV, log_probs_BV, offset, axis=1)
            return output.cache, write_tokens(tokens_BS, tokens_B[:, None], end_B), log_probs_BKV

        carry = step((state, tokens_BS, None), 0, self.first_window)
        state, tokens_BS, log_probs_BKV = jax.lax.fori_loop(
            1, self.K, lambda offset, carry: step(carry, offset, self.window), carry
        )
        tokens_BK = gather_tokens(tokens_BS, lengths_B, self.K)
        num_drafted_B = jnp.full_like(lengths_B, self.K)
        return Draft(tokens_BK=tokens_BK, num_drafted_B=num_drafted_B, log_probs_BKV=log_probs_BKV), state, cache

    def commit(
        self, weights: Weights, state: Any, draft: Draft, verdict: Verdict, target_output: Output, cache: Any
    ) -> tuple[Any, Any]:
        return state, cache
