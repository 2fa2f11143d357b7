"""Several drafters in one, each with its own state, weights and counts of accepted tokens.

If another draft was accepted, the state of a part holds its own tokens instead of the emitted ones. So ``seen_BP`` counts
the tokens that the state of each part covers, and the part reads the missing ones before it drafts again, as after a
pause (`specsamp.decoding.drafter.catch_up`).

An emitted token counts for every part that proposed it and all tokens before it. The counts decay, so that a part that
was not asked for long is expected to do well again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

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
    num_proposed_BP: Array  # int32 in [0, K]; 0 for parts that were not asked


@dataclasses.dataclass(frozen=True)
class CombinedDrafter(DrafterHooks, Drafter):
    """Holds several drafters of the same K and counts their accepted tokens; subclasses combine the drafts into one.

    If the pair has a draft model or a head, every part with parameters gets ``Pair.draft_params``. Parts with different
    models need a pair without both, whose ``draft_params`` are a tuple with one entry per part: None for parts without
    parameters.

    Attributes:
      parts: one or more drafters of chains, with the same K.
      trust: the weight, in rounds, of the initial expectation that all K tokens of a part are accepted.
      decay: the factor by which the counts of earlier rounds shrink in every round; in [0, 1].

    Raises:
      ValueError: naming the value and the fix.
    """

    parts: tuple[Drafter, ...]
    trust: float = 0.3
    decay: float = 0.9

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
        if not 0 < self.trust < math.inf or not 0 <= self.decay <= 1:
            raise ValueError(f"trust must be above 0 and decay from 0 to 1; got {self.trust!r} and {self.decay!r}")

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

    def max_draft_length(self, state: CombinedState, prefix: Prefix) -> Array | None:
        most = [hooks_of(part).max_draft_length(own, prefix) for part, own in zip(self.parts, state.parts)]
        return None if any(most_B is None for most_B in most) else functools.reduce(jnp.maximum, most)

    def check(self, target: LanguageModel, draft: LanguageModel | None, draft_params: Any) -> None:
        takers = {(type(part), part.weights_key) for part in self.parts if type(part).prepare is not Drafter.prepare}
        if isinstance(draft_params, tuple):
            if draft is not None or len(draft_params) != len(self.parts):
                raise ValueError(
                    f"draft_params are a tuple of {len(draft_params)} for {len(self.parts)} drafters: give one entry for each, "
                    "None for those without, and leave out the pair's draft"
                )
        elif len(takers) > 1:
            raise ValueError(
                f"{len(takers)} of the drafters have parameters of their own, and the pair's draft_params are those of one: "
                f"make draft_params a tuple of {len(self.parts)}, and leave out the pair's draft and head"
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

    def ask(
        self, i: int, memory: Memory, weights: Weights, prefix: Prefix, sample: Sampler, asks_B: Array
    ) -> tuple[Draft, Memory]:
        """Catches part i up on the requesting rows, then lets it draft."""
        part, own = self.parts[i], _weights_of(weights, i)
        (state, seen_B, cache), lengths_B = memory, prefix.lengths_B
        seen_B = jnp.minimum(seen_B, lengths_B)  # a stop or the budget may have cut the last round
        if hooks_of(part).falls_behind:
            # Only the counts of requesting rows change, so that no count depends on other rows.
            state, _ = catch_up(
                part, own, state, prefix, seen_B, lambda seen_B: sample.any(asks_B & (seen_B < lengths_B - 2))
            )
        draft, state, cache = part.propose(own, state, prefix, cache, dataclasses.replace(sample, drafter=i))
        return draft, (state, jnp.where(asks_B, lengths_B, seen_B), cache)

    def _own_params(self, params: Any) -> tuple[Any, ...]:
        return params if isinstance(params, tuple) else (params,) * len(self.parts)

    def _output_of(self, i: int, output: Output) -> Output:
        """Returns the target's output with the hidden states of part i only."""
        hidden = dict(zip(self.hidden_layers, output.hidden))
        return dataclasses.replace(output, hidden=tuple(hidden[layer] for layer in self.parts[i].hidden_layers))


def _weights_of(weights: Weights, i: int) -> Weights:
    """Returns the weights of the target and of part i."""
    return dataclasses.replace(weights, draft=weights.draft[i])
