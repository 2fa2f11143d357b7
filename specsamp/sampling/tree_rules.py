"""Lossless rules for token trees: several candidates for a position, of which at most one is
accepted.

The children of a scored row are *siblings*. A rule draws siblings (`siblings`) and verifies them:

* **Recursive rejection** (SpecInfer, arXiv 2305.09781; RSD, arXiv 2402.14160; Sequoia, arXiv
  2402.12374) tests siblings one after the other, in the order in which they were drawn. With R the
  target's distribution at first, and p the distribution that the sibling was drawn from, x is
  accepted with ``min(1, R(x) / p(x))``; after a rejection R becomes ``norm((R - p)+)``. Without
  replacement, p then loses x and is normalised again. On a chain this is the token rule.
* **K-SEQ** (SpecTr, arXiv 2310.15141) tests independent siblings with the same threshold for all.
* **Traversal** (arXiv 2505.12398) tests whole paths, leaves first. On a chain this is the block
rule.

For a token that was not drawn but chosen (most probable tokens, or retrieved tokens), p is one-hot.
So it is accepted with its probability R(x), and after a rejection R(x) is set to 0.

If a distribution has fewer tokens than siblings are needed (a greedy row, top-k, a grammar), the
remaining siblings have p = 0: they are dead nodes, never accepted and never subtracted. So are
nodes below a distribution that is NaN.

`walk` takes the random numbers of the tests as an argument, and returns the weights of the last
token. So unit tests can enumerate both without sampling.
"""

from __future__ import annotations

import abc
import dataclasses

import jax
import jax.numpy as jnp

from specsamp import validate
from specsamp.pytrees import pytree
from specsamp.sampling.draw import draw
from specsamp.sampling.rejection import BlockRule, TokenRule
from specsamp.sampling.rng import Purpose, RoundKeys
from specsamp.sampling.rules import (
    Draft,
    Rule,
    TargetDistributions,
    Verdict,
    divide,
    make_verdict,
    take_row,
)
from specsamp.sampling.warp import FOLDED, fold, token_ids, unfold

Array = jax.Array

# How siblings are made: drawn without replacement, drawn with replacement, the most probable, or
# these and a last draw.
DISTINCT, INDEPENDENT, TOP, TOP_AND_DRAWN = "distinct", "independent", "top", "top_and_drawn"
CHILDREN = (DISTINCT, INDEPENDENT, TOP, TOP_AND_DRAWN)
BISECTIONS = 50  # of K-SEQ's threshold, in float64
MAX_UNROLLED = 32  # sequences whose rows are written one by one: a scatter is a loop on a TPU


@pytree
class Walk:
    """The end of a walk through a tree. T = depth + 1."""

    rows_BT: Array  # int32, the scored rows of the accepted path; later entries are arbitrary
    num_accepted_B: Array  # int32
    weights_BV: Array  # of the token that follows; not normalised
    asked_BK: Array  # the acceptance probability of each node that was tested; elsewhere -1


@pytree
class Siblings:
    """The children of one scored row per sequence, in the order in which they were drawn. C =
    ``draft.width``.
    """

    nodes_BC: Array  # int32, 0 where there is none
    tokens_BC: Array  # int32
    is_drafted_BC: Array  # bool, whether there is such a child
    is_chosen_BC: Array  # bool, whether it was chosen instead of drawn

    @classmethod
    def of(cls, draft: Draft, row_B: Array, is_chosen_BK: Array) -> Siblings:
        """Returns the children of ``row_B``."""
        is_child_BK = draft.parents_BK == row_B[:, None]
        rank_BK = jnp.cumsum(is_child_BK, axis=1) - 1
        is_one_BCK = is_child_BK[:, None] & (
            rank_BK[:, None] == jnp.arange(draft.width or draft.tokens_BK.shape[1])[None, :, None]
        )
        nodes_BC = jnp.argmax(is_one_BCK, axis=-1).astype(jnp.int32)

        def take(x_BK: Array) -> Array:
            return jnp.take_along_axis(x_BK, nodes_BC, axis=1)

        return cls(
            nodes_BC=nodes_BC,
            tokens_BC=take(draft.tokens_BK),
            is_drafted_BC=is_one_BCK.any(-1) & take(draft.is_drafted_BK),
            is_chosen_BC=take(is_chosen_BK),
        )


@dataclasses.dataclass(frozen=True)
class TreeRule(Rule):
    """Base of the rules for trees: draws siblings, walks to the last accepted node, and samples the
    next token.

    Attributes:
      children: "distinct", drawn without replacement; "independent", drawn with replacement; "top",
        the most probable tokens; "top_and_drawn", the most probable tokens and a last one that is
        drawn from the rest.
    """

    children: str = DISTINCT

    trees, chains = True, False
    of_chains = TokenRule()
    known_children = CHILDREN

    def __post_init__(self):
        validate.choice("children", self.children, self.known_children)

    @property
    def chooses(self) -> bool:
        """Returns whether siblings are the most probable tokens, so that drafts have no
        distributions.
        """
        return self.children == TOP

    @abc.abstractmethod
    def walk(self, draft: Draft, target: TargetDistributions, uniforms_BK: Array) -> Walk:
        """Walks to the last accepted node; a node is accepted if its random number is below its
        probability.
        """

    def siblings(
        self, log_probs_BPV: Array, keys: RoundKeys, *, nodes_PC: Array, depth: Array | int
    ) -> Array:
        batch, families, vocab_size = log_probs_BPV.shape
        nodes_BX = jnp.broadcast_to(jnp.maximum(nodes_PC, 0).reshape(1, -1), (batch, nodes_PC.size))
        uniforms_BPC2 = keys.uniforms(Purpose.DRAFT, nodes_BX).reshape(batch, *nodes_PC.shape, 2)
        last_P = jnp.sum(nodes_PC >= 0, axis=1) - 1
        weights_BPV = jnp.exp(log_probs_BPV)
        drawn = []
        for c in range(nodes_PC.shape[1]):
            tokens_BP = draw(weights_BPV, uniforms_BPC2[:, :, c])
            if self.children == TOP_AND_DRAWN:
                tokens_BP = jnp.where(
                    last_P[None] == c, tokens_BP, jnp.argmax(weights_BPV, axis=-1)
                )
            drawn.append(tokens_BP.astype(jnp.int32))
            if self.children != INDEPENDENT:
                weights_BPV = jnp.where(
                    jnp.arange(vocab_size)[None, None] == tokens_BP[..., None], 0, weights_BPV
                )
        return jnp.stack(drawn, axis=-1)

    def verify(self, draft: Draft, target: TargetDistributions, keys: RoundKeys) -> Verdict:
        """Draws the random numbers of the tests, walks, and draws the token that follows."""
        if draft.parents_BK is None:  # a round without a draft
            return self.of_chains.verify(draft, target, keys)
        walk = self.walk(draft, target, keys.accept_uniforms(*draft.tokens_BK.shape))
        uniforms_B2 = keys.uniforms(Purpose.RESIDUAL, walk.num_accepted_B[:, None])[:, 0]
        return make_verdict(
            draft, walk.num_accepted_B, draw(walk.weights_BV, uniforms_B2), walk.rows_BT
        )

    def is_chosen(self, draft: Draft) -> Array:
        """Returns whether each node was chosen instead of drawn, bool ``[B, K]``."""
        if draft.log_probs_BRV is None or self.children == TOP:
            return jnp.ones(draft.tokens_BK.shape, bool)
        if self.children != TOP_AND_DRAWN:
            return jnp.zeros(draft.tokens_BK.shape, bool)
        K = draft.tokens_BK.shape[1]
        is_sibling_BKK = draft.parents_BK[:, :, None] == draft.parents_BK[:, None, :]
        return (is_sibling_BKK & (jnp.arange(K)[None, None] > jnp.arange(K)[None, :, None])).any(-1)


@dataclasses.dataclass(frozen=True)
class RecursiveRule(TreeRule):
    """Recursive rejection: tests siblings one after the other, from the root down; warps only the
    rows on its path.
    """

    def walk(self, draft: Draft, target: TargetDistributions, uniforms_BK: Array) -> Walk:
        batch, K = uniforms_BK.shape
        depth, is_chosen_BK = draft.most_accepted, self.is_chosen(draft)

        def visit(level: Array, carry: tuple[Walk, Array, object]) -> tuple[Walk, Array, object]:
            walk, row_B, warp_state = carry
            family = Siblings.of(draft, row_B, is_chosen_BK)
            target_BV = jnp.exp(target.at(row_B, warp_state))
            accept_BC, weights_BV = self.judge(target_BV, draft.probs_at(row_B), family)
            uniforms_BC = jnp.take_along_axis(uniforms_BK, family.nodes_BC, axis=1)
            passes_BC = family.is_drafted_BC & (uniforms_BC < accept_BC)
            moves_B, child_B = passes_BC.any(1), jnp.argmax(passes_BC, axis=1)
            node_B = take_row(family.nodes_BC, child_B)
            row_B = jnp.where(moves_B, node_B + 1, row_B)
            token_B = take_row(family.tokens_BC, child_B)
            is_asked_BC = family.is_drafted_BC & (jnp.cumsum(passes_BC, axis=1) - passes_BC == 0)
            is_asked_BCK = is_asked_BC[..., None] & (
                family.nodes_BC[..., None] == jnp.arange(K)[None, None]
            )
            asked_BK = jnp.max(jnp.where(is_asked_BCK, accept_BC[..., None], -1), axis=1)
            walk = Walk(
                rows_BT=walk.rows_BT.at[:, level + 1].set(row_B, mode="drop"),
                num_accepted_B=walk.num_accepted_B + moves_B,
                weights_BV=weights_BV,
                asked_BK=jnp.maximum(walk.asked_BK, asked_BK),
            )
            return walk, row_B, target.advance(warp_state, token_B, moves_B)

        # A text that has ended stands still: its last row is judged again, with the same answers.
        nowhere_B = jnp.zeros(batch, jnp.int32)
        start = Walk(
            rows_BT=jnp.zeros((batch, depth + 1), jnp.int32),
            num_accepted_B=nowhere_B,
            weights_BV=jnp.zeros((batch, target.logits_BTV.shape[-1]), target.logits_BTV.dtype),
            asked_BK=jnp.full((batch, K), -1, target.logits_BTV.dtype),
        )
        return jax.lax.fori_loop(0, depth + 1, visit, (start, nowhere_B, target.warp_state))[0]

    def judge(
        self, target_BV: Array, draft_BV: Array | None, family: Siblings
    ) -> tuple[Array, Array]:
        """Returns the acceptance probabilities of the children of one row, and the residual.

        Args:
          target_BV, draft_BV: probabilities after this row; ``draft_BV`` None: all children were
            chosen.

        Returns:
          The acceptance probability of each child given that all earlier siblings were rejected,
          ``[B, C]``, and the weights ``[B, V]`` of the next token given that all siblings were
          rejected.
        """
        rest, accept = fold(target_BV), []
        draft = None if draft_BV is None else fold(draft_BV)
        for c in range(family.tokens_BC.shape[1]):
            token_B = family.tokens_BC[:, c]
            law = law_of(draft, token_B, family.is_chosen_BC[:, c], rest)
            p_B = take_token(law, token_B)
            is_live_B = family.is_drafted_BC[:, c] & (p_B > 0)
            ratio_B = take_token(rest, token_B) / jnp.where(is_live_B, p_B, 1)
            accept.append(jnp.where(is_live_B, jnp.minimum(ratio_B, 1), 0))
            rest = jnp.where(
                is_live_B[:, None, None], normalise(jnp.maximum(rest - law, 0), rest), rest
            )
            if draft is not None and self.children != INDEPENDENT:
                draft = without(draft, token_B, is_live_B)
        return jnp.stack(accept, axis=1), unfold(rest, target_BV.shape[-1])


@dataclasses.dataclass(frozen=True)
class KSeqRule(RecursiveRule):
    """K-SEQ: accepts independent siblings with ``min(1, q / (rho p))``, with the smallest rho that
    is exact.
    """

    children: str = INDEPENDENT

    known_children = (INDEPENDENT,)

    def judge(
        self, target_BV: Array, draft_BV: Array | None, family: Siblings
    ) -> tuple[Array, Array]:
        if draft_BV is None:
            return super().judge(target_BV, draft_BV, family)
        p_BC = jnp.take_along_axis(draft_BV, family.tokens_BC, axis=1)
        is_live_BC = family.is_drafted_BC & (p_BC > 0)
        count_B = is_live_BC.sum(1).astype(target_BV.dtype)
        target, draft = fold(target_BV), fold(draft_BV)

        def overlap(rho_B: Array) -> Array:
            return jnp.minimum(target / rho_B[:, None, None], draft).sum(FOLDED)

        def some_accepted(beta_B: Array) -> Array:
            return 1 - (1 - jnp.minimum(beta_B, 1)) ** count_B

        def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
            low_B, high_B = ends
            rho_B = (low_B + high_B) / 2
            beta_B = overlap(rho_B)
            is_enough_B = some_accepted(beta_B) <= rho_B * beta_B
            return jnp.where(is_enough_B, low_B, rho_B), jnp.where(is_enough_B, rho_B, high_B)

        # From above: a threshold that is larger than needed is exact, too.
        one_B = jnp.ones_like(count_B)
        rho_B = jax.lax.fori_loop(0, BISECTIONS, halve, (one_B, jnp.maximum(count_B, 1)))[1]
        rho_B = jnp.where(count_B > 1, rho_B, 1)
        beta_B = overlap(rho_B)
        q_BC = jnp.take_along_axis(target_BV, family.tokens_BC, axis=1)
        ratio_BC = q_BC / (rho_B[:, None] * jnp.where(is_live_BC, p_BC, 1))
        share_B11 = (some_accepted(beta_B) / jnp.where(beta_B > 0, beta_B, 1))[:, None, None]
        left = jnp.maximum(
            target - jnp.minimum(target / rho_B[:, None, None], draft) * share_B11, 0
        )
        left = jnp.where((count_B > 0)[:, None, None], normalise(left, target), target)
        return jnp.where(is_live_BC, jnp.minimum(ratio_BC, 1), 0), unfold(left, target_BV.shape[-1])


@dataclasses.dataclass(frozen=True)
class TraversalRule(TreeRule):
    """Traversal: tests whole paths, leaves first; in expectation never keeps fewer tokens than
    recursive rejection.

    It warps all rows, and subtracts once for each rejected node.
    """

    of_chains = BlockRule()

    def walk(self, draft: Draft, target: TargetDistributions, uniforms_BK: Array) -> Walk:
        K, depth = uniforms_BK.shape[1], draft.most_accepted
        state = _Traversal.start(draft, jnp.exp(target.all()), depth, self.is_chosen(draft))

        def visit(_: Array, state: _Traversal) -> _Traversal:
            rows_BT, num_B, weights_BT = state.first_leaf(draft, depth)
            row_B = take_row(rows_BT, num_B)
            node_B = jnp.maximum(row_B - 1, 0)
            weight_B, judged_B = take_row(weights_BT, row_B), ~state.ended_B & (row_B > 0)
            ends_B = ~state.ended_B & ((row_B == 0) | (take_row(uniforms_BK, node_B) < weight_B))
            is_node_BK = judged_B[:, None] & (jnp.arange(K)[None] == node_B[:, None])
            state = dataclasses.replace(
                state,
                weights_BT=weights_BT,
                ended_B=state.ended_B | ends_B,
                rows_BT=jnp.where(ends_B[:, None], rows_BT, state.rows_BT),
                num_accepted_B=jnp.where(ends_B, num_B, state.num_accepted_B),
                asked_BK=jnp.where(is_node_BK, weight_B[:, None], state.asked_BK),
            )
            return state.without_leaf(
                draft, node_B, judged_B & ~ends_B, self.children != INDEPENDENT
            )

        state = jax.lax.fori_loop(0, K, visit, state)
        weights = take_row(state.target_BT, take_row(state.rows_BT, state.num_accepted_B))
        return Walk(
            rows_BT=state.rows_BT,
            num_accepted_B=state.num_accepted_B,
            weights_BV=unfold(weights, target.logits_BTV.shape[-1]),
            asked_BK=state.asked_BK,
        )


@pytree
class _Traversal:
    """The remaining tree and distributions, which are folded, during a walk of `TraversalRule`."""

    target_BT: Array  # the target's distributions minus the rejected mass
    # A row for each scored row: a rejected token is dead below its own parent alone.
    draft_BT: Array | None
    weights_BT: Array  # the weight of the path to each row; -1 until it is on a path
    is_gone_BK: Array
    is_chosen_BK: Array
    ended_B: Array
    rows_BT: Array  # as in `Walk`
    num_accepted_B: Array
    asked_BK: Array

    @classmethod
    def start(cls, draft: Draft, target_BTV: Array, depth: int, is_chosen_BK: Array) -> _Traversal:
        batch, K = draft.tokens_BK.shape
        weights_BT = jnp.full((batch, K + 1), -1, target_BTV.dtype)
        rows_BT = jnp.broadcast_to(jnp.arange(K + 1), weights_BT.shape)
        draft_BTV = jax.vmap(draft.probs_at, in_axes=1, out_axes=1)(rows_BT)
        return cls(
            target_BT=fold(target_BTV),
            draft_BT=None if draft_BTV is None else fold(draft_BTV),
            weights_BT=weights_BT.at[:, 0].set(1),
            is_gone_BK=~draft.is_drafted_BK,
            is_chosen_BK=is_chosen_BK,
            ended_B=jnp.zeros(batch, bool),
            rows_BT=jnp.zeros((batch, depth + 1), jnp.int32),
            num_accepted_B=jnp.zeros(batch, jnp.int32),
            asked_BK=jnp.full((batch, K), -1, target_BTV.dtype),
        )

    def first_leaf(self, draft: Draft, depth: int) -> tuple[Array, Array, Array]:
        """Returns the path to the first leaf, its length, and the weights of the rows on it."""
        row_B, num_B, weights_BT = jnp.zeros_like(self.num_accepted_B), 0, self.weights_BT
        rows = [row_B]
        for _ in range(depth):
            is_child_BK = (draft.parents_BK == row_B[:, None]) & ~self.is_gone_BK
            has_child_B, node_B = (
                is_child_BK.any(1),
                jnp.argmax(is_child_BK, axis=1).astype(jnp.int32),
            )
            q_B, p_B = self._probs(draft, node_B)
            weight_B = jnp.minimum(take_row(weights_BT, row_B) * divide(q_B, p_B, 0), 1)
            is_new_BT = (
                jnp.arange(weights_BT.shape[1])[None] == node_B[:, None] + 1
            ) & has_child_B[:, None]
            weights_BT = jnp.where(is_new_BT & (weights_BT < 0), weight_B[:, None], weights_BT)
            row_B, num_B = jnp.where(has_child_B, node_B + 1, row_B), num_B + has_child_B
            rows.append(row_B)
        return jnp.stack(rows, axis=1), num_B.astype(jnp.int32), weights_BT

    def without_leaf(
        self, draft: Draft, node_B: Array, rejects_B: Array, is_distinct: bool
    ) -> _Traversal:
        """Removes a rejected leaf, and subtracts its distribution from its parent's
        distributions.
        """
        parent_B, token_B = take_row(draft.parents_BK, node_B), take_row(draft.tokens_BK, node_B)
        of_target = take_row(self.target_BT, parent_B)
        of_draft = None if self.draft_BT is None else take_row(self.draft_BT, parent_B)
        law = law_of(of_draft, token_B, take_row(self.is_chosen_BK, node_B), of_target)
        subtracts_B = rejects_B & (take_token(law, token_B) > 0)
        weight_B = take_row(self.weights_BT, parent_B)
        left = jnp.maximum(weight_B[:, None, None] * of_target - law, 0)
        mass_B = left.sum(FOLDED)
        total_B = mass_B + (1 - weight_B)  # in this order: at a weight of 1 the path is always kept
        after_B = divide(mass_B, total_B, 1)
        is_parent_BT = subtracts_B[:, None] & (
            jnp.arange(self.weights_BT.shape[1])[None] == parent_B[:, None]
        )
        new = jnp.where(subtracts_B[:, None, None], normalise(left, of_target), of_target)
        draft_BT = self.draft_BT
        if draft_BT is not None and is_distinct:
            draft_BT = _put(draft_BT, without(of_draft, token_B, subtracts_B), parent_B)
        return dataclasses.replace(
            self,
            target_BT=_put(self.target_BT, new, parent_B),
            draft_BT=draft_BT,
            weights_BT=jnp.where(is_parent_BT, after_B[:, None], self.weights_BT),
            is_gone_BK=self.is_gone_BK
            | (
                rejects_B[:, None] & (jnp.arange(self.is_gone_BK.shape[1])[None] == node_B[:, None])
            ),
        )

    def _probs(self, draft: Draft, node_B: Array) -> tuple[Array, Array]:
        """Returns the remaining probabilities of a row under target and draft."""
        parent_B, token_B = take_row(draft.parents_BK, node_B), take_row(draft.tokens_BK, node_B)
        q_B = take_token(self.target_BT, token_B, parent_B)
        if self.draft_BT is None:
            return q_B, jnp.ones_like(q_B)
        p_B = take_token(self.draft_BT, token_B, parent_B)
        return q_B, jnp.where(take_row(self.is_chosen_BK, node_B), 1, p_B)


# The functions below take folded distributions ``[B, 8, V / 8]``, see
# `specsamp.sampling.warp.fold`.


def is_token(token_B: Array, like: Array) -> Array:
    """Returns which places hold these tokens, bool."""
    return token_ids(like) == token_B[:, None, None]


def take_token(folded: Array, token_B: Array, *at_B: Array) -> Array:
    """Returns the number of one token of each ``folded[b]``, or of each ``folded[b, at_B[b]]``."""
    columns = folded.shape[-1]
    return folded[jnp.arange(len(token_B)), *at_B, token_B // columns, token_B % columns]


def law_of(draft: Array | None, token_B: Array, is_chosen_B: Array, like: Array) -> Array:
    """Returns the probabilities that a token was drawn from; one-hot for a chosen token."""
    one_hot = is_token(token_B, like).astype(like.dtype)
    return one_hot if draft is None else jnp.where(is_chosen_B[:, None, None], one_hot, draft)


def without(probs: Array, token_B: Array, is_live_B: Array) -> Array:
    """Returns the distribution without a token, normalised; all zero if no other token is left."""
    removed = jnp.where(is_token(token_B, probs), 0, probs)
    return jnp.where(is_live_B[:, None, None], normalise(removed, removed), probs)


def normalise(weights: Array, otherwise: Array) -> Array:
    """Returns weights divided by their sum, or ``otherwise`` where the sum is 0."""
    return divide(weights, weights.sum(FOLDED, keepdims=True), otherwise)


def _put(x_BT: Array, row_B: Array, at_B: Array) -> Array:
    if len(at_B) > MAX_UNROLLED:
        return jax.vmap(lambda x, row, at: jax.lax.dynamic_update_index_in_dim(x, row, at, axis=0))(
            x_BT, row_B, at_B
        )
    zero = jnp.zeros((), at_B.dtype)
    for b in range(len(at_B)):
        x_BT = jax.lax.dynamic_update_slice(
            x_BT, row_B[b][None, None], (zero + b, at_B[b], zero, zero)
        )
    return x_BT
