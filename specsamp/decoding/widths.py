"""The loop of rows whose draft lengths adapt: rounds of a few static widths, one inner loop for each.

A round's width is the number of tokens that may be drafted and are scored in it. Its program is that of the fixed
length. All widths share one program and its caches, which are updated in place: consecutive loops pass them on, where
the branches of a `lax.switch` would copy them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from specsamp.decoding.drafter import Prefix
from specsamp.decoding.state import DecodeState, Request, Weights

if TYPE_CHECKING:
    from specsamp.decoding.loop import Loop

Array = jax.Array
_Carry = tuple[Array, DecodeState]  # rounds so far, state


def run(loop: Loop, weights: Weights, request: Request, carry: _Carry, goes_on: Callable[[_Carry], Array]) -> _Carry:
    """Runs rounds while ``goes_on``, each as wide as the longest draft that any running row of any shard wants."""
    widths = request.adaptive.widths

    def widest(state: DecodeState) -> Array:
        return loop.shards.max(jnp.max(jnp.where(state.running_B, state.pace.wanted_B, 0)))

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

    return jax.lax.while_loop(goes_on, turn, (carry[0], _foresee(loop, carry[1])))


def _round(loop: Loop, weights: Weights, request: Request, carry: _Carry, *, width: int) -> _Carry:
    rounds, state = carry
    after = dataclasses.replace(loop, drafter=loop.drafter.of_length(width)).round(weights, request, state)
    if width and after.pace.seen_B is not None:  # a drafter knows all but the last two tokens after a round
        seen_B = jnp.where(state.running_B, after.lengths_B - 2, after.pace.seen_B)
        after = dataclasses.replace(after, pace=dataclasses.replace(after.pace, seen_B=seen_B))
    return rounds + 1, _foresee(loop, after)


def _foresee(loop: Loop, state: DecodeState) -> DecodeState:
    """Lets rows want no more tokens than the drafter will find for them."""
    found_B = loop.drafter.foresee(state.drafter_state, Prefix(tokens_BS=state.tokens_BS, lengths_B=state.lengths_B))
    if found_B is None:
        return state
    wanted_B = jnp.where(state.running_B, jnp.minimum(state.pace.wanted_B, found_B), state.pace.wanted_B)
    return dataclasses.replace(state, pace=dataclasses.replace(state.pace, wanted_B=wanted_B))


def _catch_up(loop: Loop, weights: Weights, state: DecodeState, drafts_next: Array) -> DecodeState:
    """Lets the drafter read what was emitted while it paused, if any row is going to draft."""
    if state.pace.seen_B is None:
        return state

    def is_behind(seen_B: Array) -> Array:
        return drafts_next & loop.shards.any(jnp.any(state.running_B & (seen_B < state.lengths_B - 2)))

    prefix = Prefix(tokens_BS=state.tokens_BS, lengths_B=state.lengths_B)
    with jax.named_scope("catch_up"):
        drafter_state, seen_B = loop.drafter.catch_up(
            weights, state.drafter_state, prefix, state.pace.seen_B, is_behind
        )
    return dataclasses.replace(state, drafter_state=drafter_state, pace=dataclasses.replace(state.pace, seen_B=seen_B))
