"""The loop for adaptive draft lengths: rounds of a few static widths, with an inner loop for each width.

The width of a round is the largest number of tokens that any sequence may draft in it. A round of width K is compiled
like a round of fixed length K. All widths are in one program and update the same caches in place, since the inner loops
run one after the other; the branches of a `lax.switch` would copy the caches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from specsamp.decoding.drafter import Drafter, Prefix, hooks_of
from specsamp.decoding.sampler import Sampler
from specsamp.decoding.state import DecodeState, RequestBatch, Weights
from specsamp.decoding.tokens import gather_tokens
from specsamp.models.interface import Output
from specsamp.sampling.rules import Draft, Verdict

if TYPE_CHECKING:
    from specsamp.decoding.loop import Loop

Array = jax.Array
_Carry = tuple[Array, DecodeState]  # rounds so far, state


def run(
    loop: Loop, weights: Weights, request: RequestBatch, carry: _Carry, goes_on: Callable[[_Carry], Array]
) -> _Carry:
    """Runs rounds while ``goes_on``, each as wide as the longest draft of the running rows on all shards."""
    widths = request.adaptive.widths

    def widest(state: DecodeState) -> Array:
        return loop.shards.max(jnp.max(jnp.where(state.running_B, state.adaptive_state.draft_lengths_B, 0)))

    def turn(carry: _Carry) -> _Carry:
        narrower = -1
        for width in widths:
            if narrower == 0:
                carry = carry[0], _catch_up(loop, weights, carry[1], widest(carry[1]) > 0)

            def fits(carry: _Carry, narrower: int = narrower, width: int = width) -> Array:
                size = widest(carry[1])
                return goes_on(carry) & (narrower < size) & (size <= width)

            carry = jax.lax.while_loop(fits, functools.partial(_round, loop, weights, request, width=width), carry)
            narrower = width
        return carry

    return jax.lax.while_loop(goes_on, turn, (carry[0], _limit(loop, carry[1])))


def _round(loop: Loop, weights: Weights, request: RequestBatch, carry: _Carry, *, width: int) -> _Carry:
    rounds, state = carry
    after = dataclasses.replace(loop, drafter=with_length(loop.drafter, width)).round(weights, request, state)
    if width and after.adaptive_state.seen_B is not None:  # a draft covers all but the last two tokens
        seen_B = jnp.where(state.running_B, after.lengths_B - 2, after.adaptive_state.seen_B)
        after = _with_adaptive(after, seen_B=seen_B)
    return rounds + 1, _limit(loop, after)


def _limit(loop: Loop, state: DecodeState) -> DecodeState:
    """Lowers the draft lengths to the most tokens that the drafter can draft."""
    prefix = Prefix(tokens_BS=state.tokens_BS, lengths_B=state.lengths_B)
    most_B = hooks_of(loop.drafter).max_draft_length(state.drafter_state, prefix)
    if most_B is None:
        return state
    lengths_B = state.adaptive_state.draft_lengths_B
    return _with_adaptive(state, draft_lengths_B=jnp.where(state.running_B, jnp.minimum(lengths_B, most_B), lengths_B))


def _catch_up(loop: Loop, weights: Weights, state: DecodeState, drafts_next: Array) -> DecodeState:
    """Feeds the drafter the tokens emitted while it was paused, if any row is going to draft."""
    if state.adaptive_state.seen_B is None:
        return state

    def is_behind(seen_B: Array) -> Array:
        return drafts_next & loop.shards.any(jnp.any(state.running_B & (seen_B < state.lengths_B - 2)))

    prefix = Prefix(tokens_BS=state.tokens_BS, lengths_B=state.lengths_B)
    with jax.named_scope("catch_up"):
        drafter_state, seen_B = catch_up(
            loop.drafter, weights, state.drafter_state, prefix, state.adaptive_state.seen_B, is_behind
        )
    return _with_adaptive(dataclasses.replace(state, drafter_state=drafter_state), seen_B=seen_B)


def _with_adaptive(state: DecodeState, **changes: Array) -> DecodeState:
    return dataclasses.replace(state, adaptive_state=dataclasses.replace(state.adaptive_state, **changes))


def catch_up(
    drafter: Drafter, weights: Weights, state: Any, prefix: Prefix, seen_B: Array, is_behind: Callable[[Array], Array]
) -> tuple[Any, Array]:
    """Feeds a drafter that `DrafterHooks.falls_behind` the tokens it missed, K + 1 at a time.

    It stops at the last two tokens, which the first call of a round feeds anyway.

    Args:
      seen_B: int32, the tokens of each row that the drafter's state covers.
      is_behind: of ``seen_B``, whether tokens are missing.

    Returns:
      The drafter's state, and ``seen_B`` after that.
    """
    known_B = jnp.maximum(prefix.lengths_B - 2, 0)

    def read(carry: tuple[Any, Array]) -> tuple[Any, Array]:
        state, seen_B = carry
        start_B = jnp.clip(seen_B, 0, known_B)  # tokens beyond the sequence are scratch, and within the headroom
        tokens_BT = gather_tokens(prefix.tokens_BS, start_B, drafter.K + 1)
        state, _ = drafter.read(weights, state, tokens_BT, start_B, prefix.lengths_B, None, None)
        return state, start_B + drafter.K + 1

    state, seen_B = jax.lax.while_loop(lambda carry: is_behind(carry[1]), read, (state, seen_B))
    return state, jnp.minimum(seen_B, prefix.lengths_B)


def with_length(drafter: Drafter, K: int) -> Drafter:
    """Returns the drafter with another K, for the same state; with 0 it drafts nothing, and `commit` is still called."""
    if K in (0, drafter.K):
        return drafter if K else Paused(drafter)
    return hooks_of(drafter).of_length(K) or dataclasses.replace(drafter, K=K)


@dataclasses.dataclass(frozen=True)
class Paused(Drafter):
    """Drafts nothing and keeps the state of ``drafter``, whose `commit` still gets the emitted tokens."""

    drafter: Drafter
    K = 0

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.drafter.hidden_layers

    def propose(
        self, weights: Weights, state: Any, prefix: Prefix, cache: Any, sample: Sampler
    ) -> tuple[Draft, Any, Any]:
        empty_BK = jnp.zeros((len(prefix.lengths_B), 0), jnp.int32)
        return Draft(tokens_BK=empty_BK, num_drafted_B=jnp.zeros_like(prefix.lengths_B)), state, cache

    def commit(
        self, weights: Weights, state: Any, prefix: Prefix, draft: Draft, verdict: Verdict, output: Output, cache: Any
    ) -> tuple[Any, Any]:
        return self.drafter.commit(weights, state, prefix, draft, verdict, output, cache)
