"""Drafts with several modules for multi-token prediction, one for each token (DeepSeek-V3, arXiv
2412.19437, section 2.2).

Module k, counted from 0, reads pairs: the features of a position from module k - 1, which for
module 0 are the target's, and the token k + 1 positions later. The last k pairs hold drafted
tokens, and are stale unless these are accepted; up to D + 1 positions are new in a round, and one
more if a pause follows. So every round runs each of the D modules once over the last D + 2
positions, and draws a token after each. Fewer drafted tokens save no module, and neither does a
pause: its cache would have holes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specsamp import validate
from specsamp.decoding.drafter import DrafterHooks, Weights
from specsamp.decoding.drafters.feature import HeadDrafter
from specsamp.models.mtp import ModuleChain
from specsamp.pytrees import pytree

Array = jax.Array


@pytree
class ModuleState:
    """The state of the modules for each row, between rounds."""

    cache: Any  # of each module: slot t holds the pair of position t
    embedded_BWD: Array  # the last W = D + 2 tokens that were read; of fewer, the rest is padding
    features_BWD: Array  # of the target, at the same positions
    first_B: Array  # the first of these positions


@dataclasses.dataclass(frozen=True)
class ModuleDrafter(DrafterHooks, HeadDrafter):
    """Drafts K tokens with the first K modules of ``head``, a head made for ``target``."""

    head: ModuleChain

    def __post_init__(self):
        validate.instance("head", self.head, ModuleChain, "one with num_modules above 1")
        super().__post_init__()

    @property
    def modules(self) -> int:
        """Returns D."""
        return self.head.config.num_modules

    @property
    def kept(self) -> int:
        """Returns W, the positions that every round reads."""
        return self.modules + 2

    @property
    def looks_ahead(self):
        """Returns how many tokens beyond the next one a slot of the last module depends on."""
        return self.modules - 1

    def init(self, batch, slots):
        layer = self.head.config.layer
        nothing_BWD = jnp.zeros((batch, self.kept, layer.width), layer.compute_dtype)
        return ModuleState(
            cache=self.head.init_cache(batch, slots + self.kept),  # a short text has W slots, too
            embedded_BWD=nothing_BWD,
            features_BWD=nothing_BWD,
            first_B=jnp.zeros((batch,), jnp.int32),
        )

    def read(self, weights, state, chunk, cache):
        """Reads as many pairs as the chunk has tokens. They begin before it, since its last tokens
        have no pairs yet.
        """
        embedded_BTD, cache = self._embed(weights, chunk.tokens_BT, chunk.start_B, cache)
        new = embedded_BTD, self.head.fuse(weights.draft, chunk.output.hidden)
        width, first_B = chunk.tokens_BT.shape[1], jnp.minimum(state.first_B, chunk.start_B)
        rows = self._rows(state, new, chunk.start_B, first_B, width + self.modules)
        caches = self._fill(weights, rows[0], rows[1][:, :width], first_B, state.cache)
        end_B = jnp.minimum(chunk.start_B + width, chunk.lengths_B)
        return self._keep(
            dataclasses.replace(state, cache=caches), new, chunk.start_B, first_B, end_B
        ), cache

    def propose(self, weights, state, prefix, cache, sample):
        head, D = self.head, self.modules
        last_B = prefix.lengths_B - 2 - state.first_B  # the row of the last pair; -1: there is none
        token_B1, drawn = prefix.pending_B1, sample.begin(self.K)
        embedded_BXD = jnp.pad(state.embedded_BWD, ((0, 0), (0, D), (0, 0)))
        features_BWD, caches = state.features_BWD, state.cache
        for k in range(D):
            if k <= self.K:
                token_B1D, cache = self._embed(weights, token_B1, prefix.lengths_B - 1 + k, cache)
                is_here_BX = jnp.arange(embedded_BXD.shape[1])[None] == last_B[:, None] + 1 + k
                embedded_BXD = jnp.where(
                    is_here_BX[..., None], token_B1D.astype(embedded_BXD.dtype), embedded_BXD
                )
            after_BWD = embedded_BXD[:, k + 1 : k + 1 + self.kept]
            features_BWD, caches = head(
                weights.draft, after_BWD, features_BWD, state.first_B, caches, k
            )
            if k < self.K:
                feature_B1D = head.take(features_BWD, jnp.maximum(last_B, 0))[:, None]
                logits_BU = self._logits(weights, feature_B1D, k)[:, 0]
                drawn = sample.draw(self._expand(weights, logits_BU), k, drawn)
                token_B1 = drawn.draft.tokens_BK[:, k : k + 1]
        draft = drawn.draft.only_in(last_B >= 0)
        return draft, dataclasses.replace(state, cache=caches), cache

    def commit(self, weights, state, scored, cache):
        start_B = scored.prefix.lengths_B - 1
        tokens_BT = jnp.concatenate(
            [scored.prefix.pending_B1, jnp.maximum(scored.verdict.tokens_BT, 0)[:, :-1]], axis=1
        )
        embedded_BTD, cache = self._embed(weights, tokens_BT, start_B, cache)
        new = embedded_BTD, self.head.fuse(weights.draft, scored.output.hidden)
        end_B = start_B + 1 + scored.verdict.num_accepted_B
        state = self._keep(state, new, start_B, state.first_B, end_B)
        if tokens_BT.shape[1] == 1:  # a pause, in which `propose` is not called
            embedded_BXD = jnp.pad(state.embedded_BWD, ((0, 0), (0, self.modules), (0, 0)))
            caches = self._fill(
                weights, embedded_BXD, state.features_BWD, state.first_B, state.cache
            )
            state = dataclasses.replace(state, cache=caches)
        return state, cache

    def _fill(
        self,
        weights: Weights,
        embedded_BXD: Array,
        features_BTD: Array,
        first_B: Array,
        caches: Any,
    ) -> tuple[Any, ...]:
        """Reads pairs with all modules; the tokens reach D positions further than the features."""
        for k in range(self.modules):
            after_BTD = embedded_BXD[:, k + 1 : k + 1 + features_BTD.shape[1]]
            features_BTD, caches = self.head(
                weights.draft, after_BTD, features_BTD, first_B, caches, k
            )
        return caches

    def _keep(
        self, state: ModuleState, new: Any, start_B: Array, known_B: Array, end_B: Array
    ) -> ModuleState:
        """Returns the state with the W positions before ``end_B``, or those from ``known_B``."""
        first_B = jnp.maximum(end_B - self.kept, known_B)
        embedded_BWD, features_BWD = self._rows(state, new, start_B, first_B, self.kept)
        return dataclasses.replace(
            state, embedded_BWD=embedded_BWD, features_BWD=features_BWD, first_B=first_B
        )

    def _rows(
        self,
        state: ModuleState,
        new: tuple[Array, Array],
        start_B: Array,
        first_B: Array,
        count: int,
    ) -> tuple[Array, ...]:
        """Returns positions ``first_B ..`` of tokens and features: kept ones, and from ``start_B``
        new ones.
        """
        kept = state.embedded_BWD, state.features_BWD
        at_BC = first_B[:, None] + jnp.arange(count)[None]
        is_kept_BC, width = at_BC < start_B[:, None], kept[0].shape[1] + new[0].shape[1]
        row_BC = jnp.where(
            is_kept_BC, at_BC - state.first_B[:, None], kept[0].shape[1] + at_BC - start_B[:, None]
        )
        row_BC1 = jnp.clip(row_BC, 0, width - 1)[..., None]
        both = [
            jnp.concatenate([old, x.astype(old.dtype)], axis=1)
            for old, x in zip(kept, new, strict=True)
        ]
        return tuple(
            self.head.layout.on_all_devices(jnp.take_along_axis(x, row_BC1, axis=1)) for x in both
        )
