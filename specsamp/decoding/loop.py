"""Decoding is one loop: draft -> score -> verify -> commit, in a `lax.while_loop` under one
`jax.jit`.

Plain decoding is the same loop with an empty draft. A row has ``length`` committed tokens, the last
of them pending. A round with a draft of K tokens feeds the target

    [pending, d_1 .. d_K]   from slot  length - 1

and reads K+1 distributions off that one call. The rule accepts the first ``n`` drafted tokens and
appends a token of the target, and the length becomes ``length + n + 1``. A rejection undoes
nothing: the cache slots of rejected tokens are stale, masked by position, and overwritten by the
next round. Rows differ in length, sampling, acceptance and end. The results for finished rows are
written to scratch slots beyond their lengths, so they change no kept token.

The loop is exact for any target: the emitted tokens follow the warped distribution of
`LanguageModel.__call__`, computed in float32 from its logits.

A token tree is scored with a `Block`, the mask with which a node attends only to its ancestors and
itself within the tree. Then the cache slots of the accepted path are moved together, so that later
steps find a chain.

With adaptive draft lengths, a round is as wide as the longest draft of its rows. All widths are in
one program, as inner loops that run one after the other, so that they update the same caches in
place; the branches of a `lax.switch` would copy the caches. A round of width K is compiled like a
round of fixed length K.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.decoding.adaptive import Adaptive
from specsamp.decoding.commit import append
from specsamp.decoding.data_shards import BY_ROWS, REPLICATED, DataShards
from specsamp.decoding.drafter import (
    Drafter,
    PromptChunk,
    ScoredRound,
    depth_of,
    hooks_of,
    with_length,
)
from specsamp.decoding.drafter_calls import catch_up, checked, cut_draft, num_covered
from specsamp.decoding.sampler import Sampler
from specsamp.decoding.state import (
    DecodeState,
    Finish,
    RequestBatch,
    Stats,
    Weights,
    gather_tokens,
)
from specsamp.decoding.trees import block_of, keep_path, path_draft
from specsamp.jax_names import core
from specsamp.models.compiling import Options
from specsamp.models.interface import LanguageModel, Output, check_logits
from specsamp.sampling.rng import RoundKeys
from specsamp.sampling.rules import Draft, Meter, Rule, TargetDistributions, Verdict
from specsamp.sampling.warp import with_kernels

Array = jax.Array
_Carry = tuple[Array, DecodeState]  # rounds so far, state
_Program = Callable[..., DecodeState]  # of weights, request, state, max_rounds, min_running


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A target, a drafter and a rule, all static; there is one compiled program for each loop and
    shape.

    Attributes:
      keep_log_probs: whether to record the log-probabilities of the emitted tokens: True, under the
        target; "sampled", under the warped distribution that they were sampled from.
      keep_rounds: whether to record where rounds begin, so that sequences can be cut and counted
        afterwards.
      adaptive: adaptive draft lengths, from `Adaptive.for_batch`; None: every round drafts the
        drafter's K tokens.
      shards: the split of rows over devices.
    """

    target: LanguageModel
    drafter: Drafter
    rule: Rule
    keep_log_probs: bool | str = False
    keep_rounds: bool = False
    adaptive: Adaptive | None = None
    shards: DataShards = DataShards()

    @property
    def headroom(self) -> int:
        """Returns the number of scratch slots behind the longest sequence, where finished rows keep
        drafting.
        """
        return self.drafter.K + 1

    @property
    def depth(self) -> int:
        """Returns the largest number of tokens of a draft that can be accepted."""
        return depth_of(self.drafter)

    # The loop.

    def run(
        self,
        weights: Weights,
        state: DecodeState,
        max_rounds: Array | int,
        min_running: Array | int = 1,
    ) -> DecodeState:
        """Runs rounds, at most ``max_rounds``, while at least ``min_running`` rows of all shards
        have not ended.

        Several short runs give the result of one long run. ``state`` is donated, except its
        request.
        """
        request, state = state.request, dataclasses.replace(state, request=None)
        # Within another program, the options of that program hold. JAX has no public test for this
        # case.
        is_traced = any(
            isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves((weights, request, state))
        )
        program = _program(self, ()) if is_traced else self.program
        return dataclasses.replace(
            program(weights, request, state, max_rounds, min_running), request=request
        )

    @property
    def program(self) -> _Program:
        """Returns the jitted `run` of all shards, with the request and the donated state as two
        arguments.
        """
        return _program(self, self.target.compiler_options)

    def _run(
        self,
        weights: Weights,
        request: RequestBatch,
        state: DecodeState,
        max_rounds: Array | int,
        min_running: Array | int = 1,
    ) -> DecodeState:
        """Runs the rows of one shard."""
        # Each for the layout of its logits: a draft without collectives must not get one from a
        # warp.
        draft_model = hooks_of(self.drafter).draft_model or self.target
        request = dataclasses.replace(
            request,
            draft_sampling=with_kernels(request.draft_sampling, draft_model.kernels),
            sampling=with_kernels(request.sampling, self.target.kernels),
        )

        def goes_on(carry):
            rounds, state = carry
            return (rounds < max_rounds) & (
                self.shards.sum(jnp.sum(state.running_B)) >= jnp.maximum(min_running, 1)
            )

        def one_round(carry):
            rounds, state = carry
            return rounds + 1, self.round(weights, request, state)

        first = jnp.zeros((), jnp.int32), state
        if self.adaptive is None:
            _, state = jax.lax.while_loop(goes_on, one_round, first)
        else:
            body = functools.partial(self._rounds_by_width, weights, request, goes_on)
            _, state = jax.lax.while_loop(goes_on, body, (first[0], self._limit_lengths(state)))
        # The compiler may have split the rows of a shard over its devices; the next run needs all
        # rows on each device.
        small = self.shards.replicate(dataclasses.replace(state, cache=None, drafter_state=None))
        return dataclasses.replace(
            small, cache=state.cache, drafter_state=self._replicate(state.drafter_state)
        )

    def _replicate(self, drafter_state: Any) -> Any:
        """Replicates the drafter's state except its caches: the arrays whose shape depends on the
        number of slots.
        """
        if self.shards.mesh is None:
            return drafter_state
        few, many = (
            jax.eval_shape(functools.partial(self.drafter.init, 1, slots)) for slots in (256, 512)
        )

        def replicate(x, few, many):
            return self.shards.replicate(x) if few.shape == many.shape else x

        return jax.tree.map(replicate, drafter_state, few, many)

    # A round.

    def round(self, weights: Weights, request: RequestBatch, state: DecodeState) -> DecodeState:
        """Runs one round for all rows."""
        with jax.named_scope("draft"):
            draft, drafter_state, cache = self.draft(weights, request, state)
        with jax.named_scope("score"):
            output = self.score(weights, state, draft, cache)
        with jax.named_scope("verify"):
            target = TargetDistributions(
                logits_BTV=output.logits_BTV,
                warp=request.sampling,
                draft=draft,
                warp_state=state.warp_state,
            )
            verdict = self.rule.verify(draft, target, self._keys(request, state))
        with jax.named_scope("commit"):
            if draft.parents_BK is not None:
                output = keep_path(
                    self.target, state.lengths_B - 1, verdict, output, draft.tokens_BK.shape[1]
                )
            scored = ScoredRound(prefix=state.prefix, draft=draft, verdict=verdict, output=output)
            returned = self.drafter.commit(weights, drafter_state, scored, output.cache)
            drafter_state, cache = checked(
                self.drafter, "commit", returned, state=state.drafter_state, cache=output.cache
            )
            state = dataclasses.replace(state, cache=cache, drafter_state=drafter_state)
            if draft.parents_BK is not None:
                draft, target = path_draft(draft, verdict, target), target.along(verdict)
            return self.commit(request, state, draft, verdict, target)

    def draft(
        self, weights: Weights, request: RequestBatch, state: DecodeState
    ) -> tuple[Draft, Any, Any]:
        """Returns the drafter's proposal, its state and the target's cache."""
        chosen_B = self.adaptive and state.adaptive_state.draft_lengths_B
        sampler = Sampler(
            warp=request.draft_sampling,
            rule=self.rule,
            keys=self._keys(request, state),
            warp_state=state.draft_warp_state,
            any_shard=self.shards.any,
            draft_lengths_B=chosen_B,
            stop=self.adaptive and self.adaptive.stop,
        )
        returned = self.drafter.propose(
            weights, state.drafter_state, state.prefix, state.cache, sampler
        )
        draft, drafter_state, cache = checked(
            self.drafter, "propose", returned, draft=None, state=None, cache=state.cache
        )
        draft = cut_draft(self.drafter, draft, len(state.lengths_B), self.target.vocab_size)
        num_drafted_B = draft.num_drafted_B
        for most_B in (request.draft_lengths_B, chosen_B):
            if most_B is not None:  # drafters without `Sampler.chain` draft K tokens
                num_drafted_B = jnp.minimum(num_drafted_B, most_B)
        return dataclasses.replace(draft, num_drafted_B=num_drafted_B), drafter_state, cache

    def score(self, weights: Weights, state: DecodeState, draft: Draft, cache: Any) -> Output:
        """Calls the target once; returns its output at the pending token and at each
        drafted token.
        """
        start_B = state.lengths_B - 1
        pending_B1 = gather_tokens(state.tokens_BS, start_B, 1)
        tokens_BT = jnp.concatenate([pending_B1, draft.tokens_BK], axis=1)
        options = {} if draft.parents_BK is None else {"block": block_of(draft, start_B)}
        options["hidden_layers"] = self.drafter.hidden_layers
        output = self.target(weights.target, tokens_BT, start_B, cache, **options)
        check_logits("target", self.target, output)
        logits_BTV = output.logits_BTV.astype(
            jnp.promote_types(output.logits_BTV.dtype, jnp.float32)
        )
        return dataclasses.replace(output, logits_BTV=logits_BTV)

    def commit(
        self,
        request: RequestBatch,
        state: DecodeState,
        draft: Draft,
        verdict: Verdict,
        target: TargetDistributions,
    ) -> DecodeState:
        """Appends the emitted tokens, and chooses the next draft lengths if they adapt."""
        after = append(request, state, draft, verdict, target, self.keep_log_probs == "sampled")
        if self.adaptive is None:
            return after
        counts = draft.num_drafted_B, verdict.num_accepted_B
        learned = self.adaptive.learn(state.adaptive_state, state.running_B, *counts)
        return dataclasses.replace(after, adaptive_state=learned)

    def _keys(self, request: RequestBatch, state: DecodeState) -> RoundKeys:
        return RoundKeys(rows_B=request.row_keys_B, starts_B=state.lengths_B)

    # Adaptive draft lengths.

    def _rounds_by_width(
        self,
        weights: Weights,
        request: RequestBatch,
        goes_on: Callable[[_Carry], Array],
        carry: _Carry,
    ) -> _Carry:
        """Runs, for each width from narrow to wide, rounds while it is the smallest width that
        holds all drafts.
        """

        def longest(state):
            return self.shards.max(
                jnp.max(jnp.where(state.running_B, state.adaptive_state.draft_lengths_B, 0))
            )

        narrower = -1
        for width in self.adaptive.widths:
            if narrower == 0:
                carry = carry[0], self._catch_up(weights, carry[1], longest(carry[1]) > 0)

            def fits(carry, narrower=narrower, width=width):
                size = longest(carry[1])
                return goes_on(carry) & (narrower < size) & (size <= width)

            def one_round(carry, width=width):
                rounds, state = carry
                narrow = dataclasses.replace(self, drafter=with_length(self.drafter, width))
                after = narrow.round(weights, request, state)
                if width and after.adaptive_state.seen_B is not None:
                    seen_B = num_covered(self.drafter, after.lengths_B)
                    seen_B = jnp.where(state.running_B, seen_B, after.adaptive_state.seen_B)
                    after = after.with_adaptive(seen_B=seen_B)
                return rounds + 1, self._limit_lengths(after)

            carry = jax.lax.while_loop(fits, one_round, carry)
            narrower = width
        return carry

    def _limit_lengths(self, state: DecodeState) -> DecodeState:
        """Lowers the draft lengths to the numbers of tokens that the drafter is able to draft."""
        able_B = hooks_of(self.drafter).draft_lengths(state.drafter_state, state.prefix)
        if able_B is None:
            return state
        chosen_B = state.adaptive_state.draft_lengths_B
        return state.with_adaptive(
            draft_lengths_B=jnp.where(state.running_B, jnp.minimum(chosen_B, able_B), chosen_B)
        )

    def _catch_up(self, weights: Weights, state: DecodeState, drafts_next: Array) -> DecodeState:
        """Feeds the drafter the tokens emitted while it was paused, if any row is going
        to draft.
        """
        if state.adaptive_state.seen_B is None:
            return state

        with jax.named_scope("catch_up"):
            drafter_state, seen_B = catch_up(
                self.drafter,
                weights,
                state.drafter_state,
                state.prefix,
                state.adaptive_state.seen_B,
                state.running_B & drafts_next,
                self.shards.any,
            )
        return dataclasses.replace(state, drafter_state=drafter_state).with_adaptive(seen_B=seen_B)

    # Before the first round.

    @functools.partial(jax.jit, static_argnames=("self", "slots", "num_samples"))
    def prefill(
        self,
        weights: Weights,
        request: RequestBatch,
        tokens_BP: Array,
        lengths_B: Array,
        *,
        slots: int,
        num_samples: int = 1,
    ) -> DecodeState:
        """Reads the prompts once and copies the result to ``num_samples`` rows each.

        Args:
          weights: prepared for ``slots`` slots.
          request: of ``B * num_samples`` rows; the rows of prompt i begin at ``i * num_samples``.
          tokens_BP: prompts, padded on the right.
          lengths_B: true lengths, at least 1.
          slots: slots of caches and token buffer: the largest limit plus `headroom`, at least P.
        """

        def read(weights, request, tokens_BP, lengths_B):
            batch, padded_length = tokens_BP.shape
            start_B, caches = jnp.zeros_like(lengths_B), self.empty_caches(batch, slots)
            with jax.named_scope("prefill"):
                caches = self._read(weights, tokens_BP, start_B, lengths_B, caches)
            prompts = tokens_BP, lengths_B, caches
            tokens_RP, lengths_R, caches = jax.tree.map(
                lambda x: jnp.repeat(x, num_samples, axis=0), prompts
            )
            tokens_RS = jnp.pad(tokens_RP, ((0, 0), (0, slots - padded_length)))
            return self._first_state(request, tokens_RS, lengths_R, caches)

        specs = (REPLICATED, BY_ROWS, BY_ROWS, BY_ROWS)
        return self.shards.map(read, specs)(weights, request, tokens_BP, lengths_B)

    @functools.partial(jax.jit, static_argnames=("self", "slots"))
    def blank(self, request: RequestBatch, *, slots: int) -> DecodeState:
        """Returns rows that have ended: sequences of one unread token, to which ``request`` gives
        no budget.
        """

        def make(request):
            shape = len(request.limits_B), slots
            tokens_BS, lengths_B = jnp.zeros(shape, jnp.int32), jnp.ones(shape[:1], jnp.int32)
            return self._first_state(request, tokens_BS, lengths_B, self.empty_caches(*shape))

        return self.shards.map(make, (BY_ROWS,))(request)

    @functools.partial(jax.jit, static_argnames=("self", "chunk"), donate_argnames="state")
    def extend(
        self,
        weights: Weights,
        request: RequestBatch,
        state: DecodeState | None,
        tokens_BS: Array,
        start_B: Array,
        lengths_B: Array,
        *,
        chunk: int,
    ) -> DecodeState:
        """Reads sequences into rows that already hold their beginnings; only the new tokens are
        read.

        Args:
          request: of the new sequences.
          state: without its request; donated. None: nothing was read yet.
          tokens_BS: the whole sequences, each beginning with ``start_B`` tokens that ``state`` has
            committed.
          start_B: int32, at most the number of tokens that `specsamp.decoding.engine.count_known`
            returns; or 0, or where the last call ended.
          lengths_B: lengths of the whole sequences.
          chunk: number of tokens that are read per call. All rows have as many calls as the row
            with most tokens, and must have slots for them: a model of somebody else may write over
            earlier slots otherwise.
        """

        def extend(weights, request, caches, tokens_BS, start_B, lengths_B):
            caches = caches or self.empty_caches(*tokens_BS.shape)

            def read_chunk(index, caches):
                at_B = start_B + index * chunk
                return self._read(
                    weights, gather_tokens(tokens_BS, at_B, chunk), at_B, lengths_B, caches
                )

            with jax.named_scope("prefill"):
                # As many calls in all shards, see `data_shards`.
                chunks = -(-self.shards.max(jnp.max(lengths_B - start_B)) // chunk)
                caches = jax.lax.fori_loop(0, chunks, read_chunk, caches)
            return self._first_state(request, tokens_BS, lengths_B, caches)

        caches = state and (state.cache, state.drafter_state)
        arrays = weights, request, caches, tokens_BS, start_B, lengths_B
        return self.shards.map(extend, (REPLICATED, *[BY_ROWS] * 5))(*arrays)

    def empty_caches(self, batch: int, slots: int) -> tuple[Any, Any]:
        """Returns the target's cache and the drafter's state before anything was read."""
        return self.target.init_cache(batch, slots), self.drafter.init(batch, slots)

    def _read(
        self,
        weights: Weights,
        tokens_BT: Array,
        start_B: Array,
        lengths_B: Array,
        caches: tuple[Any, Any],
    ) -> tuple[Any, Any]:
        """Reads a part of the prompts with target and drafter; returns the target's cache and the
        drafter's state.
        """
        cache, drafter_state = caches
        with jax.named_scope("target"):
            output = self.target(
                weights.target,
                tokens_BT,
                start_B,
                cache,
                hidden_layers=self.drafter.hidden_layers,
                **self.target.with_lengths(lengths_B),
            )
        check_logits("target", self.target, output)
        with jax.named_scope("draft"):
            chunk = PromptChunk(
                tokens_BT=tokens_BT, start_B=start_B, lengths_B=lengths_B, output=output
            )
            returned = self.drafter.read(weights, drafter_state, chunk, output.cache)
            drafter_state, cache = checked(
                self.drafter, "read", returned, state=drafter_state, cache=output.cache
            )
        return cache, drafter_state

    def _first_state(
        self, request: RequestBatch, tokens_BS: Array, lengths_B: Array, caches: tuple[Any, Any]
    ) -> DecodeState:
        """Returns the state of rows before their first emitted token."""
        cache, drafter_state = caches

        def empty(dtype):
            return jnp.zeros(tokens_BS.shape, dtype)

        def start(warp):
            return warp.init(tokens_BS, lengths_B, self.target.vocab_size)

        return DecodeState(
            tokens_BS=tokens_BS,
            lengths_B=lengths_B,
            finish_B=jnp.where(lengths_B < request.limits_B, Finish.RUNNING, Finish.LENGTH).astype(
                jnp.int32
            ),
            from_draft_BS=empty(bool),
            log_probs_BS=empty(jnp.float32) if self.keep_log_probs else None,
            rounds_BS=empty(jnp.int32) if self.keep_rounds else None,
            cache=cache,
            drafter_state=drafter_state,
            meter=Meter(variation=empty(jnp.float32), extra=empty(jnp.float32))
            if self.rule.metered
            else None,
            stats=Stats.zeros(len(lengths_B), self.depth, self.adaptive is not None),
            request=request,
            warp_state=start(request.sampling),
            draft_warp_state=start(request.draft_sampling),
            adaptive_state=self.adaptive
            and self.adaptive.begin(lengths_B, hooks_of(self.drafter).falls_behind),
        )


@functools.cache
def _program(loop: Loop, options: Options) -> _Program:
    """Returns the jitted loop of all shards; equal loops share a program."""
    run = loop.shards.map(loop._run, (REPLICATED, BY_ROWS, BY_ROWS, REPLICATED, REPLICATED))
    return jax.jit(run, donate_argnums=2, compiler_options=dict(options) or None)
