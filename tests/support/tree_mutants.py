"""Plausible mistakes of token trees, which the tests of the loop's distribution must catch."""

import dataclasses
import itertools
from unittest import mock

import jax
import jax.numpy as jnp

from specsamp import Loop, RecursiveRule
from specsamp.decoding.drafters import FeatureTree, ModelTree, tree
from specsamp.decoding.trees import pick
from specsamp.sampling import tree_rules
from specsamp.sampling.rules import TargetDistributions
from support.fakes import TableLM


class WrongOrder(RecursiveRule):
    """Judges siblings in reverse order."""

    def judge(self, target_BV, draft_BV, family):
        accept_BC, weights_BV = super().judge(
            target_BV, draft_BV, jax.tree.map(lambda x: jnp.flip(x, 1), family)
        )
        return jnp.flip(accept_BC, 1), weights_BV


class KeepsTheSecond(RecursiveRule):
    """Keeps the second rejected token in the draft's distribution."""

    def judge(self, target_BV, draft_BV, family):
        calls, without = itertools.count(), tree_rules.without

        def forgetful(draft, *rest):
            return draft if next(calls) == 1 else without(draft, *rest)

        with mock.patch.object(tree_rules, "without", forgetful):
            return super().judge(target_BV, draft_BV, family)


class StatesInOrder(TargetDistributions):
    """Advances the warp's state of a node from the node before it, as in a chain."""

    def _states(self):
        return TargetDistributions._states(
            dataclasses.replace(self, draft=dataclasses.replace(self.draft, parents_BK=None))
        )


class PrunedByValue(ModelTree):
    """Submits nothing if the second sibling is more probable than the first."""

    def propose(self, *arguments):
        draft, state, cache = super().propose(*arguments)
        first, second = (
            jnp.take_along_axis(draft.log_probs_BRV[:, 0], draft.tokens_BK[:, i : i + 1], axis=1)[
                :, 0
            ]
            for i in (0, 1)
        )
        num_drafted_B = jnp.where(first < second, 0, draft.num_drafted_B)
        return dataclasses.replace(draft, num_drafted_B=num_drafted_B), state, cache


@dataclasses.dataclass(frozen=True)
class MergesEqual(RecursiveRule):
    """Merges equal siblings that were drawn with replacement, which thus lose their turns."""

    children: str = "independent"

    def judge(self, target_BV, draft_BV, family):
        tokens_BC = family.tokens_BC
        is_equal_BCC = tokens_BC[:, :, None] == tokens_BC[:, None]
        is_first_BC = jnp.argmax(is_equal_BCC, axis=2) == jnp.arange(tokens_BC.shape[1])[None]
        merged = dataclasses.replace(family, is_drafted_BC=family.is_drafted_BC & is_first_BC)
        return super().judge(target_BV, draft_BV, merged)


class NotMoved(TableLM):
    """Does not move the accepted slots."""

    def compact(self, cache, start_B, rows_BT, num_rows):
        return cache


class DraftNotMoved(ModelTree):
    def commit(self, weights, state, scored, cache):
        return state if scored.verdict.rows_BT is None else state[0], cache


class RootsFeature(FeatureTree):
    """Reads every node with the feature of the root, not of its parent."""

    def propose(self, *arguments):
        with mock.patch.object(tree, "pick", lambda x_BRD, rows_BT: pick(x_BRD, 0 * rows_BT)):
            return super().propose(*arguments)


class PositionsByRow(Loop):
    """Scores a tree as a chain: each node sees all rows before it, at the position of its index."""

    def score(self, weights, state, draft, cache):
        return super().score(weights, state, dataclasses.replace(draft, parents_BK=None), cache)
