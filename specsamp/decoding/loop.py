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

from specsamp.decoding import batch_rows
from specsamp.decoding.data_shards import BY_ROWS, REPLICATED, DataShards
from specsamp.decoding.drafter import Drafter, Prefix, Sampler
from specsamp.decoding.state import DecodeState, Finish, Request, Stats, Weights
from specsamp.decoding.tokens import gather_tokens, write_tokens
from specsamp.models import compiling
from specsamp.models.interface import LanguageModel, Output, check_logits
from specsamp.sampling.rng import RoundKeys
from specsamp.sampling.rules import Draft, Rule, TargetDistributions, Verdict
from specsamp.sampling.warp import Warp, is_stateless

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A target, a drafter and a rule, all static; one compiled program per value of this and per shape.

    Attributes:
      window: the fewest tokens the target is fed per call. With one row a TPU's matrix unit is not
        used at all, so on a TPU the autoregressive loop is faster when it feeds one known token again
        (2); elsewhere it is not (1).
      keep_log_probs: record the target's log-probabilities of what is emitted.
      shards: how rows are split over devices.
    """

    target: LanguageModel
    drafter: Drafter
    rule: Rule
    window: int = 1
    keep_log_probs: bool = False
    shards: DataShards = DataShards()

    @property
    def headroom(self) -> int:
        """Scratch slots beyond the longest allowed length: a finished row still drafts into them.

        An update that passed the end of a buffer would be moved back over what is committed.
        """
        return self.drafter.K + 1

    @functools.partial(jax.jit, static_argnames=("self", "slots", "num_samples", "chunk"))
    def prefill(
        self,
        weights: Weights,
        request: Request,
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
        read = functools.partial(self._prefill, slots=slots, num_samples=num_samples, chunk=chunk)
        specs = (REPLICATED, BY_ROWS, BY_ROWS, BY_ROWS)
        return self.shards.map(read, specs)(weights, request, tokens_BP, lengths_B)

    def _prefill(
        self,
        weights: Weights,
        request: Request,
        tokens_BP: Array,
        lengths_B: Array,
        *,
        slots: int,
        num_samples: int,
        chunk: int | None = None,
    ) -> DecodeState:
        batch, padded_length = tokens_BP.shape
        with jax.named_scope("prefill"):
            cache, drafter_state = self._read_prompts(weights, tokens_BP, lengths_B, slots, chunk)

        def copy(tree: Any) -> Any:
            return jax.tree.map(lambda x: jnp.repeat(x, num_samples, axis=0), tree)

        def empty(dtype: Any) -> Array:
            return jnp.zeros((batch * num_samples, slots), dtype)

        tokens_RP, lengths_B = copy(tokens_BP), copy(lengths_B)
        return DecodeState(
            tokens_BS=jnp.pad(tokens_RP, ((0, 0), (0, slots - padded_length))),
            lengths_B=lengths_B,
            finish_B=jnp.where(lengths_B < request.limits_B, Finish.RUNNING, Finish.LENGTH).astype(jnp.int32),
            from_draft_BS=empty(bool),
            log_probs_BS=empty(jnp.float32) if self.keep_log_probs else None,
            cache=copy(cache),
            drafter_state=copy(drafter_state),
            stats=Stats.zeros(batch * num_samples, self.drafter.max_accepted),
            request=request,
            warp_state=request.sampling.init(tokens_RP, lengths_B),
            draft_warp_state=request.draft_sampling.init(tokens_RP, lengths_B),
        )

    def _read_prompts(
        self, weights: Weights, tokens_BP: Array, lengths_B: Array, slots: int, chunk: int | None
    ) -> tuple[Any, Any]:
        """Feeds the prompts to target and drafter, ``chunk`` tokens at a time; returns both memories."""
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk must be at least 1; got {chunk}")
        batch, padded_length = tokens_BP.shape

        def read(tokens_BT: Array, start: Array | int, cache: Any, drafter_state: Any) -> tuple[Any, Any]:
            start_B = jnp.full_like(lengths_B, start)
            output = self.target(weights.target, tokens_BT, start_B, cache, hidden_layers=self.drafter.hidden_layers)
            check_logits("target", self.target, output)
            drafter_state, cache = self.drafter.read(
                weights, drafter_state, tokens_BT, start_B, lengths_B, output, output.cache
            )
            return cache, drafter_state

        memories = self.target.init_cache(batch, slots), self.drafter.init(batch, slots)
        if chunk is None or chunk >= padded_length:
            return read(tokens_BP, 0, *memories)

        def read_chunk(index: Array, memories: tuple[Any, Any]) -> tuple[Any, Any]:
            tokens_BT = jax.lax.dynamic_slice_in_dim(tokens_BP, index * chunk, chunk, axis=1)
            return read(tokens_BT, index * chunk, *memories)

        whole = padded_length // chunk
        memories = jax.lax.fori_loop(0, whole, read_chunk, memories)
        rest_BT = tokens_BP[:, whole * chunk :]
        return read(rest_BT, whole * chunk, *memories) if rest_BT.shape[1] else memories

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
        request: Request,
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
        request: Request,
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

        state = jax.lax.while_loop(go_on, body, (jnp.zeros((), jnp.int32), state))[1]
        # Devices may have sampled apart; the next run expects its state where this one found it.
        small = self.shards.replicate(dataclasses.replace(state, cache=None, drafter_state=None))
        drafter_state = self.drafter.pin(state.drafter_state, self.shards.replicate)
        return dataclasses.replace(small, cache=state.cache, drafter_state=drafter_state)

    def insert(self, state: DecodeState, rows: DecodeState, at: Sequence[int]) -> DecodeState:
        """Writes ``rows`` over the rows ``at`` of ``state``, see `specsamp.decoding.batch_rows.insert`."""
        return batch_rows.insert(state, rows, at, self.shards)

    def extract(self, state: DecodeState, at: Sequence[int]) -> DecodeState:
        """Returns the rows ``at`` of ``state``, see `specsamp.decoding.batch_rows.extract`."""
        return batch_rows.extract(state, at, self.shards)

    def round(self, weights: Weights, request: Request, state: DecodeState) -> DecodeState:
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

    def draft(self, weights: Weights, request: Request, state: DecodeState) -> tuple[Draft, Any, Any]:
        """Asks the drafter; the rule owns the noise it draws with."""
        sampler = Sampler(
            warp=request.draft_sampling,
            rule=self.rule,
            keys=self._keys(request, state),
            warp_state=state.draft_warp_state,
            any_shard=self.shards.any,
        )
        prefix = Prefix(tokens_BS=state.tokens_BS, lengths_B=state.lengths_B)
        draft, drafter_state, cache = self.drafter.propose(weights, state.drafter_state, prefix, state.cache, sampler)
        if draft.parents_BK is not None:
            raise NotImplementedError("the loop scores chains only: token trees are not decoded yet")
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

    def verify(self, request: Request, state: DecodeState, draft: Draft, output: Output) -> Verdict:
        """Applies the rule to the warped distributions."""
        target = _target_distributions(request, state, draft, output)
        return self.rule.verify(draft, target, self._keys(request, state))

    def commit(
        self, request: Request, state: DecodeState, draft: Draft, verdict: Verdict, output: Output
    ) -> DecodeState:
        """Appends what was emitted, cut at the first stop token and at the row's budget."""
        tokens_BT = verdict.tokens_BT
        positions = jnp.arange(tokens_BT.shape[1])[None, :]
        is_stop_BT = jnp.any(tokens_BT[..., None] == request.stop_ids_BN[:, None, :], axis=-1)
        is_stop_BT &= positions < verdict.num_emitted_B[:, None]
        until_stop_B = jnp.where(is_stop_BT.any(1), jnp.argmax(is_stop_BT, axis=1) + 1, tokens_BT.shape[1])
        room_B = request.limits_B - state.lengths_B
        wanted_B = jnp.minimum(jnp.minimum(verdict.num_emitted_B, until_stop_B), room_B)
        # Emit nothing from the first position with invalid logits (NaN, +inf, or all -inf).
        valid_BT = jnp.isfinite(output.logits_BTV.max(-1))
        if not is_stateless(state.warp_state):  # a grammar may exclude every token
            target = _target_distributions(request, state, draft, output)
            valid_BT &= ~jnp.isnan(target.all()).any(-1)
        count_B = jnp.minimum(wanted_B, jnp.sum(jnp.cumprod(valid_BT, axis=1), axis=1))
        valid_B = count_B == wanted_B
        count_B = jnp.where(state.running_B, count_B, 0).astype(jnp.int32)
        stopped_B = jnp.any(is_stop_BT & (positions < count_B[:, None]), axis=1)
        lengths_B = state.lengths_B + count_B
        ending_B = jnp.where(stopped_B, Finish.STOP, jnp.where(count_B < room_B, Finish.RUNNING, Finish.LENGTH))
        ending_B = jnp.where(valid_B, ending_B, Finish.INVALID)

        def put(buffer_BS: Array, block_BT: Array) -> Array:
            return write_tokens(buffer_BS, block_BT, state.lengths_B, count_B)

        if state.log_probs_BS is not None:
            at_token_BT = jnp.take_along_axis(
                jax.nn.log_softmax(output.logits_BTV, axis=-1), jnp.maximum(tokens_BT, 0)[..., None], axis=-1
            )[..., 0]
            state = dataclasses.replace(state, log_probs_BS=put(state.log_probs_BS, at_token_BT))
        return dataclasses.replace(
            state,
            tokens_BS=put(state.tokens_BS, tokens_BT),
            from_draft_BS=put(state.from_draft_BS, positions < verdict.num_accepted_B[:, None]),
            lengths_B=lengths_B,
            finish_B=jnp.where(state.running_B, ending_B, state.finish_B).astype(jnp.int32),
            stats=_count(state.stats, state.running_B, draft, verdict, count_B),
            warp_state=_advance(request.sampling, state.warp_state, tokens_BT, count_B),
            draft_warp_state=_advance(request.draft_sampling, state.draft_warp_state, tokens_BT, count_B),
        )

    def _keys(self, request: Request, state: DecodeState) -> RoundKeys:
        return RoundKeys(rows_B=request.row_keys_B, starts_B=state.lengths_B)


def decode_window() -> int:
    """Returns the fewest tokens per call that this platform likes: see `Loop.window`."""
    return 2 if jax.default_backend() == "tpu" else 1


def _target_distributions(request: Request, state: DecodeState, draft: Draft, output: Output) -> TargetDistributions:
    return TargetDistributions(
        logits_BTV=output.logits_BTV, warp=request.sampling, draft=draft, warp_state=state.warp_state
    )


def _advance(warp: Warp, warp_state: Any, tokens_BT: Array, count_B: Array) -> Any:
    """Returns the state of ``warp`` after the first ``count_B`` of ``tokens_BT``."""
    if is_stateless(warp_state):
        return warp_state
    for t in range(tokens_BT.shape[1]):
        emitted_B = t < count_B
        following = warp.advance(warp_state, jnp.maximum(tokens_BT[:, t], 0))

        def choose(new: Array, old: Array, emitted_B: Array = emitted_B) -> Array:
            return jnp.where(emitted_B.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)

        warp_state = jax.tree.map(choose, following, warp_state)
    return warp_state


def _count(stats: Stats, running_B: Array, draft: Draft, verdict: Verdict, count_B: Array) -> Stats:
    depth = draft.max_accepted
    active_B = (running_B & (count_B > 0)).astype(jnp.int32)  # a round without a token was not valid
    accepted_B = jnp.minimum(verdict.num_accepted_B, count_B)
    num_verified_B = jnp.minimum(jnp.minimum(draft.num_drafted_B, verdict.num_emitted_B), count_B)
    drafted_B = jnp.where(count_B < verdict.num_emitted_B, num_verified_B, draft.num_drafted_B)
    verified_BK = jnp.arange(depth)[None, :] < num_verified_B[:, None]
    outcome_BT = jnp.arange(depth + 1)[None, :] == accepted_B[:, None]
    new = Stats(
        rounds_B=active_B,
        emitted_B=count_B,
        drafted_B=active_B * drafted_B,
        num_verified_BK=active_B[:, None] * verified_BK,
        accepted_BT=active_B[:, None] * outcome_BT,
    )
    return jax.tree.map(lambda total, more: total + more.astype(total.dtype), stats, new)
