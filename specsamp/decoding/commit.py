"""The last step of a round: appends the emitted tokens of each row, decides whether the row ends,
and counts.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.decoding.state import DecodeState, Finish, RequestBatch, Stats, write_tokens
from specsamp.sampling.rules import Draft, TargetDistributions, Verdict, at_tokens, count_leading
from specsamp.sampling.warp import Warp, advance_where, is_stateless

Array = jax.Array


def append(
    request: RequestBatch,
    state: DecodeState,
    draft: Draft,
    verdict: Verdict,
    target: TargetDistributions,
    warped: bool = False,
) -> DecodeState:
    """Appends the tokens of a verdict, cut at the first stop token, at the row's budget and at
    invalid logits.

    Args:
      warped: whether to record log-probabilities under the warped distributions instead of the
        target's own.
    """
    tokens_BT = verdict.tokens_BT
    positions = jnp.arange(tokens_BT.shape[1])[None, :]
    # Stop tokens and the budget.
    is_stop_BT = jnp.any(tokens_BT[..., None] == request.stop_ids_BN[:, None, :], axis=-1)
    is_stop_BT &= positions < verdict.num_emitted_B[:, None]
    until_stop_B = jnp.where(
        is_stop_BT.any(1), jnp.argmax(is_stop_BT, axis=1) + 1, tokens_BT.shape[1]
    )
    room_B = request.limits_B - state.lengths_B
    wanted_B = jnp.minimum(jnp.minimum(verdict.num_emitted_B, until_stop_B), room_B)
    # Nothing is emitted from the first position with invalid logits on: NaN, +inf, or -inf for all
    # tokens.
    valid_BT = jnp.isfinite(target.logits_BTV.max(-1))
    if request.sampling.may_exclude_all:
        valid_BT &= target.has_token()
    count_B = jnp.minimum(wanted_B, count_leading(valid_BT))
    valid_B = count_B == wanted_B
    count_B = jnp.where(state.running_B, count_B, 0).astype(jnp.int32)
    # The end of a row that was running.
    stopped_B = jnp.any(is_stop_BT & (positions < count_B[:, None]), axis=1)
    ending_B = jnp.where(
        stopped_B, Finish.STOP, jnp.where(count_B < room_B, Finish.RUNNING, Finish.LENGTH)
    )
    ending_B = jnp.where(valid_B, ending_B, Finish.INVALID)

    def put(buffer_BS, block_BT):
        return write_tokens(buffer_BS, block_BT, state.lengths_B, count_B)

    if state.log_probs_BS is not None:
        log_probs_BTV = target.all() if warped else jax.nn.log_softmax(target.logits_BTV, axis=-1)
        at_token_BT = at_tokens(log_probs_BTV, jnp.maximum(tokens_BT, 0))
        state = dataclasses.replace(state, log_probs_BS=put(state.log_probs_BS, at_token_BT))
    if state.rounds_BS is not None:
        begins_BT = jnp.where(positions == 0, 1 + draft.num_drafted_B[:, None], 0)
        state = dataclasses.replace(state, rounds_BS=put(state.rounds_BS, begins_BT))
    if state.meter is not None:
        state = dataclasses.replace(state, meter=jax.tree.map(put, state.meter, verdict.meter))
    return dataclasses.replace(
        state,
        tokens_BS=put(state.tokens_BS, tokens_BT),
        from_draft_BS=put(state.from_draft_BS, positions < verdict.num_accepted_B[:, None]),
        lengths_B=state.lengths_B + count_B,
        finish_B=jnp.where(state.running_B, ending_B, state.finish_B).astype(jnp.int32),
        stats=_count(state.stats, state.running_B, draft, verdict, count_B),
        warp_state=_advance(request.sampling, state.warp_state, tokens_BT, count_B),
        draft_warp_state=_advance(
            request.draft_sampling, state.draft_warp_state, tokens_BT, count_B
        ),
    )


def _advance(warp: Warp, warp_state: Any, tokens_BT: Array, count_B: Array) -> Any:
    """Returns the state of ``warp`` after the first ``count_B`` of ``tokens_BT``."""
    if is_stateless(warp_state):
        return warp_state
    for t in range(tokens_BT.shape[1]):
        token_B = jnp.maximum(tokens_BT[:, t], 0)
        warp_state = advance_where(t < count_B, warp, warp_state, token_B)
    return warp_state


def _count(stats: Stats, running_B: Array, draft: Draft, verdict: Verdict, count_B: Array) -> Stats:
    depth = stats.reached_BK.shape[1]  # of the longest draft: lengths may adapt
    # A running row without tokens had invalid logits.
    active_B = (running_B & (count_B > 0)).astype(jnp.int32)
    accepted_B = jnp.minimum(verdict.num_accepted_B, count_B)
    num_reached_B = jnp.minimum(jnp.minimum(draft.num_drafted_B, verdict.num_emitted_B), count_B)
    drafted_B = jnp.where(count_B < verdict.num_emitted_B, num_reached_B, draft.num_drafted_B)
    reached_BK = jnp.arange(depth)[None, :] < num_reached_B[:, None]
    outcome_BT = jnp.arange(depth + 1)[None, :] == accepted_B[:, None]
    lengths_BT = None
    if stats.lengths_BT is not None:
        lengths_BT = active_B[:, None] * (jnp.arange(depth + 1)[None, :] == drafted_B[:, None])
    new = Stats(
        rounds_B=active_B,
        emitted_B=count_B,
        drafted_B=active_B * drafted_B,
        reached_BK=active_B[:, None] * reached_BK,
        accepted_BT=active_B[:, None] * outcome_BT,
        lengths_BT=lengths_BT,
    )
    return jax.tree.map(lambda total, more: total + more.astype(total.dtype), stats, new)
