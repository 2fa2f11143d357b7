"""Samples drafted tokens, and keeps the distributions that the rule verifies them with.

Whether a token is proposed must not depend on its value. With a target distribution of (.7, .3) and
a draft distribution of (.5, .5), a drafter that drops the second token whenever it was sampled
outputs (.85, .15). So `Sampler.chain` decides whether to draft token k + 1 after token k was
sampled, and before token k + 1 is sampled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.decoding.adaptive import Stop
from specsamp.pytrees import pytree
from specsamp.sampling.rng import RoundKeys
from specsamp.sampling.rules import Draft, Rule, at_tokens
from specsamp.sampling.warp import Greedy, Warp, chain, followed_by, is_stateless, log_probs

Array = jax.Array

EXCLUDED = 1e4  # subtracted from the log-probabilities of tokens that a warp excludes


@pytree
class Drawn:
    """The chain so far in a round; the last two fields are None if all rows draft all K tokens."""

    draft: Draft  # tokens that are not drawn yet are 0
    warp_state: Any  # after the last drawn token
    log_prob_B: Array | None = None  # float32, the sum over all tokens of the chain
    goes_on_B: Array | None = None  # bool, whether to draft another token in this row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """Samples tokens from a draft's logits and keeps the distributions for verification."""

    warp: Warp
    rule: Rule
    keys: RoundKeys
    warp_state: Any = ()  # after the pending token
    any_shard: Callable[[Array], Array] = jnp.asarray
    draft_lengths_B: Array | None = None  # int32, the most tokens to draft in each row; None: all K
    stop: Stop | None = None  # ends drafts earlier

    def with_warp(self, warp: Warp) -> Sampler:
        """Returns a sampler that also applies ``warp``, which has no state, after the warp of this
        sampler.
        """
        both, state = followed_by(self.warp, self.warp_state, warp)
        return dataclasses.replace(self, warp=both, warp_state=state)

    @property
    def is_one_hot(self) -> bool:
        """Returns whether sampling is statically greedy: one-hot distributions are not stored."""
        return any(isinstance(warp, Greedy) for warp in chain(self.warp).warps)

    def __call__(
        self, logits_BV: Array, offset: Array | int, *, warp_state: Any = None
    ) -> tuple[Array, Array | None]:
        """Draws a token of a chain per row.

        Args:
          logits_BV: the draft's, before warping.
          offset: number of drafted tokens before this token.
          warp_state: after these tokens, see `Warp.advance`; default: after the pending token.

        Returns:
          ``tokens_B`` int32, and the log-probabilities ``[B, V]`` that they were drawn from; None
          if sampling is statically greedy, which is the default of `generate`.
        """
        with jax.named_scope("sample"):
            warped_BV = log_probs(
                self.warp, logits_BV, self.warp_state if warp_state is None else warp_state
            )
            if self.is_one_hot:
                return jnp.argmax(warped_BV, axis=-1).astype(jnp.int32), None
            return self.rule.sample(warped_BV, self.keys, offset), warped_BV

    @property
    def takes_rows(self) -> bool:
        """Returns whether `rows` can draw: no token changes the warp, or ends its draft."""
        return is_stateless(self.warp_state) and self.stop is None

    def rows(self, logits_BKV: Array) -> Draft:
        """Draws a chain of K tokens at once, each from logits that do not depend on the others;
        they are those of `chain`.
        """
        K = logits_BKV.shape[1]
        num_drafted_B = jnp.full_like(self.keys.starts_B, K)
        if self.draft_lengths_B is not None:
            num_drafted_B = jnp.minimum(num_drafted_B, self.draft_lengths_B)
        with jax.named_scope("sample"):
            warped_BKV = log_probs(self.warp, logits_BKV)
            if self.is_one_hot:
                tokens_BK = jnp.argmax(warped_BKV, axis=-1).astype(jnp.int32)
                return Draft(tokens_BK=tokens_BK, num_drafted_B=num_drafted_B)
            draw = jax.vmap(self.rule.sample, in_axes=(1, None, 0), out_axes=1)
            return Draft(
                tokens_BK=draw(warped_BKV, self.keys, jnp.arange(K)),
                num_drafted_B=num_drafted_B,
                log_probs_BRV=warped_BKV,
            )

    def siblings(
        self, logits_BPV: Array, families_PC: np.ndarray, *, depth: Array | int, warp_state: Any
    ) -> tuple[Array, Array | None]:
        """Draws the children of P rows of a token tree.

        Args:
          logits_BPV: the draft's after each row, before warping; or P = 1, the same logits for all
            rows.
          families_PC: the nodes of the children; -1 where a row has fewer children.
          depth: number of drafted tokens before the children.
          warp_state: ``[B, P, ...]``, after the path to each row.

        Returns:
          ``tokens_BPC`` int32, and the log-probabilities that they were drawn from, shaped as the
          logits; None if the children are the draft's most probable tokens: under statically greedy
          sampling, or if ``rule.chooses``.
        """
        count, width = families_PC.shape
        with jax.named_scope("sample"):
            if is_stateless(warp_state):
                warped_BPV = log_probs(self.warp, logits_BPV)
            else:
                logits_BPV = jnp.broadcast_to(
                    logits_BPV, (len(logits_BPV), count, logits_BPV.shape[-1])
                )
                warped_BPV = jax.vmap(
                    functools.partial(log_probs, self.warp), in_axes=1, out_axes=1
                )(logits_BPV, warp_state)
            if self.is_one_hot or self.rule.chooses:
                # Where a warp leaves fewer tokens than children, the rest are the best tokens
                # before warping.
                others_BPV = (
                    jax.nn.log_softmax(logits_BPV.astype(warped_BPV.dtype), axis=-1) - EXCLUDED
                )
                _, tokens = jax.lax.top_k(
                    jnp.where(warped_BPV > -jnp.inf, warped_BPV, others_BPV), width
                )
                return jnp.broadcast_to(tokens, (len(tokens), count, width)).astype(jnp.int32), None
            each_BPV = jnp.broadcast_to(warped_BPV, (len(warped_BPV), count, warped_BPV.shape[-1]))
            return self.rule.siblings(
                each_BPV, self.keys, nodes_PC=families_PC, depth=depth
            ), warped_BPV

    def advance_all(self, warp_states: Any, tokens_BP: Array) -> Any:
        """Returns the warp's states ``[B, P, ...]`` after one more token each."""
        if is_stateless(warp_states):
            return warp_states
        return jax.vmap(self.warp.advance, in_axes=1, out_axes=1)(warp_states, tokens_BP)

    def chain(
        self,
        K: int,
        logits_BV: Array,
        step: Callable[[Array, Array, Any], tuple[Array, Any]],
        carry: Any,
    ) -> tuple[Draft, Any]:
        """Draws up to K tokens per row, one after the other; ends once all drafts on all data
        shards have ended.

        Args:
          logits_BV: of the draft, after the pending token.
          step: ``(offset, token_B, carry) -> (logits_BV, carry)``: the logits after the last drawn
            token, of which there are ``offset``. It calls the draft model.
          carry: the drafter's own part of the loop's carry.

        Returns:
          The draft, and the carry.
        """

        def goes_on(state):
            calls, drawn, _ = state  # the number of drawn tokens, these, the drafter's carry
            if drawn.goes_on_B is None:
                return calls < K - 1  # compile reports read how often the loop runs
            return (calls < K - 1) & self.any_shard(jnp.any(drawn.goes_on_B))

        def another(state):
            calls, drawn, carry = state
            last_B = jax.lax.dynamic_index_in_dim(
                drawn.draft.tokens_BK, calls, axis=1, keepdims=False
            )
            offset = calls + 1
            logits_BV, carry = step(offset, last_B, carry)
            return offset, self.draw(logits_BV, offset, drawn), carry

        first = self.draw(logits_BV, 0, self.begin(K))
        start = jnp.zeros((), jnp.int32), first, carry
        _, drawn, carry = jax.lax.while_loop(goes_on, another, start)
        return drawn.draft, carry

    def begin(self, K: int) -> Drawn:
        """Returns a chain of no tokens, with places for K."""
        starts_B, lengths_B = self.keys.starts_B, self.draft_lengths_B
        draft = Draft(
            tokens_BK=jnp.zeros((len(starts_B), K), jnp.int32),
            num_drafted_B=jnp.full_like(starts_B, K if lengths_B is None else 0),
        )
        drawn = Drawn(draft=draft, warp_state=self.warp_state)
        if lengths_B is None:
            return drawn
        nothing_B = jnp.zeros(starts_B.shape, jnp.float32)
        return dataclasses.replace(drawn, log_prob_B=nothing_B, goes_on_B=lengths_B > 0)

    def draw(self, logits_BV: Array, offset: Array | int, drawn: Drawn) -> Drawn:
        """Returns the chain with one more token, drawn from the logits after the first ``offset``
        tokens.

        Whether to submit this token was decided before sampling it; its value may only cancel later
        tokens.
        """
        tokens_B, log_probs_BV = self(logits_BV, offset, warp_state=drawn.warp_state)

        def put(x_BK, new_B):
            return jax.lax.dynamic_update_index_in_dim(x_BK, new_B, offset, axis=1)

        draft = drawn.draft
        log_probs_BRV = draft.log_probs_BRV
        if log_probs_BV is not None:
            if log_probs_BRV is None:
                batch, vocab_size = log_probs_BV.shape
                log_probs_BRV = jnp.zeros(
                    (batch, draft.tokens_BK.shape[1], vocab_size), log_probs_BV.dtype
                )
            log_probs_BRV = put(log_probs_BRV, log_probs_BV)
        after = dataclasses.replace(
            drawn,
            draft=dataclasses.replace(
                draft, tokens_BK=put(draft.tokens_BK, tokens_B), log_probs_BRV=log_probs_BRV
            ),
            warp_state=self.warp.advance(drawn.warp_state, tokens_B),
        )
        if self.draft_lengths_B is None:
            return after
        return self._decide(drawn, after, logits_BV, log_probs_BV, tokens_B)

    def _decide(
        self,
        before: Drawn,
        after: Drawn,
        logits_BV: Array,
        log_probs_BV: Array | None,
        tokens_B: Array,
    ) -> Drawn:
        """Counts the drawn token, unless the row's draft had ended, and decides whether to draft
        another.
        """
        num_drafted_B = before.draft.num_drafted_B + before.goes_on_B
        goes_on_B = before.goes_on_B & (num_drafted_B < self.draft_lengths_B)
        log_prob_B = before.log_prob_B
        if self.stop is not None:
            seen_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32), axis=-1)
            if log_probs_BV is not None:  # the warped distribution of a greedy row is one-hot
                is_greedy_B1 = log_probs_BV.max(-1, keepdims=True) == 0
                seen_BV = jnp.where(is_greedy_B1, seen_BV, log_probs_BV.astype(jnp.float32))
            log_prob_B += at_tokens(seen_BV, tokens_B)
            goes_on_B &= self.stop.goes_on(seen_BV, log_prob_B)
        return dataclasses.replace(
            after,
            draft=dataclasses.replace(after.draft, num_drafted_B=num_drafted_B),
            log_prob_B=log_prob_B,
            goes_on_B=goes_on_B,
        )
