"""Decoding is one loop: draft -> score -> verify -> commit, in a `lax.while_loop` under one `jax.jit`.

Autoregressive decoding is the same loop with an empty draft. A row has ``length`` committed tokens,
the last of them pending. A round with a draft of K tokens feeds the target

    [pending, d_1 .. d_K]   from slot  length - 1

reads K+1 distributions off that one call, lets the rule keep ``n`` drafted tokens and append one of the
target's, and moves the length to ``length + n + 1``. Nothing else is undone: slots written for
refused tokens are stale, masked by position, and overwritten by the next round. Rows differ in
length, parameters, acceptance and end; a finished row goes on computing into scratch slots beyond its
length, which changes nothing that is kept.

The loop is exact for whatever target it is given: the emitted tokens follow the warped distribution of
`LanguageModel.__call__`, computed in float32 from its logits.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.decoding.tokens import gather_tokens, write_tokens
from specsamp.decoding.types import (
    DecodeState,
    Draft,
    Drafter,
    Finish,
    LanguageModel,
    OneShare,
    Output,
    Request,
    Rule,
    Sampler,
    Shares,
    Stats,
    Verdict,
    Weights,
)
from specsamp.models import compiling
from specsamp.models.compiling import Options
from specsamp.models.interface import check_logits
from specsamp.sampling.rng import RoundKeys
from specsamp.sampling.warp import log_probs

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A target, a drafter and a rule, all static; one compiled program per value of this and per shape.

    Attributes:
      window: the fewest tokens the target is fed per call. With one row a TPU's matrix unit is not
        used at all, so on a TPU the autoregressive loop is faster when it feeds one known token again
        (2); elsewhere it is not (1).
      keep_log_probs: record the target's log-probabilities of what is emitted.
      shares: how rows are shared out over devices.
    """

    target: LanguageModel
    drafter: Drafter
    rule: Rule
    window: int = 1
    keep_log_probs: bool = False
    shares: Shares = OneShare()

    @property
    def headroom(self) -> int:
        """Scratch slots beyond the longest allowed length: a finished row still drafts into them.

        An update that passed the end of a buffer would be moved back over what is committed.
        """
        return self.drafter.K + 1

    @functools.partial(jax.jit, static_argnames=("self", "slots", "num_samples"))
    def prefill(
        self,
        weights: Weights,
        request: Request,
        tokens_BP: Array,
        lengths_B: Array,
        *,
        slots: int,
        num_samples: int = 1,
    ) -> DecodeState:
        """Reads the prompts once and copies the result to ``num_samples`` rows each.

        Args:
          weights: of target and draft, prepared for ``slots`` slots.
          request: with ``B * num_samples`` rows; prompt i has rows ``i * num_samples`` and following.
          tokens_BP: prompts, padded on the right; padding is never seen.
          lengths_B: true lengths, at least 1.
          slots: of caches and token buffer: the largest limit plus `headroom`, at least P and `window`.
          num_samples: rows per prompt.
        """
        read = functools.partial(self._prefill, slots=slots, num_samples=num_samples)
        by_rows = (False, Request.by_rows(), True, True)
        return self.shares(read, by_rows)(weights, request, tokens_BP, lengths_B)

    def _prefill(
        self, weights: Weights, request: Request, tokens_BP: Array, lengths_B: Array, *, slots: int, num_samples: int
    ) -> DecodeState:
        batch, padded_length = tokens_BP.shape
        with jax.named_scope("prefill"):
            start_B = jnp.zeros_like(lengths_B)
            output = self.target(
                weights.target,
                tokens_BP,
                start_B,
                self.target.init_cache(batch, slots),
                hidden_layers=self.drafter.hidden_layers,
            )
            check_logits("target", self.target, output)
            drafter_state, cache = self.drafter.init(weights, tokens_BP, lengths_B, slots, output, output.cache)

        def copy(tree):
            return jax.tree.map(lambda x: jnp.repeat(x, num_samples, axis=0), tree)

        rows = batch * num_samples
        lengths_B = copy(lengths_B)

        def empty(dtype):
            return jnp.zeros((rows, slots), dtype)

        return DecodeState(
            tokens_BS=jnp.pad(copy(tokens_BP), ((0, 0), (0, slots - padded_length))),
            lengths_B=lengths_B,
            finish_B=jnp.where(lengths_B < request.limits_B, Finish.RUNNING, Finish.LENGTH).astype(jnp.int32),
            from_draft_BS=empty(bool),
            log_probs_BS=empty(jnp.float32) if self.keep_log_probs else None,
            cache=copy(cache),
            drafter_state=copy(drafter_state),
            stats=Stats.zeros(rows, self.drafter.K),
        )

    @property
    def compiler_options(self) -> Options:
        """What the target asks of the compiler; most ask nothing."""
        return getattr(self.target, "compiler_options", ())

    @functools.partial(
        compiling.jit,
        options_of=lambda self, *_, **__: self.compiler_options,
        static_argnames="self",
        donate_argnames="state",
    )
    def run(self, weights: Weights, request: Request, state: DecodeState, max_rounds: Array | int) -> DecodeState:
        """Runs until every row has ended, or for ``max_rounds`` rounds; then it can be called again.

        ``state`` is donated: caches are updated in write_tokens. Slicing a run does not change its result.
        """
        by_rows = (False, Request.by_rows(), True, False)
        return self.shares(self._run, by_rows)(weights, request, state, max_rounds)

    def _run(self, weights: Weights, request: Request, state: DecodeState, max_rounds: Array | int) -> DecodeState:
        def unfinished(carry: tuple[Array, DecodeState]) -> Array:
            rounds, state = carry
            return (rounds < max_rounds) & self.shares.any(jnp.any(state.running_B))

        def body(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
            rounds, state = carry
            return rounds + 1, self.round(weights, request, state)

        state = jax.lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), state))[1]
        # Devices may have sampled apart; the next run expects its state where this one found it.
        small = self.shares.whole(dataclasses.replace(state, cache=None, drafter_state=None))
        return dataclasses.replace(small, cache=state.cache, drafter_state=state.drafter_state)

    def round(self, weights: Weights, request: Request, state: DecodeState) -> DecodeState:
        """One round for all rows."""
        with jax.named_scope("draft"):
            draft, drafter_state, cache = self.draft(weights, request, state)
        with jax.named_scope("score"):
            output = self.score(weights, state, draft, cache)
        with jax.named_scope("verify"):
            verdict = self.verify(request, state, draft, output)
        with jax.named_scope("commit"):
            drafter_state, cache = self.drafter.commit(weights, drafter_state, draft, verdict, output, output.cache)
            state = dataclasses.replace(state, cache=cache, drafter_state=drafter_state)
            return self.commit(request, state, draft, verdict, output)

    def draft(self, weights: Weights, request: Request, state: DecodeState) -> tuple[Draft, Any, Any]:
        """Asks the drafter; the rule owns the noise it draws with."""
        sampler = Sampler(request.draft_sampling, self.rule.draw_draft(self._keys(request, state)))
        draft, drafter_state, cache = self.drafter.propose(
            weights, state.drafter_state, state.tokens_BS, state.lengths_B, state.cache, sampler
        )
        if draft.log_probs_BKV is not None:
            # A draft ends before the first distribution that is NaN. That depends on its context alone, so it biases nothing.
            sound_BK = ~jnp.isnan(draft.log_probs_BKV).any(-1)
            sound_B = jnp.sum(jnp.cumprod(sound_BK, axis=1), axis=1).astype(draft.num_drafted_B.dtype)
            draft = dataclasses.replace(draft, num_drafted_B=jnp.minimum(draft.num_drafted_B, sound_B))
        return draft, drafter_state, cache

    def score(self, weights: Weights, state: DecodeState, draft: Draft, cache: Any) -> Output:
        """One call of the target; the result has a row for each of the K+1 positions."""
        rows = draft.tokens_BK.shape[1] + 1
        width = max(rows, self.window)
        tokens_BS = write_tokens(state.tokens_BS, draft.tokens_BK, state.lengths_B)
        start_B = jnp.maximum(state.lengths_B + rows - 1 - width, 0)
        output = self.target(
            weights.target,
            gather_tokens(tokens_BS, start_B, width),
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
        cut = jax.vmap(lambda x, first: jax.lax.dynamic_slice_in_dim(x, first, rows, axis=0))
        return dataclasses.replace(
            output,
            logits_BTV=cut(output.logits_BTV, first_B),
            hidden=tuple(cut(hidden, first_B) for hidden in output.hidden),
        )

    def verify(self, request: Request, state: DecodeState, draft: Draft, output: Output) -> Verdict:
        """Applies the rule to the warped distributions."""
        return self.rule.verify(draft, log_probs(request.sampling, output.logits_BTV), self._keys(request, state))

    def commit(
        self, request: Request, state: DecodeState, draft: Draft, verdict: Verdict, output: Output
    ) -> DecodeState:
        """Appends what was emitted, cut at the first stop token and at the row's budget."""
        tokens_BT = verdict.tokens_BT
        positions = jnp.arange(tokens_BT.shape[1])[None, :]
        is_stop_BT = jnp.any(tokens_BT[..., None] == request.stop_ids[None, None, :], axis=-1)
        is_stop_BT &= positions < verdict.num_emitted_B[:, None]
        until_stop_B = jnp.where(is_stop_BT.any(1), jnp.argmax(is_stop_BT, axis=1) + 1, tokens_BT.shape[1])
        room_B = request.limits_B - state.lengths_B
        wanted_B = jnp.minimum(jnp.minimum(verdict.num_emitted_B, until_stop_B), room_B)
        # A token is as good as the distribution it was verified by: nothing is emitted from the first row on that
        # holds NaN or +inf, or nothing but -inf.
        valid_BT = jnp.isfinite(output.logits_BTV.max(-1))
        count_B = jnp.minimum(wanted_B, jnp.sum(jnp.cumprod(valid_BT, axis=1), axis=1))
        valid_B = count_B == wanted_B
        count_B = jnp.where(state.running_B, count_B, 0).astype(jnp.int32)
        stopped_B = jnp.any(is_stop_BT & (positions < count_B[:, None]), axis=1)
        lengths_B = state.lengths_B + count_B
        ending_B = jnp.where(stopped_B, Finish.STOP, jnp.where(count_B < room_B, Finish.RUNNING, Finish.LENGTH))
        ending_B = jnp.where(valid_B, ending_B, Finish.INVALID)

        def put(buffer_BS, block_BT):
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
        )

    def _keys(self, request: Request, state: DecodeState) -> RoundKeys:
        return RoundKeys(rows_B=request.row_keys_B, starts_B=state.lengths_B)


def decode_window() -> int:
    """The fewest tokens per call that this platform likes: see `Loop.window`."""
    return 2 if jax.default_backend() == "tpu" else 1


def _count(stats: Stats, running_B: Array, draft: Draft, verdict: Verdict, count_B: Array) -> Stats:
    num_tokens = draft.tokens_BK.shape[1]
    active_B = (running_B & (count_B > 0)).astype(jnp.int32)  # a round without a token was not valid
    accepted_B = jnp.minimum(verdict.num_accepted_B, count_B)
    judged_B = jnp.minimum(jnp.minimum(draft.num_drafted_B, verdict.num_emitted_B), count_B)
    drafted_B = jnp.where(count_B < verdict.num_emitted_B, judged_B, draft.num_drafted_B)
    num_verified_BK = jnp.arange(num_tokens)[None, :] < judged_B[:, None]
    outcome_BT = jnp.arange(num_tokens + 1)[None, :] == accepted_B[:, None]
    new = Stats(
        rounds_B=active_B,
        emitted_B=count_B,
        drafted_B=active_B * drafted_B,
        num_verified_BK=active_B[:, None] * num_verified_BK,
        accepted_BT=active_B[:, None] * outcome_BT,
    )
    return jax.tree.map(lambda total, more: total + more.astype(total.dtype), stats, new)
