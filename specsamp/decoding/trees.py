"""Token trees: the shapes of fixed and of growing trees, their drawing, and the accepted path after
a round.

Scored row 0 is the pending token in slot ``length - 1``, row i is node i - 1 in slot ``length - 1 +
i``; the position of a node follows from its depth. Nodes are stored level by level, siblings in the
order in which they were drawn.

A draft model reads fewer rows: the pending token, then the nodes that get children, in this order
(`DraftRows`). If the last accepted node is a leaf, the draft model has not read it; the first call
of the next round reads it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp import validate
from specsamp.decoding.sampler import Sampler
from specsamp.models.interface import Block, LanguageModel, Output
from specsamp.sampling.rules import Draft, TargetDistributions, Verdict, take_row

Array = jax.Array
Index = Array | np.ndarray  # int32 [B, N]; of NumPy [1, N], where all texts have the same tree


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """The shape of a token tree that is the same for all sequences and rounds.

    Attributes:
      parents: the scored row of each node's parent, 0 for the pending token; level by level.
        `in_levels` sorts.

    Raises:
      ValueError: a parent does not come before its node, or nodes are not level by level.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "parents", tuple(validate.integers("parents", self.parents, 0)))
        if not self.parents:
            raise ValueError("a tree needs at least one node: give parents such as (0, 0, 1)")
        for node, parent in enumerate(self.parents):
            if parent > node:
                raise ValueError(
                    f"parents[{node}] = {parent} stands behind its node: rows are counted from 1, "
                    "parents come first"
                )
        if list(self.depths) != sorted(self.depths):
            raise ValueError(
                f"the nodes of {self.parents} are not level by level: take "
                "TreeShape.in_levels(parents)"
            )

    @classmethod
    def in_levels(cls, parents: Sequence[int]) -> TreeShape:
        """Makes the shape of a tree whose nodes are in any order that puts parents first."""
        depths = _depths(parents)
        order = sorted(range(1, len(depths)), key=lambda row: depths[row])
        rows = {0: 0} | {row: at for at, row in enumerate(order, 1)}
        return cls(tuple(rows[parents[row - 1]] for row in order))

    @classmethod
    def of_widths(cls, *widths: int) -> TreeShape:
        """Makes the tree in which every node of level i has ``widths[i]`` children."""
        parents, level, count = [], [0], 1
        for width in widths:
            parents += [row for row in level for _ in range(width)]
            level = list(range(count, count + len(level) * width))
            count += len(level)
        return cls(tuple(parents))

    @property
    def K(self) -> int:
        """Returns the number of nodes."""
        return len(self.parents)

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """Returns the depth of each scored row; 0 for the pending token."""
        return tuple(_depths(self.parents))

    @property
    def depth(self) -> int:
        """Returns the largest number of tokens that can be accepted."""
        return self.depths[-1]

    @property
    def width(self) -> int:
        """Returns the largest number of siblings."""
        return max(self.parents.count(row) for row in set(self.parents))

    def level(self, depth: int) -> range:
        """Returns the scored rows at this depth."""
        first = self.depths.index(depth)
        return range(first, first + self.depths.count(depth))

    def inner(self, depth: int) -> list[int]:
        """Returns the scored rows at this depth that have children."""
        return [row for row in self.level(depth) if row in self.parents]

    def families(self, depth: int) -> np.ndarray:
        """Returns the nodes below each of `inner`, int32 ``[W, C]``; -1 where a row has fewer
        children.
        """
        families = [
            [node for node, parent in enumerate(self.parents) if parent == row]
            for row in self.inner(depth)
        ]
        width = max(map(len, families))
        return np.array([family + [-1] * (width - len(family)) for family in families], np.int32)

    def choose(self, depth: int, values_BN: Array) -> Index:
        """Returns the nodes at this depth that get children, ``[1, W]``."""
        return np.array([self.inner(depth)]) - 1

    def block(self, start_B: Array) -> Block:
        """Returns positions and visibility of the scored rows; ``start_B`` is the slot of row 0."""
        return _block(start_B, self.depths, _seen(np.array([[0, *self.parents]]), self.depth))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth:
    """The sizes of a tree whose shape depends on the draft's probabilities, in each round (EAGLE-2,
    arXiv 2406.16858).

    On each level, the ``expanded`` most probable nodes get ``children`` each. The probability of a
    node is the product of the draft's probabilities along its path.

    * Under a rule or a sampling that *chooses* children (`RecursiveRule("top")`, or greedy
      sampling), the ``nodes`` most probable nodes of all are proposed, as in EAGLE-2. They are
      one-hot for the rule.
    * Under a rule that *draws* children, all drawn nodes are proposed. Whether a node is expanded
      may depend on its value; whether it is proposed may not.

    Attributes:
      depth: levels, each with one call of the draft.
      expanded: W, nodes that get children on each level except the last.
      children: C, the number of children of such a node.
      nodes: K, proposed nodes; None: all ``C + (depth - 1) W C``. Fewer only if children are
        chosen, not drawn.
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
            validate.integer(
                "nodes", self.nodes, max(self.num_read, self.depth), self.num_grown + 1
            )

    @property
    def num_grown(self) -> int:
        """Returns the number of nodes before the best are chosen."""
        return self.children * (1 + self.num_read)

    @property
    def num_read(self) -> int:
        """Returns the number of nodes that the draft reads; their slots must fit into those of the
        scored rows.
        """
        return (self.depth - 1) * self.expanded

    @property
    def K(self) -> int:
        return self.num_grown if self.nodes is None else self.nodes

    @property
    def width(self) -> int:
        return self.children

    def families(self, depth: int) -> np.ndarray:
        """Returns the children of each expanded node, int32 ``[W, C]``."""
        known = 0 if depth == 0 else self.children * (1 + (depth - 1) * self.expanded)
        shape = (self.expanded if depth else 1, self.children)
        return known + np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape)

    def choose(self, depth: int, values_BN: Array) -> Index:
        """Returns the most probable nodes at this depth, the last level so far, ``[B, W]``."""
        start = int(self.families(depth - 1)[0, 0])
        return start + jax.lax.top_k(values_BN[:, start:], self.expanded)[1]

    def best(self, values_BN: Array, are_drawn: bool) -> Index:
        """Returns the most probable nodes, ``[B, K]``; raises ValueError for drawn nodes: none may
        be dropped.
        """
        if are_drawn:
            raise ValueError(
                f"nodes = {self.nodes} of {self.num_grown} drawn nodes: dropping drawn nodes "
                "biases the output; leave nodes out, or take a rule that chooses children, such as "
                'RecursiveRule("top")'
            )
        # A child is never more probable than its parent, and ties go to the earlier node: the kept
        # nodes are a tree.
        return jnp.sort(jax.lax.top_k(values_BN, self.K)[1], axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftRows:
    """The rows of the draft model's calls: the pending token, and the nodes that get children."""

    tokens_BR: Array
    parents_BR: Index  # the rows of their parents
    depths: tuple[int, ...] = (0,)
    newest: int = 1  # number of last rows that get children now

    @classmethod
    def first(cls, pending_B1: Array) -> DraftRows:
        """Returns the row of the pending token."""
        return cls(tokens_BR=pending_B1, parents_BR=np.zeros((1, 1), np.int32))

    @property
    def count(self) -> int:
        return len(self.depths)

    def then(self, tokens_BW: Array, parents_BW: Index) -> DraftRows:
        """Returns these rows and the rows of chosen nodes of the next level."""
        count = tokens_BW.shape[1]
        return DraftRows(
            tokens_BR=jnp.concatenate([self.tokens_BR, tokens_BW], axis=1),
            parents_BR=_join(self.parents_BR, parents_BW),
            depths=self.depths + (self.depths[-1] + 1,) * count,
            newest=count,
        )

    def block(self, start_B: Array, count: int) -> Block:
        """Returns positions and visibility of the last ``count`` rows; ``start_B`` is the slot of
        row 0.
        """
        return _block(
            start_B, self.depths[-count:], _seen(self.parents_BR, self.depths[-1])[:, -count:]
        )


def pick(x_BN: Index, index_BW: Index) -> Index:
    """Returns entries of axis 1."""
    if isinstance(index_BW, np.ndarray):
        return x_BN[:, index_BW[0]]
    return jax.vmap(lambda x, index: x[index])(
        jnp.broadcast_to(x_BN, (len(index_BW), *x_BN.shape[1:])), index_BW
    )


def _depths(parents: Sequence[int]) -> list[int]:
    """Returns the depth of each scored row."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


def _join(known_BN: Index, new_BW: Index) -> Index:
    """Returns both side by side along axis 1."""
    if isinstance(new_BW, np.ndarray):
        return np.concatenate([known_BN, new_BW], axis=1)
    return jnp.concatenate(
        [jnp.broadcast_to(known_BN, (len(new_BW), *known_BN.shape[1:])), new_BW], axis=1
    )


def _seen(parents_BT: Index, depth: int) -> Index:
    """Returns the attention mask within a tree, bool ``[B, T, T]``: ancestors of a row,
    and itself.
    """
    rows = np.arange(parents_BT.shape[1])
    seen_BTT = (parents_BT[..., None] == rows[None, None]) | (rows[:, None] == rows[None])[None]
    reach = 1
    while reach < depth:  # ancestors of ancestors: the distance doubles
        near_BTT = seen_BTT.astype(np.float32)
        seen_BTT, reach = near_BTT @ near_BTT > 0, 2 * reach
    return seen_BTT


def _block(start_B: Array, depths: Sequence[int], visible_BTR: Index) -> Block:
    # Not a constant, or the compiler would fold everything computed from it, for every row of the
    # batch.
    visible_BTR = jnp.asarray(visible_BTR) & (start_B >= 0)[:, None, None]
    positions_BT = start_B[:, None] + np.array(depths, np.int32)[None]
    return Block(start_B=start_B, positions_BT=positions_BT, visible_BTR=visible_BTR)


def block_of(draft: Draft, start_B: Array) -> Block:
    """Returns positions and visibility of the scored rows of any tree; ``start_B`` is the slot of
    row 0.
    """
    parents_BT = jnp.concatenate(
        [jnp.zeros((len(start_B), 1), jnp.int32), draft.parents_BK], axis=1
    )
    seen_BTR = _seen(parents_BT, draft.most_accepted)
    depth_BT = seen_BTR.sum(-1, dtype=start_B.dtype) - 1
    return Block(start_B=start_B, positions_BT=start_B[:, None] + depth_BT, visible_BTR=seen_BTR)


def keep_path(
    model: LanguageModel, start_B: Array, verdict: Verdict, output: Output, K: int
) -> Output:
    """Returns the output of the accepted path alone, with its cache slots moved to ``start_B`` and
    following.
    """
    if verdict.rows_BT is None:
        raise ValueError(
            "the rule verifies chains, but the drafter drafts token trees: take RecursiveRule()"
        )

    def take(x_BTD):
        return jnp.take_along_axis(x_BTD, verdict.rows_BT[..., None], axis=1)

    cache = model.compact(output.cache, start_B, verdict.rows_BT, K + 1)
    return dataclasses.replace(output, cache=cache, hidden=tuple(map(take, output.hidden)))


def path_draft(draft: Draft, verdict: Verdict, target: TargetDistributions) -> Draft:
    """Returns the accepted path as a chain, for the counts; ``num_drafted_B`` is the number of
    verified positions.
    """
    row_B = take_row(verdict.rows_BT, verdict.num_accepted_B)
    goes_on_B = ((draft.parents_BK == row_B[:, None]) & draft.is_drafted_BK).any(1)
    num_drafted_B = verdict.num_accepted_B + goes_on_B
    return dataclasses.replace(
        target.along(verdict).draft, num_drafted_B=num_drafted_B.astype(jnp.int32)
    )


def grow(
    tree: TreeShape | Growth,
    sample: Sampler,
    pending_B1: Array,
    logits_BV: Array,
    step: Callable[[DraftRows, Any], tuple[Array, Any]],
    carry: Any,
) -> tuple[Draft, Array, Any]:
    """Draws a tree level by level, with one call of ``step`` for each level but the last.

    Args:
      logits_BV: of the draft, after the pending token.
      step: ``(rows, carry) -> (logits_BWV, carry)``: the logits after each of the newest rows; with
        W = 1, the same logits for all rows, which then do not depend on the tokens.
      carry: the drafter's part of the carry.

    Returns:
      The draft, the draft model's row for each scored row ``[B, K+1]`` (0: not read), and the
      carry.
    """
    batch, grows = len(logits_BV), isinstance(tree, Growth)
    rows, laws, law_of_row = DraftRows.first(pending_B1), [], []
    # The nodes so far, level by level: their tokens, the draft's rows of their parents, those that
    # the draft has read, and for a `Growth` the draft's log-probability of the path to each.
    tokens_BN = jnp.zeros((batch, 0), jnp.int32)
    parents_1N = chosen_BR = np.zeros((1, 0), np.int32)
    values_BN, values_BW = jnp.zeros((batch, 0), jnp.float32), jnp.zeros((batch, 1), jnp.float32)
    logits_BWV, states = logits_BV[:, None], jax.tree.map(lambda x: x[:, None], sample.warp_state)
    for depth in range(tree.depth):
        if depth:
            chosen_BW = tree.choose(depth, values_BN)
            chosen_BR = _join(chosen_BR, chosen_BW)
            of_parents_BW = pick(parents_1N, chosen_BW)
            above_BW = of_parents_BW - (rows.count - rows.newest)  # among the rows of one level
            rows = rows.then(pick(tokens_BN, chosen_BW), of_parents_BW)
            logits_BWV, carry = step(rows, carry)
            states = jax.tree.map(functools.partial(pick, index_BW=above_BW), states)
            states = sample.advance_all(states, rows.tokens_BR[:, -rows.newest :])
        families_WC = tree.families(depth)
        tokens_BWC, law_BWV = sample.siblings(
            logits_BWV, families_WC, depth=depth, warp_state=states
        )
        if law_BWV is not None:
            first, is_shared = sum(law.shape[1] for law in laws), law_BWV.shape[1] == 1
            law_of_row += [first if is_shared else first + place for place in range(rows.newest)]
            laws.append(law_BWV)
        elif grows:
            law_BWV = jax.nn.log_softmax(logits_BWV.astype(jnp.float32), axis=-1)
        if grows:
            if depth:
                values_BW = pick(values_BN, chosen_BW)
            values_BWC = values_BW[..., None] + jnp.take_along_axis(law_BWV, tokens_BWC, axis=-1)
            values_BN = jnp.concatenate([values_BN, values_BWC.reshape(batch, -1)], axis=1)
        # Level by level; -1 is no child.
        order = np.argsort(families_WC.ravel(), kind="stable")[(families_WC < 0).sum() :]
        tokens_BN = jnp.concatenate([tokens_BN, tokens_BWC.reshape(batch, -1)[:, order]], axis=1)
        newest_W = np.arange(rows.count - rows.newest, rows.count, dtype=np.int32)
        parents_X = np.repeat(newest_W, families_WC.shape[1])[order]
        parents_1N = np.concatenate([parents_1N, parents_X[None]], axis=1)
    is_whole = tokens_BN.shape[1] == tree.K
    proposed_BK = np.arange(tree.K)[None] if is_whole else tree.best(values_BN, bool(laws))
    # The draft model's row of each node; 0 for nodes that it did not read.
    is_row_BRN = chosen_BR[..., None] == np.arange(tokens_BN.shape[1])[None, None]
    rows_BN = (is_row_BRN * np.arange(1, rows.count, dtype=np.int32)[None, :, None]).sum(axis=1)
    read_BT = _join(np.zeros((1, 1), np.int32), pick(rows_BN, proposed_BK))
    # A parent's scored row is the one whose row in the draft model is the parent's row.
    is_read_BT = (read_BT > 0) | (np.arange(tree.K + 1) == 0)[None]
    is_parent_BKT = pick(parents_1N, proposed_BK)[..., None] == read_BT[:, None]
    is_parent_BKT = is_parent_BKT & is_read_BT[:, None]
    tokens_BK = pick(tokens_BN, proposed_BK)
    draft = tree_draft(
        tree,
        tokens_BK,
        is_parent_BKT.argmax(axis=-1),
        log_probs_BRV=jnp.concatenate(laws, axis=1) if laws else None,
        law_rows_BT=pick(np.array([law_of_row]), read_BT) if laws else None,
    )
    return draft, _for_texts(read_BT, tokens_BK), carry


def tree_draft(
    tree: TreeShape | Growth,
    tokens_BK: Array,
    parents_BK: Index,
    log_probs_BRV: Array | None = None,
    law_rows_BT: Index | None = None,
) -> Draft:
    """Returns a tree as a draft; without distributions it is one-hot."""
    return Draft(
        tokens_BK=tokens_BK,
        num_drafted_B=jnp.full((len(tokens_BK),), tree.K, jnp.int32),
        log_probs_BRV=log_probs_BRV,
        parents_BK=_for_texts(parents_BK, tokens_BK),
        law_rows_BT=None if law_rows_BT is None else _for_texts(law_rows_BT, tokens_BK),
        depth=tree.depth,
        width=tree.width,
    )


def _for_texts(index_BN: Index, tokens_BK: Array) -> Array:
    """Returns an index with a row for each sequence; no constant, as in `_block`."""
    if isinstance(index_BN, np.ndarray):
        return jnp.where(tokens_BK[:, :1] >= 0, jnp.asarray(index_BN, jnp.int32), 0)
    return index_BN.astype(jnp.int32)


def check_model(model: LanguageModel, siblings: int) -> None:
    """Raises ValueError unless ``model``, a target or draft, supports token trees with so many
    siblings.
    """
    if model.rewind is not None:
        raise ValueError(
            "the model has recurrent layers, whose states do not branch: draft chains, with a "
            "drafter without a tree"
        )
    if not model.takes_trees:
        raise ValueError(
            f"{type(model).__name__} has no compact(), or its calls take no block, so that it "
            "scores no token trees: add both, and takes_trees = True"
        )
    if siblings > model.vocab_size:
        raise ValueError(
            f"the tree has {siblings} siblings, but there are {model.vocab_size} tokens: make it "
            "narrower"
        )
