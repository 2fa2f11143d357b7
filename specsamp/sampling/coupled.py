"""The coupled rule: draft and target share their noise, so that the emitted tokens do not depend on the draft.

Draft and target take the argmax of their log-probabilities plus the *same* Gumbel noise, addressed by absolute
position (Gumbel coupling; arXiv 2408.07978). Every emitted token is the target's own choice, so for one seed the
speculative text is the autoregressive one, for every draft. A drafted token is accepted when the two choices agree,
which happens less often than under the token rule.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specsamp.sampling.rng import RoundKeys
from specsamp.sampling.rules import Draft, TargetDistributions, Verdict, count_leading

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class CoupledRule:
    """Accepts a drafted token where the target chooses it under the same noise; lossless."""

    exact = True
    metered = False
    draft_independent = True

    def sample(
        self, log_probs_BV: Array, keys: RoundKeys, *, node: Array | int, depth: Array | int, drafter: int = 0
    ) -> Array:
        """Draws a drafted token per row under the noise that the target will use at that ``depth``."""
        del node, drafter  # every draft of a position meets the target's noise
        gumbels_BV = keys.position_gumbels(depth, log_probs_BV.shape[-1])
        return jnp.argmax(log_probs_BV + gumbels_BV, axis=-1).astype(jnp.int32)

    def verify(self, draft: Draft, target: TargetDistributions, keys: RoundKeys) -> Verdict:
        """Draws the target's choices and keeps the drafted tokens that agree with them."""
        target_log_probs = target.all()
        num_rows, vocab_size = target_log_probs.shape[1:]
        gumbels = [keys.position_gumbels(offset, vocab_size) for offset in range(num_rows)]
        choices_BT = jnp.argmax(target_log_probs + jnp.stack(gumbels, axis=1), axis=-1).astype(jnp.int32)
        num_accepted_B = count_leading((choices_BT[:, :-1] == draft.tokens_BK) & draft.is_drafted_BK)
        emitted = jnp.arange(num_rows)[None, :] <= num_accepted_B[:, None]
        return Verdict(tokens_BT=jnp.where(emitted, choices_BT, -1), num_accepted_B=num_accepted_B)
