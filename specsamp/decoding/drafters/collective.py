"""Several drafters vote, or one of them is chosen (Minions, arXiv 2402.15678).

A draft is exact if it is verified under the distribution that its tokens follow. A winner that was
chosen *by its tokens* does not follow the distribution of its drafter: of two samples from (.5,
.5), with ties to the lower id, the winner follows (.75, .25). So there are two ways.

`VotingDrafter` lets all parts draft and takes the tokens with the most votes. They are verified as
one-hot: a token is accepted with the target's probability of it, however it was chosen.

`ChoosingDrafter` chooses a part for each row from past rounds alone, before anything is sampled. So
the tokens are verified under the distribution of that part. If the part proposes nothing, the next
part drafts: whether a first token is drafted is known before it is sampled.

Neither sees the noise with which the target judges: the numbers of a draft have addresses of their
own, and those of part i are others than those of part j. (Under the coupled rule all share the
noise of a position, and no draft changes the text.)

After a round with another draft, the state of a part lacks emitted tokens. ``seen_BP`` counts the
tokens that the state covers, and the part reads the missing ones before it drafts again.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specsamp import validate
from specsamp.decoding.drafter import (
    Drafter,
    DrafterHooks,
    Prefix,
    Weights,
    hooks_of,
    with_length,
)
from specsamp.decoding.drafter_calls import catch_up, num_covered
from specsamp.models.interface import Output
from specsamp.pytrees import pytree
from specsamp.sampling.rng import RoundKeys
from specsamp.sampling.rules import Draft, count_leading, take_row

Array = jax.Array
# Of a part: its state, the tokens of each row that this covers, and the target's cache.
_Memory = tuple[Any, Array, Any]

MOST_OFFSETS = 1 << 16  # of a round; the noise of the next part begins behind them


@pytree
class CollectiveState:
    """The state of P drafters for each row, between rounds."""

    parts: tuple[Any, ...]  # the state of each drafter
    seen_BP: Array  # int32, the tokens that it covers
    expected_BP: Array  # float32, the emitted tokens of its next draft
    # The proposals, from `propose` to `commit`.
    tokens_BPK: Array  # int32, of the largest K
    num_BP: Array  # int32 in [0, K]; 0 for parts that did not draft


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PartKeys(RoundKeys):
    """The addresses of a part's own draft."""

    part: int

    def uniforms(self, purpose, offsets_BT):
        return super().uniforms(purpose, offsets_BT + self.part * MOST_OFFSETS)


@dataclasses.dataclass(frozen=True)
class CollectiveDrafter(DrafterHooks, Drafter):
    """Holds drafters, and counts the emitted tokens of each; subclasses make one draft of theirs.

    Parts with parameters share ``Pair.draft_params``. Parts with different models need a pair
    without a draft model and without a head, whose ``draft_params`` are a tuple with one entry for
    each part: None for a part without parameters.

    Attributes:
      parts: at least two drafters of chains, with the same K.
    """

    parts: tuple[Drafter, ...]

    update_weight = 0.2  # weight of a round in the moving average of a part that drafted
    recovery_weight = 0.02  # weight of K, each round, in the average of a part that did not

    def __post_init__(self):
        parts = tuple(self.parts) if validate.is_list(self.parts) else ()
        if len(parts) < 2 or not all(isinstance(part, Drafter) for part in parts):
            raise ValueError(
                "parts must be two drafters or more, such as (NgramDrafter(4), ModelDrafter(model, "
                f"4)); got {str(self.parts):.100}"
            )
        object.__setattr__(self, "parts", parts)
        if any(isinstance(part, CollectiveDrafter) for part in parts):
            raise ValueError(
                f"a part of this {type(self).__name__} has parts itself: make all drafters parts "
                "of one"
            )
        lengths = [part.K for part in parts]
        if len(set(lengths)) > 1 or lengths[0] < 1:
            raise ValueError(
                f"the parts' K must be equal and at least 1; got {lengths}: make all parts with "
                "the same K"
            )
        trees = [type(part).__name__ for part in parts if hooks_of(part).depth is not None]
        if trees:
            raise ValueError(f"parts must draft chains; {trees[0]} drafts a tree: leave it out")

    @property
    def K(self):
        return self.parts[0].K

    @property
    def exact(self):
        return all(part.exact for part in self.parts)

    @property
    def row_independent(self):
        return all(hooks_of(part).row_independent for part in self.parts)

    @property
    def looks_ahead(self):
        return max(hooks_of(part).looks_ahead for part in self.parts)

    @property
    def hidden_layers(self):
        """Returns the layers that any part reads."""
        return tuple(sorted({layer for part in self.parts for layer in part.hidden_layers}))

    @property
    def max_positions(self):
        return min((part.max_positions for part in self.parts if part.max_positions), default=None)

    @property
    def weights_key(self):
        return tuple((type(part), part.weights_key) for part in self.parts)

    def of_length(self, K):
        return dataclasses.replace(self, parts=tuple(with_length(part, K) for part in self.parts))

    def check(self, target, draft, draft_params):
        count = len(self.parts)
        owners = set(self.weights_key) - {(type(part), None) for part in self.parts}
        is_each = isinstance(draft_params, tuple)
        has_each = is_each and draft is None and len(draft_params) == count
        if (is_each or len(owners) > 1) and not has_each:
            raise ValueError(
                f"{count} drafters, {len(owners)} with different parameters: make draft_params a "
                f"tuple of {count}, None for those without, and leave out the pair's draft and head"
            )
        for part, own in zip(self.parts, self._each(draft_params)):
            part.check(target, draft, own)
            model = hooks_of(part).draft_model
            if model is not None and model.rewind is not None:
                raise ValueError(
                    f"{type(part).__name__} drafts with recurrent layers, which do not take part "
                    f"in a {type(self).__name__}: use it alone"
                )

    def prepare(self, params):
        return tuple(part.prepare(own) for part, own in zip(self.parts, self._each(params)))

    def fit_slots(self, weights, slots):
        return tuple(part.fit_slots(own, slots) for part, own in zip(self.parts, weights))

    def init(self, batch, slots):
        shape = batch, len(self.parts)
        return CollectiveState(
            parts=tuple(part.init(batch, slots) for part in self.parts),
            seen_BP=jnp.zeros(shape, jnp.int32),
            expected_BP=jnp.full(shape, self.K, jnp.float32),
            tokens_BPK=jnp.zeros((*shape, self.K), jnp.int32),
            num_BP=jnp.zeros(shape, jnp.int32),
        )

    def read(self, weights, state, chunk, cache):
        parts = list(state.parts)
        for i, part in enumerate(self.parts):
            own = dataclasses.replace(chunk, output=self._output_of(i, chunk.output))
            parts[i], cache = part.read(_weights_of(weights, i), parts[i], own, cache)
        # A part that had not read the tokens before the chunk catches up from there when it drafts.
        end_B = jnp.minimum(chunk.start_B + chunk.tokens_BT.shape[1], chunk.lengths_B)
        is_behind_BP = state.seen_BP < chunk.start_B[:, None]
        seen_BP = jnp.where(is_behind_BP, state.seen_BP, end_B[:, None])
        # The moving averages belong to the former text of a copied row.
        expected_BP = jnp.full_like(state.expected_BP, self.K)
        return dataclasses.replace(
            state, parts=tuple(parts), seen_BP=seen_BP, expected_BP=expected_BP
        ), cache

    def commit(self, weights, state, scored, cache):
        parts = list(state.parts)
        for i, part in enumerate(self.parts):
            own = dataclasses.replace(scored, output=self._output_of(i, scored.output))
            parts[i], cache = part.commit(_weights_of(weights, i), parts[i], own, cache)
        proposed_BPK = state.tokens_BPK[..., : self.K]
        is_emitted_BPK = proposed_BPK == scored.verdict.tokens_BT[:, None, : self.K]
        is_emitted_BPK &= jnp.arange(self.K)[None, None] < state.num_BP[..., None]
        emitted_BP, has_drafted_BP = count_leading(is_emitted_BPK), state.num_BP > 0
        surprise_BP = jnp.where(has_drafted_BP, emitted_BP, self.K) - state.expected_BP
        weight_BP = jnp.where(has_drafted_BP, self.update_weight, self.recovery_weight)
        return dataclasses.replace(
            state,
            parts=tuple(parts),
            num_BP=jnp.zeros_like(state.num_BP),  # a pause proposes nothing
            seen_BP=state.seen_BP + emitted_BP,
            expected_BP=state.expected_BP + (weight_BP * surprise_BP).astype(jnp.float32),
        ), cache

    def _each(self, params: Any) -> tuple[Any, ...]:
        """Returns the parameters of each part."""
        return params if isinstance(params, tuple) else (params,) * len(self.parts)

    def _output_of(self, i: int, output: Output) -> Output:
        """Returns the target's output with the hidden states of part i only."""
        hidden = dict(zip(self.hidden_layers, output.hidden))
        own = tuple(hidden[layer] for layer in self.parts[i].hidden_layers)
        return dataclasses.replace(output, hidden=own)

    def propose(self, weights, state, prefix, cache, sample):
        first_B, drafts, memories = self.choose(state, prefix), [], []
        waits_B = jnp.ones(prefix.lengths_B.shape, bool)
        if sample.draft_lengths_B is not None:
            waits_B = sample.draft_lengths_B > 0
        for i, part in enumerate(self.parts):
            rows_B = waits_B if first_B is None else waits_B & (first_B <= i)
            own, keys = _weights_of(weights, i), _PartKeys(**vars(sample.keys), part=i)

            def read_and_draft(memory, part=part, own=own, keys=keys, rows_B=rows_B):
                state, seen_B, cache = memory
                if hooks_of(part).falls_behind:
                    state, _ = catch_up(part, own, state, prefix, seen_B, rows_B, sample.any_shard)
                draft, state, cache = part.propose(
                    own, state, prefix, cache, dataclasses.replace(sample, keys=keys)
                )
                # The counts of other rows stay, so that no count depends on the rest of the batch.
                # If the first n tokens are emitted, the state covers n more.
                known_B = num_covered(part, prefix.lengths_B)
                seen_B = jnp.where(rows_B, known_B + 1, seen_B)
                return draft.only_in(rows_B), (state, seen_B, cache)

            memory = state.parts[i], state.seen_BP[:, i], cache
            draft, memory = _run_if(sample.any_shard(rows_B.any()), read_and_draft, memory)
            if first_B is not None:
                waits_B &= draft.num_drafted_B == 0
            cache = memory[2]
            drafts.append(draft)
            memories.append(memory)
        parts, seen, _ = zip(*memories)
        state = dataclasses.replace(
            state,
            parts=parts,
            seen_BP=jnp.stack(seen, axis=1),
            tokens_BPK=state.tokens_BPK.at[..., : self.K].set(
                jnp.stack([draft.tokens_BK for draft in drafts], axis=1)
            ),
            num_BP=jnp.stack([draft.num_drafted_B for draft in drafts], axis=1),
        )
        return self.combine(state, drafts), state, cache

    def choose(self, state: CollectiveState, prefix: Prefix) -> Array | None:
        """Returns the index of each row's first part, int32 ``[B]``, of which the next are needed
        only where it proposes nothing; None: every part drafts.
        """
        return None

    @abc.abstractmethod
    def combine(self, state: CollectiveState, drafts: Sequence[Draft]) -> Draft:
        """Returns the draft that is verified, of the drafts of all parts."""


@dataclasses.dataclass(frozen=True)
class VotingDrafter(CollectiveDrafter):
    """Drafts the token with the most votes, position by position, among the parts that agree with
    it so far; see `vote`.

    Every part drafts in every round, and its vote weighs as much as its expected number of
    tokens. Of two drafters, the one with the larger weight always wins: use it with three or more.
    """

    def combine(self, state, drafts):
        tokens_BK, num_drafted_B = vote(
            state.tokens_BPK[..., : self.K], state.num_BP, state.expected_BP
        )
        return Draft(tokens_BK=tokens_BK, num_drafted_B=num_drafted_B)


@dataclasses.dataclass(frozen=True)
class ChoosingDrafter(CollectiveDrafter):
    """Drafts with the part of the most expected tokens per time; if it proposes nothing, with the
    next part that does.

    A part runs only if some row needs it. So put parts first that cost nothing or often propose
    nothing. (A `ModuleDrafter` reads the text in its own rounds alone: it accepts less after
    others.)

    Attributes:
      costs: the time of a round with each part, in any unit; (): all equal.
    """

    costs: tuple[float, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "costs", costs := tuple(self.costs))
        if len(costs) not in (0, len(self.parts)):
            raise ValueError(
                f"costs must be {len(self.parts)} numbers, one for each part; got {costs!r}"
            )
        for i, cost in enumerate(costs):
            validate.number(f"costs[{i}]", cost, 0, above=True)

    def choose(self, state, prefix):
        costs_P = jnp.asarray(self.costs or (1.0,), jnp.float32)
        return jnp.argmax((1 + state.expected_BP) / costs_P[None], axis=1).astype(jnp.int32)

    def combine(self, state, drafts):
        """Returns the only proposal that has tokens."""
        takes_BP = state.num_BP > 0
        known = [draft.log_probs_BRV for draft in drafts if draft.log_probs_BRV is not None]
        log_probs_BKV = None
        if known:  # the one-hot distributions of the others are written out
            laws = [draft.laws(known[0]) for draft in drafts]
            log_probs_BKV = jnp.select(list(takes_BP.T[..., None, None]), laws)
        return Draft(
            tokens_BK=jnp.where(takes_BP[..., None], state.tokens_BPK[..., : self.K], 0).sum(
                axis=1
            ),
            num_drafted_B=state.num_BP.sum(axis=1),
            log_probs_BRV=log_probs_BKV,
        )


def vote(proposed_BPK: Array, num_BP: Array, weights_BP: Array) -> tuple[Array, Array]:
    """Returns the sequence of tokens with the most votes at every position, and its length.

    A part votes for its next token as long as all its earlier tokens were elected. Ties go to the
    first part. The result is the beginning of one part's proposal.

    Args:
      proposed_BPK: int32, the tokens of P parts.
      num_BP: int32, the number of tokens of each part.
      weights_BP: float32, the votes of each part, at least 0.

    Returns:
      ``tokens_BK`` and ``num_drafted_B``, int32.
    """

    agrees_BP, tokens, elected = jnp.ones(num_BP.shape, bool), [], []
    for k in range(proposed_BPK.shape[2]):
        votes_BP, tokens_BP = agrees_BP & (k < num_BP), proposed_BPK[:, :, k]
        is_same_BPP = tokens_BP[:, :, None] == tokens_BP[:, None, :]
        support_BP = jnp.sum(is_same_BPP * (votes_BP * weights_BP)[:, None], axis=2)
        winner_B = jnp.argmax(jnp.where(votes_BP, support_BP, -1), axis=1)
        tokens.append(take_row(tokens_BP, winner_B))
        elected.append(votes_BP.any(axis=1))
        agrees_BP = votes_BP & (tokens_BP == tokens[-1][:, None])
    return jnp.stack(tokens, axis=1), jnp.sum(jnp.stack(elected), axis=0, dtype=jnp.int32)


def _run_if(
    is_needed: Array, run: Callable[[_Memory], tuple[Draft, _Memory]], memory: _Memory
) -> tuple[Draft, _Memory]:
    """Returns the results of ``run`` if ``is_needed``, else no draft: in a loop of at most one
    turn, since the branches of `lax.cond` would copy caches.
    """
    draft, _ = jax.eval_shape(run, memory)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), draft)

    def once(carry):
        return jnp.zeros_like(carry[0]), run(carry[1][1])

    return jax.lax.while_loop(lambda carry: carry[0], once, (is_needed, (nothing, memory)))[1]


def _weights_of(weights: Weights, i: int) -> Weights:
    """Returns the weights of the target and of part i."""
    return dataclasses.replace(weights, draft=weights.draft[i])
