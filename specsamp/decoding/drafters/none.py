"""No draft: the loop decodes autoregressively."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.decoding.types import Draft, Output, Sampler, Verdict, Weights

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class NoDrafter:
    """K = 0; every round emits one token of the target."""

    K = 0
    exact = True
    hidden_layers = ()

    def prepare(self, params: Any, slots: int) -> Any:
        return None

    def init(
        self, weights: Weights, tokens_BP: Array, lengths_B: Array, slots: int, target_output: Output, cache: Any
    ) -> tuple[Any, Any]:
        return (), cache

    def propose(
        self, weights: Weights, state: Any, tokens_BS: Array, lengths_B: Array, cache: Any, sample: Sampler
    ) -> tuple[Draft, Any, Any]:
        draft = Draft(tokens_BK=jnp.zeros((tokens_BS.shape[0], 0), jnp.int32), num_drafted_B=jnp.zeros_like(lengths_B))
        return draft, state, cache

    def commit(
        self, weights: Weights, state: Any, draft: Draft, verdict: Verdict, target_output: Output, cache: Any
    ) -> tuple[Any, Any]:
        return state, cache
