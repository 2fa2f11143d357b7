"""A head drafts from the target's hidden states (EAGLE, arXiv 2401.15077; EAGLE-3, arXiv
2503.01840).

A round takes one call of the head with K+1 positions, in `commit`, and K-1 calls with one
position, in `propose`. The call in `commit` reads the target's hidden states at all scored
positions, each with the token after it. The next draft begins with the features of the accepted
positions. The rejected positions are stale, as in any cache. So after every round the head's cache
holds only entries computed from the target's hidden states.

Medusa heads (arXiv 2401.10774) read no tokens: their calls return their input and cost nothing.
Each token is drawn from the head at its offset.

The rule verifies with the distribution of the head itself. If the head has a reduced vocabulary,
the missing tokens have probability zero: this costs acceptance and adds no bias.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from specsamp import validate
from specsamp.decoding.drafter import Drafter, Weights, check_is_target, depth_of
from specsamp.models.assistant import AssistantHead
from specsamp.models.heads import FeatureHead
from specsamp.models.interface import Block, LayeredModel
from specsamp.models.mtp import ModuleChain
from specsamp.pytrees import pytree

if TYPE_CHECKING:
    from specsamp.models.heads import Head

Array = jax.Array


@pytree
class FeatureState:
    """The state of a head for each row, between rounds."""

    cache: Any  # slot t holds the pair of position t and the token after it
    feature_BD: Array  # the head's output for the last pair; a prompt of one token has none
    # The feature of the last prompt token that was read; its pair is completed by the next chunk.
    edge_BD: Array
    # Bool, whether there is such a token: not before the first chunk, and not after a round.
    has_edge_B: Array


@dataclasses.dataclass(frozen=True)
class HeadDrafter(Drafter):
    """Drafts K tokens with ``head``, a head made for ``target``; its weights are
    ``weights.draft``.
    """

    target: LayeredModel
    head: Head
    K: int

    def __post_init__(self):
        validate.integer("K", self.K, 1)
        most, longest = self.head.config.max_tokens, depth_of(self)
        if most is not None and longest > most:
            name = "K" if longest == self.K else "the depth of its tree"
            raise ValueError(
                f"{name} = {longest}, but the head drafts {most} tokens at most: lower the draft "
                "length"
            )

    @property
    def hidden_layers(self):
        return self.head.hidden_layers

    @property
    def weights_key(self):
        return self.head

    def check(self, target, draft, draft_params):
        check_is_target(self.target, target)
        if draft_params is None:
            raise ValueError(f"a {type(self).__name__} needs the pair's draft_params")
        self.head.check_target(target)

    def prepare(self, params):
        return self.head.prepare(params)

    def fit_slots(self, weights, slots):
        return self.head.fit_slots(weights, slots)

    def _embed(
        self,
        weights: Weights,
        tokens_BT: Array,
        start_B: Array,
        cache: Any,
        block: Block | None = None,
    ) -> tuple[Array, Any]:
        """Embeds tokens at slots ``start_B ..``; targets with n-gram embeddings also store them in
        the cache.
        """
        if self.head.config.own_embedding:
            return self.head.embed(weights.draft, tokens_BT), cache
        return self.target.embed(weights.target, tokens_BT, start_B, cache, block=block)

    def _logits(self, weights: Weights, x_BTD: Array, offset: Array | int = 0) -> Array:
        """Returns the head's own logits, ``[B, T, U]``; see `Head.logits`."""
        of_target = functools.partial(self.target.unembed_normed, weights.target)
        return self.head.logits(weights.draft, x_BTD, of_target, offset)

    def _expand(self, weights: Weights, logits_XU: Array) -> Array:
        """Returns logits ``[..., V]`` of the target's tokens; see `Head.expand`."""
        return self.head.expand(weights.draft, logits_XU, self.target.kernels)


@dataclasses.dataclass(frozen=True)
class FeatureDrafter(HeadDrafter):
    """Drafts with ``head``, one token after the other.

    Attributes:
      target: the pair's target. Its embedding and output matrix serve heads that have none.
      head: a head made for this target.
      K: tokens per round.
    """

    head: FeatureHead

    def __post_init__(self):
        if isinstance(self.head, AssistantHead):
            raise ValueError("an assistant drafts chains, with an AssistantDrafter: leave out tree")
        validate.instance("head", self.head, FeatureHead, "that of an Eagle3Config")
        if isinstance(self.head, ModuleChain):
            raise ValueError(
                f"{self.head.config.num_modules} modules draft chains, with a ModuleDrafter"
            )
        super().__post_init__()

    def init(self, batch, slots):
        layer = self.head.config.layer
        nothing_BD = jnp.zeros((batch, layer.width), layer.compute_dtype)
        return FeatureState(
            cache=self.head.init_cache(batch, slots),
            feature_BD=nothing_BD,
            edge_BD=nothing_BD,
            has_edge_B=jnp.zeros((batch,), bool),
        )

    def read(self, weights, state, chunk, cache):
        """Reads the pairs that end in this chunk: the first pair begins with the last token of the
        previous chunk.

        The first chunk of a prompt has one pair less. So has the first chunk after a round, since
        `commit` has read the pair that ends in its first token. The last position of such a chunk
        is stale, and the next chunk overwrites it.
        """
        embedded_BTD, cache = self._embed(weights, chunk.tokens_BT, chunk.start_B, cache)
        features_BTD = self.head.fuse(weights.draft, chunk.output.hidden)
        late_BTD = jnp.concatenate([state.edge_BD[:, None], features_BTD[:, :-1]], axis=1)
        early_BTD = jnp.concatenate([embedded_BTD[:, 1:], embedded_BTD[:, -1:]], axis=1)
        is_first_B = ~state.has_edge_B
        # The slot of the first pair.
        first_B = jnp.where(is_first_B, chunk.start_B, chunk.start_B - 1)
        returned_BTD, head_cache = self.head(
            weights.draft,
            jnp.where(is_first_B[:, None, None], early_BTD, embedded_BTD),
            jnp.where(is_first_B[:, None, None], features_BTD, late_BTD),
            first_B,
            state.cache,
        )
        lengths_B, width = chunk.lengths_B, chunk.tokens_BT.shape[1]
        last_B = lengths_B - 2 - first_B  # the row of the prompt's last pair
        here_B = (last_B >= 0) & (last_B < width) & (lengths_B >= 2)
        feature_BD = self.head.take(returned_BTD, jnp.clip(last_B, 0, width - 1))
        return FeatureState(
            cache=head_cache,
            feature_BD=jnp.where(here_B[:, None], feature_BD, state.feature_BD),
            edge_BD=features_BTD[:, -1],
            has_edge_B=jnp.ones_like(state.has_edge_B),
        ), cache

    def propose(self, weights, state, prefix, cache, sample):
        def score(feature_BD, offset):
            logits_BTU = self._logits(weights, feature_BD[:, None], offset)
            return self._expand(weights, logits_BTU[:, 0])

        def step(offset, token_B, carry):
            head_cache, cache, feature_BD = carry
            at_B = prefix.lengths_B + offset - 1  # of this token
            embedded_BTD, cache = self._embed(weights, token_B[:, None], at_B, cache)
            returned_BTD, head_cache = self.head(
                weights.draft, embedded_BTD, feature_BD[:, None], at_B - 1, head_cache
            )
            feature_BD = returned_BTD[:, 0]
            return score(feature_BD, offset), (head_cache, cache, feature_BD)

        draft, (head_cache, cache, _) = sample.chain(
            self.K, score(state.feature_BD, 0), step, (state.cache, cache, state.feature_BD)
        )
        # Rows without a last pair draft nothing.
        state = dataclasses.replace(state, cache=head_cache)
        return draft.only_in(prefix.lengths_B >= 2), state, cache

    def commit(self, weights, state, scored, cache):
        # Position i pairs the hidden state at length - 1 + i with the token after it, which was
        # emitted or is padding.
        lengths_B, tokens_BT = scored.prefix.lengths_B, jnp.maximum(scored.verdict.tokens_BT, 0)
        embedded_BTD, cache = self._embed(weights, tokens_BT, lengths_B, cache)
        features_BTD = self.head.fuse(weights.draft, scored.output.hidden)
        returned_BTD, head_cache = self.head(
            weights.draft, embedded_BTD, features_BTD, lengths_B - 1, state.cache
        )
        feature_BD = self.head.take(returned_BTD, scored.verdict.num_accepted_B)
        has_edge_B = jnp.zeros_like(state.has_edge_B)
        return dataclasses.replace(
            state, cache=head_cache, feature_BD=feature_BD, has_edge_B=has_edge_B
        ), cache
