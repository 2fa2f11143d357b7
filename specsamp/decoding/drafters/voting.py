"""Several drafters vote, or one of them is chosen (Minions, arXiv 2402.15678).

A draft is exact if it is verified under the distribution that its tokens follow. A winner that was chosen *by its tokens*
does not follow the distribution of its drafter: of two samples from (.5, .5), with ties to the lower id, the winner
follows (.75, .25). So there are two methods:

`VotingDrafter` lets all parts draft and takes the tokens with the most votes. The winner is verified as a one-hot
proposal: it is accepted with the target's probability of it, however it was chosen.

`ChoosingDrafter` chooses a part for each row from past rounds alone, before anything is sampled. So the tokens are
verified under the distribution of that part. If the part proposes nothing, the next part drafts: whether a first token
is drafted is known before it is sampled.

Each part has its own state, weights and counts. After a round with another draft, the state of a part lacks the emitted
tokens. ``seen_BP`` counts the tokens that the state covers, and the part reads the missing tokens before it drafts again
(`specsamp.decoding.drafter.catch_up`).

An emitted token counts for every part that proposed it and all tokens before it. The counts decay, so that after a long
pause a part is expected to do well again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specsamp import validate
from specsamp.decoding.drafter import Drafter, DrafterHooks, Prefix, catch_up, hooks_of, with_length
from specsamp.decoding.sampler import Sampler
from specsamp.decoding.state import Weights
from specsamp.models.interface import LanguageModel, Output
from specsamp.sampling.rules import Draft, Verdict

Array = jax.Array
Memory = tuple[Any, Array, Any]  # a part's state, the tokens of each row that it covers, the target's cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CombinedState:
    """State of P drafters for each row, between rounds."""

    parts: tuple[Any, ...]  # the state of each drafter
    seen_BP: Array  # int32, the tokens that it covers; used for parts that fall behind
    accepted_BP: Array  # float32, emitted tokens that the part had proposed, with decay
    rounds_BP: Array  # float32, rounds in which it proposed tokens, with decay

    def of_part(self, i: int) -> tuple[Any, Array]:
        """Returns the state of part i and the tokens that it covers."""
        return self.parts[i], self.seen_BP[:, i]

    def with_parts(self, memories: Sequence[tuple[Any, Array]]) -> CombinedState:
        """Returns this state with `of_part` of all parts replaced."""
        parts, seen = zip(*memories)
        return dataclasses.replace(self, parts=parts, seen_BP=jnp.stack(seen, axis=1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CombinedDraft(Draft):
    """The draft that is verified, and the proposals of P drafters."""

    proposed_BPK: Array  # int32
    num_proposed_BP: Array  # int32 in [0, K]; 0 for parts that did not draft


@dataclasses.dataclass(frozen=True)
class CombinedDrafter(DrafterHooks, Drafter):
    """Holds drafters of chains with the same K, and counts their accepted tokens; subclasses combine the drafts.

    Parts with parameters share ``Pair.draft_params``. Parts with different models need a pair without a draft model and
    without a head, whose ``draft_params`` are a tuple with one entry for each part: None for a part without parameters.
    """

    parts: tuple[Drafter, ...]

    trust = 0.3  # rounds that the initial expectation counts for: that all K tokens of a part are accepted
    decay = 0.9  # of the counts of earlier rounds, in every round

    def __post_init__(self):
        if isinstance(self.parts, list):
            object.__setattr__(self, "parts", tuple(self.parts))
        if not isinstance(self.parts, tuple) or not self.parts or not all(isinstance(i, Drafter) for i in self.parts):
            raise ValueError(
                f"parts must be drafters, such as (NgramDrafter(4), ModelDrafter(model, 4)); got {self.parts!r}"
            )
        lengths = [part.K for part in self.parts]
        if len(set(lengths)) > 1 or lengths[0] < 1:
            raise ValueError(
                f"the parts' K must be equal and at least 1; got {lengths}: make all parts with the same K"
            )
        trees = [type(part).__name__ for part in self.parts if hooks_of(part).depth is not None]
        if trees:
            raise ValueError(f"parts must draft chains; {trees[0]} drafts a tree: leave it out")

    @property
    def K(self) -> int:
        return self.parts[0].K

    @property
    def exact(self) -> bool:
        return all(part.exact for part in self.parts)

    @property
    def row_independent(self) -> bool:
        return all(hooks_of(part).row_independent for part in self.parts)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Returns the layers that any part reads; `read` and `commit` of a part get only its own."""
        return tuple(sorted({layer for part in self.parts for layer in part.hidden_layers}))

    @property
    def max_positions(self) -> int | None:
        return min((part.max_positions for part in self.parts if part.max_positions is not None), default=None)

    @property
    def weights_key(self) -> tuple:
        return tuple((type(part), part.weights_key) for part in self.parts)

    def of_length(self, K: int) -> CombinedDrafter:
        return dataclasses.replace(self, parts=tuple(with_length(part, K) for part in self.parts))

    def draft_lengths(self, state: CombinedState, prefix: Prefix) -> Array | None:
        able = [hooks_of(part).draft_lengths(own, prefix) for part, own in zip(self.parts, state.parts)]
        return None if any(able_B is None for able_B in able) else functools.reduce(jnp.maximum, able)

    def check(self, target: LanguageModel, draft: LanguageModel | None, draft_params: Any) -> None:
        takers = {(type(part), part.weights_key) for part in self.parts if type(part).prepare is not Drafter.prepare}
        count = len(self.parts)
        if isinstance(draft_params, tuple):
            if draft is not None or len(draft_params) != count:
                raise ValueError(
                    f"draft_params are a tuple of {len(draft_params)} for {count} drafters: give one entry for each, None "
                    "for those without, and leave out the pair's draft"
                )
        elif len(takers) > 1:
            raise ValueError(
                f"{len(takers)} of the drafters have different parameters: make draft_params a tuple of {count}, and leave "
                "out the pair's draft and head"
            )
        for part, own in zip(self.parts, self._own_params(draft_params)):
            part.check(target, draft, own)

    def prepare(self, params: Any) -> tuple[Any, ...]:
        return tuple(part.prepare(own) for part, own in zip(self.parts, self._own_params(params)))

    def fit_slots(self, weights: tuple[Any, ...], slots: int) -> tuple[Any, ...]:
        return tuple(part.fit_slots(own, slots) for part, own in zip(self.parts, weights))

    def init(self, batch: int, slots: int) -> CombinedState:
        nothing_BP = jnp.zeros((batch, len(self.parts)), jnp.float32)
        return CombinedState(
            parts=tuple(part.init(batch, slots) for part in self.parts),
            seen_BP=nothing_BP.astype(jnp.int32),
            accepted_BP=nothing_BP,
            rounds_BP=nothing_BP,
        )

    def read(
        self,
        weights: Weights,
        state: CombinedState,
        tokens_BT: Array,
        start_B: Array,
        lengths_B: Array,
        target_output: Output,
        cache: Any,
    ) -> tuple[CombinedState, Any]:
        parts = list(state.parts)
        for i, part in enumerate(self.parts):
            output, own = self._output_of(i, target_output), _weights_of(weights, i)
            parts[i], cache = part.read(own, parts[i], tokens_BT, start_B, lengths_B, output, cache)
        # If the state of a part did not cover the tokens before the chunk, it catches up from there when it drafts.
        end_B1 = jnp.minimum(start_B + tokens_BT.shape[1], lengths_B)[:, None]
        seen_BP = jnp.where(state.seen_BP < start_B[:, None], state.seen_BP, end_B1)
        return dataclasses.replace(state, parts=tuple(parts), seen_BP=seen_BP), cache

    def commit(
        self,
        weights: Weights,
        state: CombinedState,
        prefix: Prefix,
        draft: Draft,
        verdict: Verdict,
        output: Output,
        cache: Any,
    ) -> tuple[CombinedState, Any]:
        parts = list(state.parts)
        for i, part in enumerate(self.parts):
            own = _weights_of(weights, i), parts[i], prefix, draft, verdict, self._output_of(i, output), cache
            parts[i], cache = part.commit(*own)
        state = dataclasses.replace(state, parts=tuple(parts))
        return (self._learn(state, draft, verdict) if isinstance(draft, CombinedDraft) else state), cache

    def expected(self, state: CombinedState) -> Array:
        """Returns the expected number of accepted tokens in the next proposal of each part, float32 ``[B, P]``."""
        return (self.K * self.trust + state.accepted_BP) / (self.trust + state.rounds_BP)

    def _learn(self, state: CombinedState, draft: CombinedDraft, verdict: Verdict) -> CombinedState:
        """Counts the emitted tokens of each proposal."""
        num_BP = draft.num_proposed_BP
        is_drafted_BPK = jnp.arange(self.K)[None, None, :] < num_BP[:, :, None]
        is_emitted_BPK = is_drafted_BPK & (draft.proposed_BPK == verdict.tokens_BT[:, None, : self.K])
        emitted_BP = jnp.sum(jnp.cumprod(is_emitted_BPK, axis=2, dtype=jnp.int32), axis=2, dtype=jnp.int32)
        known_BP = jnp.minimum(emitted_BP, jnp.maximum(num_BP - 1, 0))  # a part does not read its last token
        return dataclasses.replace(
            state,
            seen_BP=state.seen_BP + known_BP,
            accepted_BP=self.decay * state.accepted_BP + emitted_BP,
            rounds_BP=self.decay * state.rounds_BP + (num_BP > 0),
        )

    def draft_part(
        self, i: int, memory: Memory, weights: Weights, prefix: Prefix, sample: Sampler, rows_B: Array
    ) -> tuple[Draft, Memory]:
        """Lets part i read the tokens that it missed in ``rows_B``, and draft."""
        part, own = self.parts[i], _weights_of(weights, i)
        (state, seen_B, cache), lengths_B = memory, prefix.lengths_B
        seen_B = jnp.minimum(seen_B, lengths_B)  # a stop or the budget may have cut the last round
        if hooks_of(part).falls_behind:
            # Only the counts of rows_B change, so that no count depends on other rows.
            state, _ = catch_up(
                part, own, state, prefix, seen_B, lambda seen_B: sample.any(rows_B & (seen_B < lengths_B - 2))
            )
        draft, state, cache = part.propose(own, state, prefix, cache, dataclasses.replace(sample, drafter=i))
        return draft, (state, jnp.where(rows_B, lengths_B, seen_B), cache)

    def _own_params(self, params: Any) -> tuple[Any, ...]:
        return params if isinstance(params, tuple) else (params,) * len(self.parts)

    def _output_of(self, i: int, output: Output) -> Output:
        """Returns the target's output with the hidden states of part i only."""
        hidden = dict(zip(self.hidden_layers, output.hidden))
        return dataclasses.replace(output, hidden=tuple(hidden[layer] for layer in self.parts[i].hidden_layers))


@dataclasses.dataclass(frozen=True)
class VotingDrafter(CombinedDrafter):
    """Drafts the token with the most votes, position by position, among the parts that agree with it so far; see `vote`.

    Every part drafts in every round. Use it with three or more drafters, or for greedy decoding. Of two drafters, the one
    with the larger weight always wins, and with sampled tokens `ChoosingDrafter` then loses less acceptance.

    Attributes:
      weighted: whether the vote of a part weighs as much as its expected number of accepted tokens; else all votes are equal.
    """

    weighted: bool = True

    def propose(
        self, weights: Weights, state: CombinedState, prefix: Prefix, cache: Any, sample: Sampler
    ) -> tuple[CombinedDraft, CombinedState, Any]:
        drafts, memories = [], []
        all_B = jnp.ones(prefix.lengths_B.shape, bool)
        for i in range(len(self.parts)):
            draft, (*memory, cache) = self.draft_part(i, (*state.of_part(i), cache), weights, prefix, sample, all_B)
            drafts.append(draft)
            memories.append(memory)
        proposed_BPK = jnp.stack([draft.tokens_BK for draft in drafts], axis=1)
        num_proposed_BP = jnp.stack([draft.num_drafted_B for draft in drafts], axis=1)
        weights_BP = self.expected(state) if self.weighted else jnp.ones_like(state.rounds_BP)
        tokens_BK, num_drafted_B = vote(proposed_BPK, num_proposed_BP, weights_BP)
        draft = CombinedDraft(
            tokens_BK=tokens_BK, num_drafted_B=num_drafted_B, proposed_BPK=proposed_BPK, num_proposed_BP=num_proposed_BP
        )
        return draft, state.with_parts(memories), cache


@dataclasses.dataclass(frozen=True)
class ChoosingDrafter(CombinedDrafter):
    """Drafts with the part of the most expected tokens per time; if it proposes nothing, with the next part that does.

    A part runs only if some row needs it. So put parts first that cost nothing or often propose nothing.

    Attributes:
      costs: the time of a round with each part, in any unit; None: all equal.
    """

    costs: tuple[float, ...] | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.costs is not None:
            object.__setattr__(self, "costs", tuple(self.costs))
            if len(self.costs) != len(self.parts):
                raise ValueError(f"costs must be {len(self.parts)} numbers, one for each part; got {self.costs!r}")
            for i, cost in enumerate(self.costs):
                validate.number(f"costs[{i}]", cost, 0, above=True)

    def choose(self, state: CombinedState) -> Array:
        """Returns the index of each row's first part, int32 ``[B]``, from past rounds alone."""
        costs_P = jnp.asarray(self.costs or (1.0,) * len(self.parts), jnp.float32)
        return jnp.argmax((1 + self.expected(state)) / costs_P[None, :], axis=1).astype(jnp.int32)

    def propose(
        self, weights: Weights, state: CombinedState, prefix: Prefix, cache: Any, sample: Sampler
    ) -> tuple[CombinedDraft, CombinedState, Any]:
        first_B = self.choose(state)
        drafts_B = jnp.ones(first_B.shape, bool) if sample.draft_lengths_B is None else sample.draft_lengths_B > 0
        draft, memories = self._no_draft(weights, state, prefix, cache, sample), []
        for i in range(len(self.parts)):
            rows_B = drafts_B & (first_B <= i) & (draft.num_drafted_B == 0)

            def run_part(carry: tuple[Draft, Memory], i: int = i, rows_B: Array = rows_B) -> tuple[Draft, Memory]:
                draft, memory = carry
                proposed, memory = self.draft_part(i, memory, weights, prefix, sample, rows_B)
                return _select(draft, proposed, i, rows_B & (proposed.num_drafted_B > 0)), memory

            memory = *state.of_part(i), cache
            draft, (*memory, cache) = _run_if(sample.any(rows_B), run_part, (draft, memory))
            memories.append(memory)
        return draft, state.with_parts(memories), cache

    def _no_draft(
        self, weights: Weights, state: CombinedState, prefix: Prefix, cache: Any, sample: Sampler
    ) -> CombinedDraft:
        """Returns a draft without tokens, with an array for distributions if any part returns distributions."""
        batch, P, K = len(prefix.lengths_B), len(self.parts), self.K
        rows_B = jnp.ones(batch, bool)

        def log_probs_of(i: int) -> Array | None:
            return self.draft_part(i, (*state.of_part(i), cache), weights, prefix, sample, rows_B)[0].log_probs_BRV

        shapes = [jax.eval_shape(functools.partial(log_probs_of, i)) for i in range(P)]
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


def _weights_of(weights: Weights, i: int) -> Weights:
    """Returns the weights of the target and of part i."""
    return dataclasses.replace(weights, draft=weights.draft[i])
