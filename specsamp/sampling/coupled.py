"""The coupled rule: draft and target share their noise, so that the emitted tokens do not depend on
the draft.

Draft and target take the argmax of their log-probabilities plus the *same* Gumbel noise, addressed
by absolute position (Gumbel coupling; arXiv 2408.07978). Every emitted token is the target's own
choice, so for a given seed the speculative text equals the autoregressive text, for every draft. A
drafted token is accepted when the two choices agree, which happens less often than under the token
rule.

In a token tree, the children of a row are the top-k of its log-probabilities plus the noise of
their position; the target's choice is accepted if it is among them.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specsamp.sampling.rng import RoundKeys
from specsamp.sampling.rules import (
    Draft,
    Rule,
    TargetDistributions,
    Verdict,
    count_leading,
    make_verdict,
    take_row,
)

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class CoupledRule(Rule):
    """Accepts a drafted token if the target chooses it under the same noise; lossless."""

    draft_independent = True
    trees = True

    def sample(self, log_probs_BV: Array, keys: RoundKeys, offset: Array | int) -> Array:
        """Draws a token per row: the draft's, and with the same noise the target's."""
        gumbels_BV = keys.position_gumbels(offset, log_probs_BV.shape[-1])
        return jnp.argmax(log_probs_BV + gumbels_BV, axis=-1).astype(jnp.int32)

    def siblings(
        self, log_probs_BPV: Array, keys: RoundKeys, *, nodes_PC: Array, depth: Array | int
    ) -> Array:
        gumbels_BV = keys.position_gumbels(depth, log_probs_BPV.shape[-1])
        return jax.lax.top_k(log_probs_BPV + gumbels_BV[:, None], nodes_PC.shape[1])[1].astype(
            jnp.int32
        )

    def verify(self, draft: Draft, target: TargetDistributions, keys: RoundKeys) -> Verdict:
        """Draws the target's choices and accepts the drafted tokens that agree with them."""
        if draft.parents_BK is not None:
            return self._verify_tree(draft, target, keys)
        target_log_probs = target.all()
        num_rows = target_log_probs.shape[1]
        choices = [self.sample(target_log_probs[:, t], keys, t) for t in range(num_rows)]
        choices_BT = jnp.stack(choices, axis=1)
        num_accepted_B = count_leading(
            (choices_BT[:, :-1] == draft.tokens_BK) & draft.is_drafted_BK
        )
        emitted = jnp.arange(num_rows)[None, :] <= num_accepted_B[:, None]
        return Verdict(tokens_BT=jnp.where(emitted, choices_BT, -1), num_accepted_B=num_accepted_B)

    def _verify_tree(self, draft: Draft, target: TargetDistributions, keys: RoundKeys) -> Verdict:
        batch, depth = len(draft.tokens_BK), draft.most_accepted
        row_B = num_accepted_B = jnp.zeros(batch, jnp.int32)
        rows, choices, warp_state = [row_B], [], target.warp_state
        for level in range(depth + 1):
            choice_B = self.sample(target.at(row_B, warp_state), keys, level)
            is_choice_BK = (draft.parents_BK == row_B[:, None]) & (
                draft.tokens_BK == choice_B[:, None]
            )
            is_choice_BK &= draft.is_drafted_BK & (num_accepted_B == level)[:, None]
            moves_B = is_choice_BK.any(1)
            warp_state = target.advance(warp_state, choice_B, moves_B)
            row_B = jnp.where(
                moves_B, jnp.argmax(is_choice_BK, axis=1).astype(jnp.int32) + 1, row_B
            )
            num_accepted_B = num_accepted_B + moves_B
            rows.append(row_B)
            choices.append(choice_B)
        last_B = take_row(jnp.stack(choices, axis=1), num_accepted_B)
        return make_verdict(draft, num_accepted_B, last_B, jnp.stack(rows[: depth + 1], axis=1))
