"""Drafters of token trees: a draft model, an early exit, heads, and prompt lookup.

Each is the drafter of chains that it derives from, with a `TreeShape` or a `Growth` instead of a
draft length::

    generate(pair, prompts, drafter=ModelTree(pair.draft, tree=TreeShape.of_widths(3, 2, 1)),
    rule=RecursiveRule(), ...)

A tree takes one call of the draft for each level except the last. The rule draws the siblings;
under greedy sampling they are the draft's most probable tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from specsamp import validate
from specsamp.decoding.drafter import Drafter, DrafterHooks, Prefix
from specsamp.decoding.drafters.block_head import BlockDrafter
from specsamp.decoding.drafters.early_exit import EarlyExitDrafter
from specsamp.decoding.drafters.feature import FeatureDrafter
from specsamp.decoding.drafters.model import ModelDrafter
from specsamp.decoding.drafters.ngram import NgramDrafter, copied
from specsamp.decoding.trees import (
    DraftRows,
    Growth,
    TreeShape,
    check_model,
    grow,
    pick,
    tree_draft,
)
from specsamp.models.interface import LanguageModel
from specsamp.sampling.warp import greedy


@dataclasses.dataclass(frozen=True)
class TreeDrafter(DrafterHooks):
    """A mixin that turns a drafter of chains, the next base class, into a drafter of trees."""

    K: int = dataclasses.field(init=False)
    tree: TreeShape | Growth = dataclasses.field(kw_only=True)

    may_grow = True  # whether ``tree`` may be a `Growth`

    def __post_init__(self):
        if not (self.may_grow and isinstance(self.tree, Growth)):
            validate.instance("tree", self.tree, TreeShape, "TreeShape.of_widths(3, 2)")
        object.__setattr__(self, "K", self.tree.K)
        super().__post_init__()

    @property
    def depth(self):
        return self.tree.depth

    def of_length(self, K):
        """Returns the drafter of the first K nodes; raises ValueError for a growing tree."""
        if isinstance(self.tree, Growth):
            raise ValueError("a growing tree has one number of nodes")
        return dataclasses.replace(self, tree=TreeShape(self.tree.parents[:K]))

    def check(self, target, draft, draft_params):
        super().check(target, draft, draft_params)
        for model in (target, self.draft_model or target):  # a draft model reads trees, too
            check_model(model, self.tree.width)

    def step_with(self, model: LanguageModel, weights: Any, prefix: Prefix) -> Callable:
        """Returns a step for `grow` in which a model reads nodes; it carries the model's cache."""
        start_B = prefix.lengths_B - 1

        def step(rows, cache):
            count = rows.newest
            at_B, block = start_B + rows.count - count, rows.block(start_B, count)
            output = model(weights, rows.tokens_BR[:, -count:], at_B, cache, block=block)
            return output.logits_BTV, output.cache

        return step


def sized(
    chain: type[Drafter], tree: type[Drafter], size: int | TreeShape, *parts: Any, **fields: Any
) -> Drafter:
    """Returns a drafter of chains of K tokens, or of trees of a shape."""
    return (
        tree(*parts, **fields, tree=size)
        if isinstance(size, TreeShape)
        else chain(*parts, **fields, K=size)
    )


@dataclasses.dataclass(frozen=True)
class ModelTree(TreeDrafter, ModelDrafter):
    """Drafts a tree with ``model``.

    Attributes:
      model: as in `ModelDrafter`.
      tree: the shape or the growth.
    """

    def propose(self, weights, state, prefix, cache, sample):
        step = self.step_with(self.model, weights.draft, prefix)
        logits_BV, state = self.last_logits(
            weights, state, prefix.tokens_BS, prefix.lengths_B, self.first_window
        )
        draft, read_BT, state = grow(self.tree, sample, prefix.pending_B1, logits_BV, step, state)
        return draft, (state, read_BT), cache

    def commit(self, weights, state, scored, cache):
        if scored.verdict.rows_BT is None:  # a round without a draft
            return state, cache
        state, read_BT = state
        rows_BT = jnp.take_along_axis(read_BT, scored.verdict.rows_BT, axis=1)
        return self.model.compact(state, scored.prefix.lengths_B - 1, rows_BT, self.K + 1), cache


@dataclasses.dataclass(frozen=True)
class EarlyExitTree(TreeDrafter, EarlyExitDrafter):
    """Drafts a tree with the target's first layers, in the slots in which the target then scores
    it.

    Attributes:
      model, exit_layer: as in `EarlyExitDrafter`.
      tree: the shape or the growth.
    """

    def propose(self, weights, state, prefix, cache, sample):
        step, fed_BT = self.step_with(self.exit_model, weights.target, prefix), prefix.pending_B1
        first = self.exit_model(weights.target, fed_BT, prefix.lengths_B - 1, cache)
        draft, _, cache = grow(self.tree, sample, fed_BT, first.logits_BTV[:, 0], step, first.cache)
        return draft, state, cache


@dataclasses.dataclass(frozen=True)
class FeatureTree(TreeDrafter, FeatureDrafter):
    """Drafts a tree with ``head``: a node is read with the feature of its parent, in the slot
    before the node's slot.

    Medusa heads do not depend on drafted tokens: all nodes of a level are drawn from one
    distribution, and the tree has a fixed shape.

    Attributes:
      target, head: as in `FeatureDrafter`.
      tree: the shape or the growth.
    """

    @property
    def may_grow(self) -> bool:
        return self.head.config.has_layer

    def propose(self, weights, state, prefix, cache, sample):
        start_B, head = prefix.lengths_B - 1, self.head

        def score(features_BTD, offset):
            return self._expand(weights, self._logits(weights, features_BTD, offset))

        def step(rows, carry):
            head_cache, cache, features_BRD = carry
            if not head.config.has_layer:
                return score(features_BRD, rows.depths[-1]), carry
            count = rows.newest
            at_B, block = start_B + rows.count - count, rows.block(start_B, count)
            embedded_BTD, cache = self._embed(
                weights, rows.tokens_BR[:, -count:], at_B, cache, block
            )
            of_parents_BTD = pick(features_BRD, rows.parents_BR[:, -count:])
            # The pair that a node completes is one slot before the node.
            pairs = dataclasses.replace(
                block,
                positions_BT=block.positions_BT - 1,
                visible_BTR=block.visible_BTR[:, :, 1:],
            )
            returned_BTD, head_cache = head(
                weights.draft, embedded_BTD, of_parents_BTD, at_B - 1, head_cache, pairs
            )
            features_BRD = jnp.concatenate([features_BRD, returned_BTD], axis=1)
            return score(returned_BTD, rows.depths[-1]), (head_cache, cache, features_BRD)

        feature_B1D = state.feature_BD[:, None]
        carry = state.cache, cache, feature_B1D
        logits_BV = score(feature_B1D, 0)[:, 0]
        draft, _, (head_cache, cache, _) = grow(
            self.tree, sample, prefix.pending_B1, logits_BV, step, carry
        )
        state = dataclasses.replace(state, cache=head_cache)
        return draft.only_in(prefix.lengths_B >= 2), state, cache


@dataclasses.dataclass(frozen=True)
class BlockTree(TreeDrafter, BlockDrafter):
    """Drafts a tree with one call of a head that drafts blocks.

    Under the law "marginals" all nodes of a level are drawn from one distribution; under
    "conditional" the distribution of the children is corrected for each parent.

    Attributes:
      target, head, law: as in `BlockDrafter`.
      tree: the shape or the growth.
    """

    may_grow = False

    def __post_init__(self):
        super().__post_init__()
        if self.threshold:
            raise ValueError(f"threshold = {self.threshold} ends chains: leave it out for a tree")

    def propose(self, weights, state, prefix, cache, sample):
        pending_B1, head = prefix.pending_B1, self.head
        rows_BKD, logits_BKU, state = self._run_block(weights, state, prefix)

        def score(rows, corrections):
            logits_BU, x_BD = logits_BKU[:, rows.depths[-1]], rows_BKD[:, rows.depths[-1]]
            if self.law == "marginals":
                return self._expand(weights, logits_BU)[:, None], corrections
            # The states of the rows, before their children are drawn.
            scored, corrections = [], dict(corrections)
            for row in range(rows.count - rows.newest, rows.count):
                above = corrections[rows.parents_BR[0, row] if row else None]
                token_B = rows.tokens_BR[:, row]
                corrected_BU, corrections[row] = head.correct(
                    weights.draft, logits_BU, x_BD, token_B, above
                )
                scored.append(self._expand(weights, corrected_BU))
            return jnp.stack(scored, axis=1), corrections

        if self.law == "argmax":
            sample = sample.with_warp(greedy())
        begun = {None: head.begin(weights.draft, len(pending_B1))}
        logits_B1V, corrections = score(DraftRows.first(pending_B1), begun)
        draft, _, _ = grow(self.tree, sample, pending_B1, logits_B1V[:, 0], score, corrections)
        return draft.only_in(prefix.lengths_B >= 2), state, cache


@dataclasses.dataclass(frozen=True)
class NgramTree(TreeDrafter, NgramDrafter):
    """Looks up as many matches as the tree has first tokens, and proposes the continuation of each.

    The tree must consist of chains that branch at the pending token. Matches continue with
    different tokens; of two matches with the same next token, the longer one counts, or the more
    recent one if they are equally long.

    Attributes:
      max_ngram: as in `NgramDrafter`.
      tree: the shape, such as ``TreeShape.of_widths(3, 1, 1, 1)``.
    """

    may_grow = False

    def __post_init__(self):
        super().__post_init__()
        if self.corpus is not None or self.log:
            raise ValueError("a tree looks in the sequence alone: leave corpus and log out")
        if any(self.tree.parents.count(row) > 1 for row in range(1, self.K + 1)):
            raise ValueError(
                f"tree {self.tree.parents} branches below its first tokens: take of_widths(3, 1, 1)"
            )

    def draft_lengths(self, state, prefix):
        return None

    def propose(self, weights, state, prefix, cache, sample):
        found_BS = self.lengths_of_matches(prefix)
        slots, chains, is_found = found_BS.shape[1], {}, []
        for row in self.tree.level(1):
            best_B = jnp.argmax(found_BS * slots + jnp.arange(slots)[None], axis=1)
            is_found.append(jnp.max(found_BS, axis=1) > 0)
            chains[row] = copied(prefix, best_B, self.depth)
            found_BS = jnp.where(prefix.tokens_BS == chains[row][:, :1], 0, found_BS)
        for row in range(self.tree.level(1).stop, self.K + 1):
            chains[row] = chains[self.tree.parents[row - 1]]
        tokens = [chains[row][:, self.tree.depths[row] - 1] for row in range(1, self.K + 1)]
        draft = tree_draft(self.tree, jnp.stack(tokens, axis=1), np.array([self.tree.parents]))
        return draft.only_in(is_found[0]), state, cache
