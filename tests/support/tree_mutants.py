"""Plausible mistakes of token trees, which the tests of the loop's distribution must catch."""

import dataclasses

import jax
import jax.numpy as jnp

from specsamp.decoding.drafters import ModelTree
from specsamp.decoding.loop import Loop
from specsamp.sampling.tree_rules import RecursiveRule
from support.fakes import TableLM


class WrongOrder(RecursiveRule):
    """Judges the sibling that was drawn last first."""

    def judge(self, target_BV, draft_BV, family):
        accept_BC, weights_BV = super().judge(target_BV, draft_BV, jax.tree.map(lambda x: jnp.flip(x, 1), family))
        return jnp.flip(accept_BC, 1), weights_BV


class NotNormalisedAgain(RecursiveRule):
    """After a refusal the draft's distribution still has the refused token."""

    def judge(self, target_BV, draft_BV, family):
        return RecursiveRule("independent").judge(target_BV, draft_BV, family)


class PrunedByValue(ModelTree):
    """Of the siblings that were drawn, only the more probable one is proposed."""

    def propose(self, weights, state, prefix, cache, sample):
        draft, state, cache = super().propose(weights, state, prefix, cache, sample)
        first, second = (
            jnp.take_along_axis(draft.log_probs_BRV[:, 0], draft.tokens_BK[:, i : i + 1], axis=1)[:, 0] for i in (0, 1)
        )
        num_drafted_B = jnp.where(first < second, 0, draft.num_drafted_B)
        return dataclasses.replace(draft, num_drafted_B=num_drafted_B), state, cache


@dataclasses.dataclass(frozen=True)
class MergesEqual(RecursiveRule):
    """Siblings that were drawn with replacement are merged where they are equal, and lose their turns."""

    children: str = "independent"

    def judge(self, target_BV, draft_BV, family):
        tokens_BC = family.tokens_BC
        is_equal_BCC = tokens_BC[:, :, None] == tokens_BC[:, None]
        is_first_BC = jnp.argmax(is_equal_BCC, axis=2) == jnp.arange(tokens_BC.shape[1])[None]
        merged = dataclasses.replace(family, is_drafted_BC=family.is_drafted_BC & is_first_BC)
        return super().judge(target_BV, draft_BV, merged)


class NotMoved(TableLM):
    """The accepted slots stay where they were."""

    def compact(self, cache, start_B, rows_BT, num_rows):
        return cache


class DraftNotMoved(ModelTree):
    def commit(self, weights, state, scored, cache):
        return state[0], cache


class PositionsByRow(Loop):
    """Every node sees all rows before it, at positions of its index: as if the tree were a chain."""

    def score(self, weights, state, draft, cache):
        return super().score(weights, state, dataclasses.replace(draft, parents_BK=None), cache)
