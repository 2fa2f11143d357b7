"""Several drafters vote, or one of them is chosen (Minions, arXiv 2402.15678).

The draft is exact if it is verified under the distribution that its tokens follow. A winner that was chosen *by its
tokens* does not follow the distribution of its drafter: of two samples from (.5, .5), with ties to the lower id, the
winner follows (.75, .25). So there are two methods:

`VotingDrafter` lets all parts draft and takes the tokens with the largest weight of votes. The winner is verified as a
one-hot proposal: it is accepted with the target's probability of it, however it was chosen.

`ChoosingDrafter` chooses one part for each row from past rounds alone, before anything is sampled. So the tokens follow
the distribution of that part and are verified under it. A part that proposes nothing leaves the row to the next part:
whether a first token is drafted is known before it is sampled.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.decoding.drafter import Prefix
from specsamp.decoding.drafters.combined import CombinedDraft, CombinedDrafter, CombinedState, Memory
from specsamp.decoding.sampler import Sampler
from specsamp.decoding.state import Weights
from specsamp.sampling.rules import Draft

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class VotingDrafter(CombinedDrafter):
    """Drafts the token with the most votes, position by position, among the parts that agree with it so far; see `vote`.

    Every part drafts in every round. Use it with three or more drafters, or for greedy decoding. Of two drafters, the one
    with the larger weight always wins, and with sampled tokens `ChoosingDrafter` then loses less acceptance.

    Attributes:
      weighted: whether the vote of a part is its expected number of accepted tokens; else all votes are equal.
    """

    weighted: bool = True

    def propose(
        self, weights: Weights, state: CombinedState, prefix: Prefix, cache: Any, sample: Sampler
    ) -> tuple[CombinedDraft, CombinedState, Any]:
        drafts, memories = [], []
        all_B = jnp.ones(prefix.lengths_B.shape, bool)
        for i in range(len(self.parts)):
            draft, (*memory, cache) = self.ask(i, (*state.of_part(i), cache), weights, prefix, sample, all_B)
            drafts.append(draft)
            memories.append(memory)
        proposed_BPK = jnp.stack([draft.tokens_BK for draft in drafts], axis=1)
        num_proposed_BP = jnp.stack([draft.num_drafted_B for draft in drafts], axis=1)
        weights_BP = self.expected(state) if self.weighted else jnp.ones_like(state.rounds_BP)
        tokens_BK, num_drafted_B = vote(proposed_BPK, num_proposed_BP, weights_BP)
        draft = CombinedDraft(
            tokens_BK=tokens_BK,
            num_drafted_B=num_drafted_B,
            proposed_BPK=proposed_BPK,
            num_proposed_BP=num_proposed_BP,
        )
        return draft, state.with_parts(memories), cache


@dataclasses.dataclass(frozen=True)
class ChoosingDrafter(CombinedDrafter):
    """Drafts with the part of the most expected tokens per time; if it proposes nothing, with the next part that does.

    A part runs only if some row asks it. So put parts first that cost nothing or often propose nothing.

    Attributes:
      costs: the time of a round with each part, in any unit; None: all equal.
    """

    costs: tuple[float, ...] | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.costs is not None:
            object.__setattr__(self, "costs", tuple(self.costs))
            if len(self.costs) != len(self.parts) or not all(0 < cost < math.inf for cost in self.costs):
                raise ValueError(
                    f"costs must be {len(self.parts)} numbers above 0, one for each part; got {self.costs!r}"
                )

    def choose(self, state: CombinedState) -> Array:
        """Returns the index of the part that each row asks first, int32 ``[B]``, from past rounds alone."""
        costs_P = jnp.asarray(self.costs or (1.0,) * len(self.parts), jnp.float32)
        return jnp.argmax((1 + self.expected(state)) / costs_P[None, :], axis=1).astype(jnp.int32)

    def propose(
        self, weights: Weights, state: CombinedState, prefix: Prefix, cache: Any, sample: Sampler
    ) -> tuple[CombinedDraft, CombinedState, Any]:
        first_B = self.choose(state)
        wants_B = jnp.ones(first_B.shape, bool) if sample.draft_lengths_B is None else sample.draft_lengths_B > 0
        draft, memories = self._no_draft(weights, state, prefix, cache, sample), []
        for i in range(len(self.parts)):
            asks_B = wants_B & (first_B <= i) & (draft.num_drafted_B == 0)

            def ask(carry: tuple[Draft, Memory], i: int = i, asks_B: Array = asks_B) -> tuple[Draft, Memory]:
                draft, memory = carry
                proposed, memory = self.ask(i, memory, weights, prefix, sample, asks_B)
                return _select(draft, proposed, i, asks_B & (proposed.num_drafted_B > 0)), memory

            memory = *state.of_part(i), cache
            draft, (*memory, cache) = _run_if(sample.any(asks_B), ask, (draft, memory))
            memories.append(memory)
        return draft, state.with_parts(memories), cache

    def _no_draft(
        self, weights: Weights, state: CombinedState, prefix: Prefix, cache: Any, sample: Sampler
    ) -> CombinedDraft:
        """Returns a draft without tokens, with an array for distributions if any part returns distributions."""
        batch, P, K = len(prefix.lengths_B), len(self.parts), self.K
        asks_B = jnp.ones(batch, bool)

        def ask(i: int) -> Array | None:
            return self.ask(i, (*state.of_part(i), cache), weights, prefix, sample, asks_B)[0].log_probs_BRV

        shapes = [jax.eval_shape(functools.partial(ask, i)) for i in range(P)]
        known = [shape for shape in shapes if shape is not None]
        return CombinedDraft(
            tokens_BK=jnp.zeros((batch, K), jnp.int32),
            num_drafted_B=jnp.zeros((batch,), jnp.int32),
            log_probs_BRV=jnp.zeros(known[0].shape, jnp.result_type(*known)) if known else None,
            proposed_BPK=jnp.zeros((batch, P, K), jnp.int32),
            num_proposed_BP=jnp.zeros((batch, P), jnp.int32),
        )


def vote(proposed_BPK: Array, num_proposed_BP: Array, weights_BP: Array) -> tuple[Array, Array]:
    """Returns the sequence of tokens with the most votes at every position, and its length.

    A part votes for its next token as long as all its earlier tokens were elected. Ties go to the first part. The result
    is the beginning of one part's proposal.

    Args:
      proposed_BPK: int32, the tokens of P parts.
      num_proposed_BP: int32, the number of tokens of each part.
      weights_BP: float32, the votes of each part, at least 0.

    Returns:
      ``tokens_BK`` and ``num_drafted_B``, int32.
    """

    def elect(agrees_BP: Array, at: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        tokens_BP, has_token_BP = at
        votes_BP = agrees_BP & has_token_BP
        supports_BPP = votes_BP[:, None, :] & (tokens_BP[:, :, None] == tokens_BP[:, None, :])
        support_BP = jnp.sum(jnp.where(supports_BPP, weights_BP[:, None, :], 0), axis=2)
        winner_B1 = jnp.argmax(jnp.where(votes_BP, support_BP, -1), axis=1)[:, None]
        token_B1 = jnp.take_along_axis(tokens_BP, winner_B1, axis=1)
        return votes_BP & (tokens_BP == token_B1), (token_B1[:, 0], votes_BP.any(axis=1))

    has_token_KBP = jnp.arange(proposed_BPK.shape[2])[:, None, None] < num_proposed_BP[None]
    all_BP = jnp.ones(num_proposed_BP.shape, bool)
    _, (tokens_KB, elected_KB) = jax.lax.scan(elect, all_BP, (jnp.moveaxis(proposed_BPK, 2, 0), has_token_KBP))
    return tokens_KB.T, jnp.sum(elected_KB, axis=0, dtype=jnp.int32)


def _run_if(is_needed: Array, function: Callable[[Any], Any], carry: Any) -> Any:
    """Applies a function if ``is_needed``, in a loop of at most one turn: the branches of `lax.cond` would copy caches."""

    def once(state: tuple[Array, Any]) -> tuple[Array, Any]:
        return jnp.zeros_like(state[0]), function(state[1])

    return jax.lax.while_loop(lambda state: state[0], once, (is_needed, carry))[1]


def _select(draft: CombinedDraft, proposed: Draft, i: int, takes_B: Array) -> CombinedDraft:
    """Returns the draft with part i's proposal, and its distributions, in the rows that take it."""
    takes_B1 = takes_B[:, None]
    log_probs_BRV = draft.log_probs_BRV
    if log_probs_BRV is not None:
        own_BRV = proposed.log_probs_BRV
        if own_BRV is None:  # another part has distributions: write the one-hot ones out
            is_token_BRV = jnp.arange(log_probs_BRV.shape[2])[None, None, :] == proposed.tokens_BK[:, :, None]
            own_BRV = jnp.where(is_token_BRV, 0.0, -jnp.inf)
        log_probs_BRV = jnp.where(takes_B1[:, :, None], own_BRV, log_probs_BRV).astype(log_probs_BRV.dtype)
    num_B = jnp.where(takes_B, proposed.num_drafted_B, 0).astype(jnp.int32)
    return CombinedDraft(
        tokens_BK=jnp.where(takes_B1, proposed.tokens_BK, draft.tokens_BK),
        num_drafted_B=jnp.where(takes_B, num_B, draft.num_drafted_B),
        log_probs_BRV=log_probs_BRV,
        proposed_BPK=draft.proposed_BPK.at[:, i].set(proposed.tokens_BK),
        num_proposed_BP=draft.num_proposed_BP.at[:, i].set(num_B),
    )
