"""One of several drafters is chosen in each round, in each row (compare Minions, arXiv 2402.15678).

A draft is exact if it is verified under the distribution that its tokens follow. A winner that was chosen *by its tokens*
does not follow the distribution of its drafter: of two samples from (.5, .5), with ties to the lower id, the winner
follows (.75, .25). So a part is chosen from past rounds alone, before anything is sampled, and its tokens are verified
under its distribution. If the part proposes nothing, the next part drafts: whether a first token is drafted is known
before it is sampled. (A vote among the tokens of all parts would be exact as a one-hot proposal only, and lost a third of
the tokens per round at temperature 1; see notebooks/results/README.md.)

Each part has its own state, weights and counts. After a round with another draft, the state of a part lacks the emitted
tokens. ``seen_BP`` counts the tokens that the state covers, and the part reads the missing tokens before it drafts again
(`specsamp.decoding.drafter.catch_up`).

The accepted tokens of each part are counted. The counts decay, so that after a long pause a part is expected to do well
again.
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
class ChoosingState:
    """State of P drafters for each row, between rounds."""

    parts: tuple[Any, ...]  # the state of each drafter
    seen_BP: Array  # int32, the tokens that it covers; used for parts that fall behind
    accepted_BP: Array  # float32, accepted tokens of the part, with decay
    rounds_BP: Array  # float32, rounds in which it drafted, with decay

    def of_part(self, i: int) -> tuple[Any, Array]:
        """Returns the state of part i and the tokens that it covers."""
        return self.parts[i], self.seen_BP[:, i]

    def with_parts(self, memories: Sequence[tuple[Any, Array]]) -> ChoosingState:
        """Returns this state with `of_part` of all parts replaced."""
        parts, seen = zip(*memories)
        return dataclasses.replace(self, parts=parts, seen_BP=jnp.stack(seen, axis=1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoosingDraft(Draft):
    """The draft that is verified, and the part that drafted it."""

    part_B: Array  # int32


@dataclasses.dataclass(frozen=True)
class ChoosingDrafter(DrafterHooks, Drafter):
    """Drafts with the part of the most expected tokens per time; if it proposes nothing, with the next part that does.

    A part runs only if some row needs it. So put parts first that cost nothing or often propose nothing.

    Parts with parameters share ``Pair.draft_params``. Parts with different models need a pair without a draft model and
    without a head, whose ``draft_params`` are a tuple with one entry for each part: None for a part without parameters.

    Attributes:
      parts: drafters of chains, with the same K.
      costs: the time of a round with each part, in any unit; None: all equal.
    """

    parts: tuple[Drafter, ...]
    costs: tuple[float, ...] | None = None

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
        if self.costs is not None:
            object.__setattr__(self, "costs", tuple(self.costs))
            if len(self.costs) != len(self.parts):
                raise ValueError(f"costs must be {len(self.parts)} numbers, one for each part; got {self.costs!r}")
            for i, cost in enumerate(self.costs):
                validate.number(f"costs[{i}]", cost, 0, above=True)

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

    def of_length(self, K: int) -> ChoosingDrafter:
        return dataclasses.replace(self, parts=tuple(with_length(part, K) for part in self.parts))

    def draft_lengths(self, state: ChoosingState, prefix: Prefix) -> Array | None:
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

    def init(self, batch: int, slots: int) -> ChoosingState:
        nothing_BP = jnp.zeros((batch, len(self.parts)), jnp.float32)
        return ChoosingState(
            parts=tuple(part.init(batch, slots) for part in self.parts),
            seen_BP=nothing_BP.astype(jnp.int32),
            accepted_BP=nothing_BP,
            rounds_BP=nothing_BP,
        )

    def read(
        self,
        weights: Weights,
        state: ChoosingState,
        tokens_BT: Array,
        start_B: Array,
        lengths_B: Array,
        target_output: Output,
        cache: Any,
    ) -> tuple[ChoosingState, Any]:
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
        state: ChoosingState,
        prefix: Prefix,
        draft: Draft,
        verdict: Verdict,
        output: Output,
        cache: Any,
    ) -> tuple[ChoosingState, Any]:
        parts = list(state.parts)
        for i, part in enumerate(self.parts):
            own = _weights_of(weights, i), parts[i], prefix, draft, verdict, self._output_of(i, output), cache
            parts[i], cache = part.commit(*own)
        state = dataclasses.replace(state, parts=tuple(parts))
        return (self._learn(state, draft, verdict) if isinstance(draft, ChoosingDraft) else state), cache

    def expected(self, state: ChoosingState) -> Array:
        """Returns the expected number of accepted tokens in the next proposal of each part, float32 ``[B, P]``."""
        return (self.K * self.trust + state.accepted_BP) / (self.trust + state.rounds_BP)

    def _learn(self, state: ChoosingState, draft: ChoosingDraft, verdict: Verdict) -> ChoosingState:
        """Counts the accepted tokens of the part that drafted."""
        drafted_B1, accepted_B1 = draft.num_drafted_B[:, None], verdict.num_accepted_B[:, None]
        drafted_BP = (jnp.arange(len(self.parts))[None, :] == draft.part_B[:, None]) & (drafted_B1 > 0)
        known_B1 = jnp.minimum(accepted_B1, drafted_B1 - 1)  # a part does not read its last token
        return dataclasses.replace(
            state,
            seen_BP=state.seen_BP + jnp.where(drafted_BP, known_B1, 0),
            accepted_BP=self.decay * state.accepted_BP + jnp.where(drafted_BP, accepted_B1, 0),
            rounds_BP=self.decay * state.rounds_BP + drafted_BP,
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

    def choose(self, state: ChoosingState) -> Array:
        """Returns the index of each row's first part, int32 ``[B]``, from past rounds alone."""
        costs_P = jnp.asarray(self.costs or (1.0,) * len(self.parts), jnp.float32)
        return jnp.argmax((1 + self.expected(state)) / costs_P[None, :], axis=1).astype(jnp.int32)

    def propose(
        self, weights: Weights, state: ChoosingState, prefix: Prefix, cache: Any, sample: Sampler
    ) -> tuple[ChoosingDraft, ChoosingState, Any]:
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
        self, weights: Weights, state: ChoosingState, prefix: Prefix, cache: Any, sample: Sampler
    ) -> ChoosingDraft:
        """Returns a draft without tokens, with an array for distributions if any part returns distributions."""
        nothing_B = jnp.zeros_like(prefix.lengths_B)

        def log_probs_of(i: int) -> Array | None:
            memory = *state.of_part(i), cache
            return self.draft_part(i, memory, weights, prefix, sample, nothing_B == 0)[0].log_probs_BRV

        shapes = [jax.eval_shape(functools.partial(log_probs_of, i)) for i in range(len(self.parts))]
        known = [shape for shape in shapes if shape is not None]
        return ChoosingDraft(
            tokens_BK=jnp.zeros((len(nothing_B), self.K), jnp.int32),
            num_drafted_B=nothing_B,
            log_probs_BRV=jnp.zeros(known[0].shape, jnp.result_type(*known)) if known else None,
            part_B=nothing_B,
        )

    def _own_params(self, params: Any) -> tuple[Any, ...]:
        return params if isinstance(params, tuple) else (params,) * len(self.parts)

    def _output_of(self, i: int, output: Output) -> Output:
        """Returns the target's output with the hidden states of part i only."""
        hidden = dict(zip(self.hidden_layers, output.hidden))
        return dataclasses.replace(output, hidden=tuple(hidden[layer] for layer in self.parts[i].hidden_layers))


def _run_if(is_needed: Array, function: Callable[[Any], Any], carry: Any) -> Any:
    """Applies a function if ``is_needed``, in a loop of at most one turn: the branches of `lax.cond` would copy caches."""

    def once(state: tuple[Array, Any]) -> tuple[Array, Any]:
        return jnp.zeros_like(state[0]), function(state[1])

    return jax.lax.while_loop(lambda state: state[0], once, (is_needed, carry))[1]


def _select(draft: ChoosingDraft, proposed: Draft, i: int, takes_B: Array) -> ChoosingDraft:
    """Returns the draft with part i's proposal, and its distributions, in the rows that take it."""
    takes_B1 = takes_B[:, None]
    log_probs_BRV = draft.log_probs_BRV
    if log_probs_BRV is not None:
        own_BRV = proposed.log_probs_BRV
        if own_BRV is None:  # another part has distributions: write the one-hot ones out
            is_token_BRV = jnp.arange(log_probs_BRV.shape[2])[None, None, :] == proposed.tokens_BK[:, :, None]
            own_BRV = jnp.where(is_token_BRV, 0.0, -jnp.inf)
        log_probs_BRV = jnp.where(takes_B1[:, :, None], own_BRV, log_probs_BRV).astype(log_probs_BRV.dtype)
    return ChoosingDraft(
        tokens_BK=jnp.where(takes_B1, proposed.tokens_BK, draft.tokens_BK),
        num_drafted_B=jnp.where(takes_B, proposed.num_drafted_B, draft.num_drafted_B),
        log_probs_BRV=log_probs_BRV,
        part_B=jnp.where(takes_B, i, draft.part_B),
    )


def _weights_of(weights: Weights, i: int) -> Weights:
    """Returns the weights of the target and of part i."""
    return dataclasses.replace(weights, draft=weights.draft[i])
