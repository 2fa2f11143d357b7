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
from specsamp.sampling.rng import RoundKeys
from specsamp.sampling.rules import Draft, Rule
from specsamp.sampling.warp import Chain, Greedy, Warp, followed_by, is_stateless, log_probs

Array = jax.Array

EXCLUDED = 1e4  # subtracted from the log-probabilities of tokens that a warp excludes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """The chain so far in a round; the last three fields are None if all rows draft all K
    tokens.
    """

    # The distributions; None if they are one-hot, and before the first token.
    log_probs_BRV: Array | None = None
    warp_state: Any = ()  # after the last drawn token
    num_drafted_B: Array | None = None  # int32
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
        warps = self.warp.warps if isinstance(self.warp, Chain) else (self.warp,)
        return any(isinstance(warp, Greedy) for warp in warps)

    def __call__(
        self,
        logits_BV: Array,
        node: Array | int,
        *,
        depth: Array | int | None = None,
        warp_state: Any = None,
    ) -> tuple[Array, Array | None]:
        """Draws a token per row.

        Args:
          logits_BV: the draft's, before warping.
          node: index of the drafted node, 0 for the first.
          depth: number of drafted tokens before this node on its path; default ``node``, as in a
            chain.
          warp_state: after the path to this node, see `Warp.advance`; default: after the pending
            token.

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
            depth = node if depth is None else depth
            return self.rule.sample(warped_BV, self.keys, node=node, depth=depth), warped_BV

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
        first: Callable[[int, Any, Drawn], tuple[Any, Drawn]],
        step: Callable[[Array, Any, Drawn], tuple[Any, Drawn]],
        carry: Any,
    ) -> tuple[Any, Drawn]:
        """Draws up to K tokens per row, one after the other; ends once all drafts on all data
        shards have ended.

        Args:
          first, step: ``(offset, carry, drawn) -> (carry, drawn)``, for the first token and for
            every other token. Each calls the draft model and then `draw` once.
          carry: the drafter's own part of the loop's carry.
        """
        both = first(0, carry, self.begin())
        if self.draft_lengths_B is None:
            return jax.lax.fori_loop(1, K, lambda offset, both: step(offset, *both), both)

        def goes_on(state: tuple[Array, tuple[Any, Drawn]]) -> Array:
            offset, (_, drawn) = state
            return (offset < K) & self.any_shard(jnp.any(drawn.goes_on_B))

        def another(state: tuple[Array, tuple[Any, Drawn]]) -> tuple[Array, tuple[Any, Drawn]]:
            offset, both = state
            return offset + 1, step(offset, *both)

        return jax.lax.while_loop(goes_on, another, (jnp.ones((), jnp.int32), both))[1]

    def begin(self) -> Drawn:
        """Returns a chain of no tokens."""
        if self.draft_lengths_B is None:
            return Drawn(warp_state=self.warp_state)
        nothing_B = jnp.zeros_like(self.draft_lengths_B)
        return Drawn(
            warp_state=self.warp_state,
            num_drafted_B=nothing_B,
            log_prob_B=nothing_B.astype(jnp.float32),
            goes_on_B=self.draft_lengths_B > 0,
        )

    def draw(
        self, logits_BV: Array, offset: Array | int, drawn: Drawn, K: int
    ) -> tuple[Array, Drawn]:
        """Draws the token at ``offset`` of a chain of K; returns ``tokens_B`` and the longer chain.

        Whether to submit this token was decided before sampling it; its value may only cancel later
        tokens.
        """
        tokens_B, log_probs_BV = self(logits_BV, offset, warp_state=drawn.warp_state)
        log_probs_BRV = drawn.log_probs_BRV
        if log_probs_BV is not None:
            if log_probs_BRV is None:
                log_probs_BRV = jnp.zeros(
                    (len(tokens_B), K, log_probs_BV.shape[-1]), log_probs_BV.dtype
                )
            log_probs_BRV = jax.lax.dynamic_update_index_in_dim(
                log_probs_BRV, log_probs_BV, offset, axis=1
            )
        after = dataclasses.replace(
            drawn,
            log_probs_BRV=log_probs_BRV,
            warp_state=self.warp.advance(drawn.warp_state, tokens_B),
        )
        return tokens_B, after if self.draft_lengths_B is None else self._decide(
            drawn, after, logits_BV, log_probs_BV, tokens_B
        )

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
        num_drafted_B = before.num_drafted_B + before.goes_on_B
        goes_on_B = before.goes_on_B & (num_drafted_B < self.draft_lengths_B)
        log_prob_B = before.log_prob_B
        if self.stop is not None:
            seen_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32), axis=-1)
            if log_probs_BV is not None:  # the warped distribution of a greedy row is one-hot
                is_greedy_B1 = log_probs_BV.max(-1, keepdims=True) == 0
                seen_BV = jnp.where(is_greedy_B1, seen_BV, log_probs_BV.astype(jnp.float32))
            log_prob_B += jnp.take_along_axis(seen_BV, tokens_B[:, None], axis=-1)[:, 0]
            goes_on_B &= self.stop.goes_on(seen_BV, log_prob_B)
        return dataclasses.replace(
            after, num_drafted_B=num_drafted_B, log_prob_B=log_prob_B, goes_on_B=goes_on_B
        )

    def draft(self, tokens_BK: Array, drawn: Drawn) -> Draft:
        """Returns the chain as a draft."""
        num_drafted_B = drawn.num_drafted_B
        if num_drafted_B is None:
            num_drafted_B = jnp.full_like(self.keys.starts_B, tokens_BK.shape[1])
        return Draft(
            tokens_BK=tokens_BK, num_drafted_B=num_drafted_B, log_probs_BRV=drawn.log_probs_BRV
        )
