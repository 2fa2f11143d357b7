"""No drafter: the loop decodes autoregressively."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from specsamp.decoding.drafter import Drafter, Prefix
from specsamp.decoding.sampler import Sampler
from specsamp.decoding.state import Weights
from specsamp.sampling.rules import Draft


@dataclasses.dataclass(frozen=True)
class NoDrafter(Drafter):
    """Proposes nothing: K = 0, and every round emits one token of the target."""

    K = 0

    def propose(
        self, weights: Weights, state: Any, prefix: Prefix, cache: Any, sample: Sampler
    ) -> tuple[Draft, Any, Any]:
        empty_BK = jnp.zeros((prefix.tokens_BS.shape[0], 0), jnp.int32)
        return Draft(tokens_BK=empty_BK, num_drafted_B=jnp.zeros_like(prefix.lengths_B)), state, cache
