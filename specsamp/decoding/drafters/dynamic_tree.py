"""Trees that grow where the draft is sure, another one for every row and round (EAGLE-2, arXiv 2406.16858).

On each level, the ``expanded`` most probable nodes get ``children`` each. What is probable is the product of the draft's
probabilities along a path.

* Under a rule or a sampling that *chooses* children (`RecursiveRule("top")`, or greedy sampling) the ``nodes`` most
  probable nodes of all are proposed, as in EAGLE-2. They are one-hot for the rule.
* Under a rule that *draws* children all nodes that were drawn are proposed. Whether a node is expanded may depend on its
  value; whether it is proposed may not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp import validate
from specsamp.decoding.drafter import DrafterHooks, Prefix, Proposal, ScoredRound
from specsamp.decoding.drafters.feature import FeatureDrafter, proposed
from specsamp.decoding.drafters.model import ModelDrafter
from specsamp.decoding.drafters.tree import pairs_of
from specsamp.decoding.sampler import Sampler
from specsamp.decoding.state import Weights
from specsamp.decoding.trees import check_model
from specsamp.models.interface import Block, LanguageModel
from specsamp.sampling.rules import Draft

Array = jax.Array
_Step = Callable[[int, "_Expanded", Any], tuple[Array, Any]]  # first slot, nodes, carry -> logits [B, W, V], carry


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth:
    """The sizes of a tree that grows.

    Attributes:
      depth: levels, each with one call of the draft.
      expanded: W, nodes that get children on each level but the last.
      children: C, of each of them.
      nodes: K, proposed nodes; None: all ``C + (depth - 1) W C``. Fewer only where children are chosen by value.
    """

    depth: int
    expanded: int
    children: int
    nodes: int | None = None

    def __post_init__(self):
        validate.integer("depth", self.depth, 1)
        validate.integer("children", self.children, 1)
        validate.integer("expanded", self.expanded, 1, self.children + 1)
        if self.nodes is not None:
            validate.integer("nodes", self.nodes, max(self.num_read, self.depth), self.num_grown + 1)

    @property
    def num_grown(self) -> int:
        """Returns the number of nodes before some are chosen."""
        return self.children * (1 + (self.depth - 1) * self.expanded)

    @property
    def num_read(self) -> int:
        """Returns the number of nodes that the draft reads; their slots must fit into those of the scored rows."""
        return (self.depth - 1) * self.expanded

    @property
    def K(self) -> int:
        return self.num_grown if self.nodes is None else self.nodes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Expanded:
    """The nodes of a level that get children, and the rows that the draft read so far: 0 for the pending token."""

    tokens_BW: Array
    parents_BW: Array  # the rows of their parents
    seen_BWR: Array  # bool, the rows that each sees: its ancestors and itself


@dataclasses.dataclass(frozen=True)
class GrowingDrafter(DrafterHooks):
    """Gives a drafter of chains the methods of growing trees; a mixin that stands before it."""

    K: int = dataclasses.field(init=False)
    growth: Growth = dataclasses.field(kw_only=True)

    def __post_init__(self):
        example = "Growth(depth=4, expanded=4, children=4)"
        object.__setattr__(self, "K", validate.instance("growth", self.growth, Growth, example).K)
        super().__post_init__()

    @property
    def depth(self) -> int:
        return self.growth.depth

    def check(self, target: LanguageModel, draft: LanguageModel | None, draft_params: Any) -> None:
        super().check(target, draft, draft_params)
        for model in (target, getattr(self, "model", target)):  # a draft model reads trees, too
            check_model(model, self.growth.children)

    def grow(self, sample: Sampler, logits_BV: Array, step: _Step, carry: Any) -> tuple[Draft, Array, Any]:
        """Grows a tree; returns the draft, the row that the draft read for each scored row ``[B, K+1]``, and the carry."""
        growth, batch = self.growth, len(logits_BV)
        W, C, rows = growth.expanded, growth.children, 1 + growth.num_read
        found = _Found.begin(sample, logits_BV, C)
        seen_BWR = jnp.broadcast_to(jnp.arange(rows)[None, None] == 0, (batch, 1, rows))
        for level in range(1, growth.depth):
            first = 1 + (level - 1) * W
            best_BW, found = found.expand(W, first)
            parents_BW = jnp.take_along_axis(found.parents_BN, best_BW, axis=1)
            above_BW = parents_BW - (first - W if level > 1 else 0)  # of the parent, among the rows above
            own_BWR = jnp.arange(first, first + W)[None, :, None] == jnp.arange(rows)[None, None]
            seen_BWR = jnp.take_along_axis(seen_BWR, above_BW[..., None], axis=1) | own_BWR
            tokens_BW = jnp.take_along_axis(found.tokens_BN, best_BW, axis=1)
            expanded = _Expanded(tokens_BW=tokens_BW, parents_BW=parents_BW, seen_BWR=seen_BWR)
            logits_BWV, carry = step(level, expanded, carry)
            found = found.with_children(sample, logits_BWV, best_BW, tokens_BW, above_BW, C, level, first)
        return *found.draft(growth), carry

    def block(self, start_B: Array, level: int, expanded: _Expanded) -> Block:
        """Returns positions and visibility of a level."""
        positions_BT = jnp.broadcast_to(start_B[:, None] + level, expanded.tokens_BW.shape)
        return Block(start_B=start_B, positions_BT=positions_BT, visible_BTR=expanded.seen_BWR)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Found:
    """The nodes that were found so far, level by level."""

    tokens_BN: Array
    values_BN: Array  # the draft's log-probability of the path
    parents_BN: Array  # the row that the draft read for their parent
    read_BN: Array  # the row that the draft read for themselves; 0 where it has not
    newest: int = dataclasses.field(metadata={"static": True})  # how many stand on the last level
    log_probs: tuple[Array, ...]  # by level, [B, rows read, V]
    warp_states: Any  # after the rows above the last level

    @classmethod
    def begin(cls, sample: Sampler, logits_BV: Array, children: int) -> _Found:
        batch = len(logits_BV)
        nothing = jnp.zeros((batch, 0), jnp.int32)
        empty = cls(
            tokens_BN=nothing,
            values_BN=nothing.astype(jnp.float32),
            parents_BN=nothing,
            read_BN=nothing,
            newest=0,
            log_probs=(),
            warp_states=jax.tree.map(lambda x: x[:, None], sample.warp_state),
        )
        value_B1, row_B1 = jnp.zeros((batch, 1)), jnp.zeros((batch, 1), jnp.int32)
        return empty._add(sample, logits_BV[:, None], value_B1, row_B1, children, 0)

    def expand(self, count: int, first: int) -> tuple[Array, _Found]:
        """Chooses the most probable nodes of the last level; they are read in rows ``first ..``."""
        start = self.tokens_BN.shape[1] - self.newest
        best_BW = start + jax.lax.top_k(self.values_BN[:, start:], count)[1]
        rows = jnp.arange(first, first + count)[None, :, None]
        is_best_BWN = best_BW[..., None] == jnp.arange(self.tokens_BN.shape[1])[None, None]
        read_BN = self.read_BN + jnp.sum(jnp.where(is_best_BWN, rows, 0), axis=1)
        return best_BW, dataclasses.replace(self, read_BN=read_BN)

    def with_children(
        self,
        sample: Sampler,
        logits_BWV: Array,
        best_BW: Array,
        tokens_BW: Array,
        above_BW: Array,
        children: int,
        level: int,
        first: int,
    ) -> _Found:
        """Returns the nodes with the children of those that were read."""
        states = jax.tree.map(
            lambda x: jax.vmap(lambda own, at: own[at])(x, above_BW if level > 1 else jnp.zeros_like(above_BW)),
            self.warp_states,
        )
        after = dataclasses.replace(self, warp_states=sample.advance_all(states, tokens_BW))
        values_BW = jnp.take_along_axis(self.values_BN, best_BW, axis=1)
        rows_BW = jnp.broadcast_to(jnp.arange(first, first + best_BW.shape[1])[None], best_BW.shape)
        return after._add(sample, logits_BWV, values_BW, rows_BW, children, level)

    def _add(
        self, sample: Sampler, logits_BWV: Array, values_BW: Array, rows_BW: Array, children: int, level: int
    ) -> _Found:
        (batch, W), known = values_BW.shape, self.tokens_BN.shape[1]
        families_PC = known + np.arange(W * children, dtype=np.int32).reshape(W, children)
        tokens_BWC, log_probs_BWV = sample.siblings(logits_BWV, families_PC, depth=level, warp_state=self.warp_states)
        by_BWV = log_probs_BWV
        if log_probs_BWV is None:
            by_BWV = jax.nn.log_softmax(logits_BWV.astype(jnp.float32), axis=-1)
        own_BWC = jnp.take_along_axis(by_BWV, tokens_BWC, axis=-1)

        def join(old_BN: Array, new_BWC: Array) -> Array:
            return jnp.concatenate([old_BN, new_BWC.reshape(batch, -1).astype(old_BN.dtype)], axis=1)

        rows_BWC = jnp.broadcast_to(rows_BW[..., None], tokens_BWC.shape)
        return dataclasses.replace(
            self,
            tokens_BN=join(self.tokens_BN, tokens_BWC),
            values_BN=join(self.values_BN, values_BW[..., None] + own_BWC),
            parents_BN=join(self.parents_BN, rows_BWC),
            read_BN=join(self.read_BN, jnp.zeros_like(tokens_BWC)),
            newest=W * children,
            log_probs=self.log_probs if log_probs_BWV is None else (*self.log_probs, log_probs_BWV),
        )

    def draft(self, growth: Growth) -> tuple[Draft, Array]:
        """Returns the proposed tree, and the row that the draft read for each of its scored rows."""
        if self.log_probs and growth.nodes is not None and growth.nodes < growth.num_grown:
            raise ValueError(
                f"nodes = {growth.nodes} of {growth.num_grown} drawn ones: to drop what was drawn for its value is "
                'biased; leave nodes out, or take a rule that chooses children, such as RecursiveRule("top")'
            )
        batch = len(self.tokens_BN)
        # A child is never more probable than its parent, and ties go to the earlier node: what is kept is a tree.
        _, chosen_BK = jax.lax.top_k(self.values_BN, growth.K)
        chosen_BK = jnp.sort(chosen_BK, axis=1) if growth.K < growth.num_grown else _all_of(self.values_BN)
        tokens_BK, parents_BK, read_BK = (
            jnp.take_along_axis(x, chosen_BK, axis=1) for x in (self.tokens_BN, self.parents_BN, self.read_BN)
        )
        read_BT = jnp.concatenate([jnp.zeros((batch, 1), jnp.int32), read_BK], axis=1)
        # The scored row of the parent is that for which the draft read the parent's row.
        is_parent_BKT = (parents_BK[..., None] == read_BT[:, None]) & (
            (read_BT > 0) | (jnp.arange(growth.K + 1)[None] == 0)
        )[:, None]
        return Draft(
            tokens_BK=tokens_BK,
            num_drafted_B=jnp.full((batch,), growth.K, jnp.int32),
            log_probs_BRV=jnp.concatenate(self.log_probs, axis=1) if self.log_probs else None,
            parents_BK=jnp.argmax(is_parent_BKT, axis=-1).astype(jnp.int32),
            law_rows_BT=read_BT if self.log_probs else None,
            depth=growth.depth,
            width=growth.children,
        ), read_BT


def _all_of(x_BN: Array) -> Array:
    return jnp.broadcast_to(jnp.arange(x_BN.shape[1])[None], x_BN.shape)


@dataclasses.dataclass(frozen=True)
class GrowingModelTree(GrowingDrafter, ModelDrafter):
    """Drafts a growing tree with ``model``.

    Attributes:
      model, window: as in `ModelDrafter`.
      growth: the sizes.
    """

    def propose(self, weights: Weights, state: Any, prefix: Prefix, cache: Any, sample: Sampler) -> Proposal:
        start_B, W = prefix.lengths_B - 1, self.growth.expanded

        def step(level: int, expanded: _Expanded, state: Any) -> tuple[Array, Any]:
            block, at_B = self.block(start_B, level, expanded), start_B + 1 + (level - 1) * W
            output = self.model(weights.draft, expanded.tokens_BW, at_B, state, block=block)
            return output.logits_BTV, output.cache

        logits_BV, state = self.last_logits(weights, state, prefix.tokens_BS, prefix.lengths_B, self.first_window)
        draft, read_BT, state = self.grow(sample, logits_BV, step, state)
        return draft, (state, read_BT), cache

    def commit(self, weights: Weights, state: Any, scored: ScoredRound, cache: Any) -> tuple[Any, Any]:
        if scored.verdict.rows_BT is None:  # a round without a draft
            return state, cache
        state, read_BT = state
        # A leaf that was accepted last was not read; the next round's first call reads it.
        rows_BT = jnp.take_along_axis(read_BT, scored.verdict.rows_BT, axis=1)
        return self.model.compact(state, scored.prefix.lengths_B - 1, rows_BT, self.growth.num_read + 1), cache


@dataclasses.dataclass(frozen=True)
class GrowingFeatureTree(GrowingDrafter, FeatureDrafter):
    """Drafts a growing tree with ``head``, as EAGLE-2 does.

    Attributes:
      target, head, window: as in `FeatureDrafter`; the head has a layer.
      growth: the sizes.
    """

    def __post_init__(self):
        super().__post_init__()
        if not self.head.config.has_layer:
            raise ValueError("the tree of Medusa heads does not grow: take FeatureTree with a shape")

    def propose(self, weights: Weights, state: Any, prefix: Prefix, cache: Any, sample: Sampler) -> Proposal:
        start_B, W, head = prefix.lengths_B - 1, self.growth.expanded, self.head
        of_target = functools.partial(self.target.unembed_normed, weights.target)

        def score(features_BTD: Array, offset: int) -> Array:
            return head.expand(weights.draft, head.logits(weights.draft, features_BTD, of_target, offset))

        def step(level: int, expanded: _Expanded, carry: Any) -> tuple[Array, Any]:
            head_cache, cache, features_BRD = carry
            block, at_B = self.block(start_B, level, expanded), start_B + 1 + (level - 1) * W
            embedded_BTD, cache = self._embed(weights, expanded.tokens_BW, at_B, cache, block)
            of_parents_BTD = jnp.take_along_axis(features_BRD, expanded.parents_BW[..., None], axis=1)
            returned_BTD, head_cache = head(
                weights.draft, embedded_BTD, of_parents_BTD, at_B - 1, head_cache, pairs_of(block)
            )
            features_BRD = jnp.concatenate([features_BRD, returned_BTD], axis=1)
            return score(returned_BTD, level), (head_cache, cache, features_BRD)

        feature_B1D = state.feature_BD[:, None]
        carry = state.cache, cache, feature_B1D
        draft, _, (head_cache, cache, _) = self.grow(sample, score(feature_B1D, 0)[:, 0], step, carry)
        return proposed(draft, state, head_cache, cache)
