"""Decoding is one loop: draft -> score -> verify -> commit, in a `lax.while_loop` under one `jax.jit`.

Autoregressive decoding is the same loop with an empty draft. A row has ``length`` committed tokens,
the last of them pending. A round with a draft of K tokens feeds the target

    [pending, d_1 .. d_K]   from slot  length - 1

reads K+1 distributions off that one call, lets the rule keep ``n`` drafted tokens and append one of the
target's, and moves the length to ``length + n + 1``. Nothing else is undone: slots written for
rejected tokens are stale, masked by position, and overwritten by the next round. Rows differ in
length, parameters, acceptance and end; a finished row goes on computing into scratch slots beyond its
length, which changes nothing that is kept.

The loop is exact for whatever target it is given: the emitted tokens follow the warped distribution of
`LanguageModel.__call__`, computed in float32 from its logits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.decoding import batch_rows, widths
from specsamp.decoding.commit import append
from specsamp.decoding.data_shards import BY_ROWS, REPLICATED, DataShards
from specsamp.decoding.drafter import Drafter, Prefix, hooks_of
from specsamp.decoding.prefill import first_state, next_state
from specsamp.decoding.sampler import Sampler
from specsamp.decoding.state import DecodeState, RequestBatch, Weights
from specsamp.decoding.tokens import gather_tokens, write_tokens
from specsamp.models import compiling
from specsamp.models.interface import LanguageModel, Output, check_logits
from specsamp.sampling.rng import RoundKeys
from specsamp.sampling.rules import Draft, Rule, TargetDistributions, Verdict

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A target, a drafter and a rule, all static; one compiled program per value of this and per shape.

    Attributes:
      window: the fewest tokens the target is fed per call. With one row a TPU's matrix unit is not
        used at all, so on a TPU the autoregressive loop is faster when it feeds one known token again
        (2); elsewhere it is not (1).
      keep_log_probs: record the target's log-probabilities of what is emitted.
      keep_rounds: record where rounds begin, so that texts can be cut and counted afterwards.
      shards: how rows are split over devices.
    """

    target: LanguageModel
    drafter: Drafter
    rule: Rule
    window: int = 1
    keep_log_probs: bool = False
    keep_rounds: bool = False
    shards: DataShards = DataShards()

    @property
    def headroom(self) -> int:
        """Returns the scratch slots beyond the longest allowed length: a finished row still drafts into them.

        An update that passed the end of a buffer would be moved back over what is committed.
        """
        return self.drafter.K + 1

    @property
    def depth(self) -> int:
        """Returns the most tokens of a draft that can be accepted."""
        depth = hooks_of(self.drafter).depth
        return self.drafter.K if depth is None else depth

    @functools.partial(jax.jit, static_argnames=("self", "slots", "num_samples", "chunk"))
    def prefill(
        self,
        weights: Weights,
        request: RequestBatch,
        tokens_BP: Array,
        lengths_B: Array,
        *,
        slots: int,
        num_samples: int = 1,
        chunk: int | None = None,
    ) -> DecodeState:
        """Reads the prompts once and copies the result to ``num_samples`` rows each.

        Args:
          weights: of target and draft, fit for ``slots`` slots.
          request: with ``B * num_samples`` rows; prompt i has rows ``i * num_samples`` and following.
          tokens_BP: prompts, padded on the right; padding is never seen.
          lengths_B: true lengths, at least 1.
          slots: of caches and token buffer: the largest limit plus `headroom`, at least P and `window`.
          num_samples: rows per prompt.
          chunk: tokens read per call, since attention holds scores of all of them; None reads all in one.
        """
        read = functools.partial(first_state, self, slots=slots, num_samples=num_samples, chunk=chunk)
        specs = (REPLICATED, BY_ROWS, BY_ROWS, BY_ROWS)
        return self.shards.map(read, specs)(weights, request, tokens_BP, lengths_B)

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
        """Reads longer texts into rows that hold the beginnings of them: what is there is not read again.

        Args:
          request: of the new texts.
          state: without its request; donated. None: of rows that hold nothing yet.
          tokens_BS: the whole texts, each beginning with ``start_B`` tokens that ``state`` has committed.
          start_B: int32, at most ``state.lengths_B - 2``, or 0: a draft may not have seen the token before the last.
          lengths_B: of the whole texts.
          chunk: tokens read per call; beyond the longest text there must be as many slots.
        """
        extend = functools.partial(next_state, self, chunk=chunk)
        specs = (REPLICATED, BY_ROWS, BY_ROWS, BY_ROWS, BY_ROWS, BY_ROWS)
        return self.shards.map(extend, specs)(weights, request, state, tokens_BS, start_B, lengths_B)

    @property
    def compiler_options(self) -> compiling.Options:
        """Returns what the target asks of the compiler; most ask nothing."""
        return self.target.compiler_options

    def run(
        self, weights: Weights, state: DecodeState, max_rounds: Array | int, min_running: Array | int = 1
    ) -> DecodeState:
        """Runs while at least ``min_running`` rows of all shards are running, and for at most ``max_rounds`` rounds.

        It can be called again; slicing a run does not change its result. ``state`` is donated, but for its request:
        no second copy of a cache is made.
        """
        request, state = state.request, dataclasses.replace(state, request=None)
        return dataclasses.replace(self.run_request(weights, request, state, max_rounds, min_running), request=request)

    @functools.partial(
        compiling.jit,
        options_of=lambda self, *_, **__: self.compiler_options,
        static_argnames="self",
        donate_argnames="state",
    )
    def run_request(
        self,
        weights: Weights,
        request: RequestBatch,
        state: DecodeState,
        max_rounds: Array | int,
        min_running: Array | int = 1,
    ) -> DecodeState:
        """Compiles and runs `run`, with the request beside the state that is donated."""
        specs = (REPLICATED, BY_ROWS, BY_ROWS, REPLICATED, REPLICATED)
        return self.shards.map(self._run, specs)(weights, request, state, max_rounds, min_running)

    def _run(
        self,
        weights: Weights,
        request: RequestBatch,
        state: DecodeState,
        max_rounds: Array | int,
        min_running: Array | int = 1,
    ) -> DecodeState:
        def go_on(carry: tuple[Array, DecodeState]) -> Array:
            rounds, state = carry
            return (rounds < max_rounds) & (self.shards.sum(jnp.sum(state.running_B)) >= jnp.maximum(min_running, 1))

        def body(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
            rounds, state = carry
            return rounds + 1, self.round(weights, request, state)

        first = jnp.zeros((), jnp.int32), state
        if request.adaptive is None:
            state = jax.lax.while_loop(go_on, body, first)[1]
        else:
            state = widths.run(self, weights, request, first, go_on)[1]
        # Devices may have sampled apart; the next run expects its state where this one found it.
        small = self.shards.replicate(dataclasses.replace(state, cache=None, drafter_state=None))
        return dataclasses.replace(small, cache=state.cache, drafter_state=self._replicate(state.drafter_state))

    def _replicate(self, drafter_state: Any) -> Any:
        """Replicates the drafter's state except its caches: the arrays whose shape depends on the number of slots."""
        if self.shards.mesh is None:
            return drafter_state
        few, many = (jax.eval_shape(functools.partial(self.drafter.init, 1, slots)) for slots in (256, 512))

        def replicate(x: Array, few: jax.ShapeDtypeStruct, many: jax.ShapeDtypeStruct) -> Array:
            return self.shards.replicate(x) if few.shape == many.shape else x

        return jax.tree.map(replicate, drafter_state, few, many)

    def insert(self, state: DecodeState, rows: DecodeState, at: Sequence[int]) -> DecodeState:
        """Writes ``rows`` over the rows ``at`` of ``state``, see `specsamp.decoding.batch_rows.insert`."""
        return batch_rows.insert(state, rows, at, self.shards)

    def extract(self, state: DecodeState, at: Sequence[int]) -> DecodeState:
        """Returns the rows ``at`` of ``state``, see `specsamp.decoding.batch_rows.extract`."""
        return batch_rows.extract(state, at, self.shards)

    def round(self, weights: Weights, request: RequestBatch, state: DecodeState) -> DecodeState:
        """Runs one round for all rows."""
        prefix = Prefix(tokens_BS=state.tokens_BS, lengths_B=state.lengths_B)
        with jax.named_scope("draft"):
            draft, drafter_state, cache = self.draft(weights, request, state)
        with jax.named_scope("score"):
            output = self.score(weights, state, draft, cache)
        with jax.named_scope("verify"):
            verdict = self.verify(request, state, draft, output)
        with jax.named_scope("commit"):
            drafter_state, cache = self.drafter.commit(
                weights, drafter_state, prefix, draft, verdict, output, output.cache
            )
            state = dataclasses.replace(state, cache=cache, drafter_state=drafter_state)
            return self.commit(request, state, draft, verdict, output)

    def draft(self, weights: Weights, request: RequestBatch, state: DecodeState) -> tuple[Draft, Any, Any]:
        """Asks the drafter; the rule owns the noise it draws with."""
        sampler = Sampler(
            warp=request.draft_sampling,
            rule=self.rule,
            keys=self._keys(request, state),
            warp_state=state.draft_warp_state,
            any_shard=self.shards.any,
            draft_lengths_B=None if request.adaptive is None else state.adaptive_state.draft_lengths_B,
            stop=None if request.adaptive is None else request.adaptive.stop,
        )
        prefix = Prefix(tokens_BS=state.tokens_BS, lengths_B=state.lengths_B)
        draft, drafter_state, cache = self.drafter.propose(weights, state.drafter_state, prefix, state.cache, sampler)
        if draft.parents_BK is not None:
            raise NotImplementedError("the loop scores chains only: token trees are not decoded yet")
        if request.adaptive is not None:  # of drafters that draw no chain, or copy one
            num_drafted_B = jnp.minimum(draft.num_drafted_B, state.adaptive_state.draft_lengths_B)
            draft = dataclasses.replace(draft, num_drafted_B=num_drafted_B)
        if draft.log_probs_BRV is not None:
            # A chain ends before the first distribution that is NaN. That depends on its context alone: no bias.
            sound_BR = ~jnp.isnan(draft.log_probs_BRV).any(-1)
            sound_B = jnp.sum(jnp.cumprod(sound_BR, axis=1), axis=1).astype(draft.num_drafted_B.dtype)
            draft = dataclasses.replace(draft, num_drafted_B=jnp.minimum(draft.num_drafted_B, sound_B))
        return draft, drafter_state, cache

    def score(self, weights: Weights, state: DecodeState, draft: Draft, cache: Any) -> Output:
        """Calls the target once; the result has a row for each of the K+1 positions."""
        rows = draft.tokens_BK.shape[1] + 1
        width = max(rows, self.window)
        start_B = jnp.maximum(state.lengths_B + rows - 1 - width, 0)
        if width == rows:
            pending_B1 = gather_tokens(state.tokens_BS, start_B, 1)
            tokens_BT = jnp.concatenate([pending_B1, draft.tokens_BK], axis=1)
        else:  # a window wider than the block feeds tokens again that the cache holds
            tokens_BS = write_tokens(state.tokens_BS, draft.tokens_BK, state.lengths_B)
            tokens_BT = gather_tokens(tokens_BS, start_B, width)
        output = self.target(
            weights.target,
            tokens_BT,
            start_B,
            cache,
            hidden_layers=self.drafter.hidden_layers,
        )
        check_logits("target", self.target, output)
        dtype = jnp.promote_types(output.logits_BTV.dtype, jnp.float32)
        output = dataclasses.replace(output, logits_BTV=output.logits_BTV.astype(dtype))
        if width == rows:
            return output
        # A window wider than the block: its first row of interest is the pending token's.
        first_B = state.lengths_B - 1 - start_B

        def cut(x_BT: Array) -> Array:
            return jax.vmap(lambda x, first: jax.lax.dynamic_slice_in_dim(x, first, rows, axis=0))(x_BT, first_B)

        return dataclasses.replace(
            output, logits_BTV=cut(output.logits_BTV), hidden=tuple(cut(hidden) for hidden in output.hidden)
        )

    def verify(self, request: RequestBatch, state: DecodeState, draft: Draft, output: Output) -> Verdict:
        """Applies the rule to the warped distributions."""
        target = _target_distributions(request, state, draft, output)
        return self.rule.verify(draft, target, self._keys(request, state))

    def commit(
        self, request: RequestBatch, state: DecodeState, draft: Draft, verdict: Verdict, output: Output
    ) -> DecodeState:
        """Appends what was emitted, see `specsamp.decoding.commit.append`."""
        return append(request, state, draft, verdict, _target_distributions(request, state, draft, output))

    def _keys(self, request: RequestBatch, state: DecodeState) -> RoundKeys:
        return RoundKeys(rows_B=request.row_keys_B, starts_B=state.lengths_B)


def decode_window() -> int:
    """Returns the fewest tokens per call that this platform likes: see `Loop.window`."""
    return 2 if jax.default_backend() == "tpu" else 1


def _target_distributions(
    request: RequestBatch, state: DecodeState, draft: Draft, output: Output
) -> TargetDistributions:
    return TargetDistributions(
        logits_BTV=output.logits_BTV, warp=request.sampling, draft=draft, warp_state=state.warp_state
    )
