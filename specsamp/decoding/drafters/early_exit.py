"""Early exit: the target's first layers draft (LayerSkip, Elhoushi et al., arXiv 2404.16710).

A draft step feeds one token through layers ``0 .. E-1``, the final norm and the output. Weights and
cache are the target's: there is no second model and nothing to prefill. The cache of the layers
beyond E stays as it is.

The pending token is in slot L-1. So the draft steps of a round write slots ``L-1 .. L+K-2`` of the
first E layers, and the scoring call then writes slots ``L-1 .. L+K-1`` of all layers. Later rounds
see only the keys and values of scoring calls, and no slot is missing after a full acceptance.
(Scoring could reuse the draft's activations and run only the layers beyond E. It would read the
same weights: (K+1) E + (L-E) layers instead of K E + L.)
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from specsamp import validate
from specsamp.decoding.drafter import Drafter, Prefix, Sampler, check_is_target
from specsamp.models.interface import LayeredModel, Output
from specsamp.sampling.rules import Draft

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class EarlyExitDrafter(Drafter):
    """Drafts with the first ``exit_layer`` layers of the target; has neither weights nor state.

    Attributes:
      model: the pair's target, ``pair.target``.
      exit_layer: E, the number of layers of a draft step, from 1 to one fewer than the target has.
      K: tokens per round.
    """

    model: LayeredModel
    exit_layer: int
    K: int

    def __post_init__(self):
        if not isinstance(self.model, LayeredModel):
            raise ValueError(
                f"an early exit needs a target that is a LayeredModel; got {self.model!r}"
            )
        validate.integer("exit_layer", self.exit_layer, 1, self.last_exit + 1)
        validate.integer("K", self.K, 1)

    @property
    def last_exit(self) -> int:
        """Returns the largest ``exit_layer``."""
        return self.model.num_layers - 1

    @property
    def weights_key(self):
        return None

    @property
    def exit_model(self) -> LayeredModel:
        """Returns the model that drafts: the target's first layers."""
        return self.model.first(self.exit_layer)

    def check(self, target, draft, draft_params):
        check_is_target(self.model, target)

    def propose(self, weights, state, prefix, cache, sample):
        def call(token_B1, offset, cache):
            return self.exit_model(weights.target, token_B1, prefix.lengths_B - 1 + offset, cache)

        draft, cache = self_draft(prefix, sample, self.K, cache, call)
        return draft, state, cache


def self_draft(
    prefix: Prefix,
    sample: Sampler,
    K: int,
    cache: Any,
    call: Callable[[Array, Array | int, Any], Output],
) -> tuple[Draft, Any]:
    """Drafts K tokens with calls of the target itself, each of which reads the token before.

    Args:
      call: takes the tokens ``[B, 1]``, the number of the step, and the cache.

    Returns:
      The draft, and the cache after the last call.
    """

    def step(offset, token_B, cache):
        output = call(token_B[:, None], offset, cache)
        return output.logits_BTV[:, 0], output.cache

    logits_BV, cache = step(0, prefix.pending_B1[:, 0], cache)
    return sample.chain(K, logits_BV, step, cache)
