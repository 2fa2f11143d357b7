"""Token trees: their static shape, how they are drawn level by level, and what stays of them after a round.

Scored row 0 is the pending token in slot ``length - 1``, row i is node i - 1 in slot ``length - 1 + i``; positions follow
depths. Nodes stand level by level, siblings in the order in which they were drawn.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
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


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """The shape of a token tree.

    Attributes:
      parents: the scored row of each node's parent, 0 for the pending token; level by level. `in_levels` sorts.

    Raises:
      ValueError: a parent does not stand before its node, or a level does not end before the next begins.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "parents", tuple(validate.integers("parents", self.parents, 0)))
        if not self.parents:
            raise ValueError("a tree needs at least one node: give parents such as (0, 0, 1)")
        for node, parent in enumerate(self.parents):
            if parent > node:
                raise ValueError(
                    f"parents[{node}] = {parent} stands behind its node: rows are counted from 1, parents come first"
                )
        if list(self.depths) != sorted(self.depths):
            raise ValueError(f"the nodes of {self.parents} are not level by level: take TreeShape.in_levels(parents)")

    @classmethod
    def in_levels(cls, parents: Sequence[int]) -> TreeShape:
        """Makes the shape of a tree whose nodes are in any order that puts parents first."""
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
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
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Returns the largest number of tokens that can be accepted."""
        return self.depths[-1]

    @property
    def width(self) -> int:
        """Returns the largest number of siblings."""
        return max(self.parents.count(row) for row in set(self.parents))

    def first(self, K: int) -> TreeShape:
        """Returns the tree of the first K nodes."""
        return TreeShape(self.parents[:K])

    def level(self, depth: int) -> range:
        """Returns the scored rows at this depth."""
        first = self.depths.index(depth)
        return range(first, first + self.depths.count(depth))

    def inner(self, depth: int) -> list[int]:
        """Returns the scored rows at this depth that have children."""
        return [row for row in self.level(depth) if row in self.parents]

    def families(self, depth: int) -> np.ndarray:
        """Returns the nodes below each of `inner`, int32 ``[P, C]``; -1 where a row has fewer children."""
        families = [[node for node, parent in enumerate(self.parents) if parent == row] for row in self.inner(depth)]
        width = max(map(len, families))
        return np.array([family + [-1] * (width - len(family)) for family in families], np.int32)

    def block(self, start_B: Array, rows: range) -> Block:
        """Returns positions and visibility of some scored rows; ``start_B`` is the slot of row 0."""
        visible_TT = np.eye(self.K + 1, dtype=bool)
        for node, parent in enumerate(self.parents):
            visible_TT[node + 1] |= visible_TT[parent]
        # Not a constant, or the compiler would fold all that follows from it, for every row of the batch.
        visible_BTR = jnp.asarray(visible_TT[rows.start : rows.stop])[None] & (start_B >= 0)[:, None, None]
        depths_T = np.array(self.depths[rows.start : rows.stop], np.int32)
        return Block(start_B=start_B, positions_BT=start_B[:, None] + depths_T[None, :], visible_BTR=visible_BTR)


def block_of(draft: Draft, start_B: Array) -> Block:
    """Returns positions and visibility of the scored rows of any tree; ``start_B`` is the slot of row 0."""
    batch, K = draft.tokens_BK.shape
    parents_BT = jnp.concatenate([jnp.zeros((batch, 1), jnp.int32), draft.parents_BK], axis=1)
    rows = jnp.arange(K + 1)
    seen_BTR = (parents_BT[..., None] == rows[None, None]) | (rows[:, None] == rows[None])[None]
    reach = 1
    while reach < draft.most_accepted:  # ancestors of ancestors: the distance doubles
        seen_BTR = jnp.einsum("BTR,BRX->BTX", *(seen_BTR.astype(jnp.float32),) * 2) > 0
        reach *= 2
    depth_BT = seen_BTR.sum(-1, dtype=start_B.dtype) - 1
    return Block(start_B=start_B, positions_BT=start_B[:, None] + depth_BT, visible_BTR=seen_BTR)


def keep_path(model: LanguageModel, start_B: Array, verdict: Verdict, output: Output, K: int) -> Output:
    """Returns the output of the accepted path alone, its slots moved together behind ``start_B``."""
    if verdict.rows_BT is None:
        raise ValueError("the rule verifies chains, but the drafter drafts token trees: take RecursiveRule()")

    def take(x_BTD: Array) -> Array:
        return jnp.take_along_axis(x_BTD, verdict.rows_BT[..., None], axis=1)

    cache = model.compact(output.cache, start_B, verdict.rows_BT, K + 1)
    return dataclasses.replace(output, cache=cache, hidden=tuple(map(take, output.hidden)))


def path_draft(draft: Draft, verdict: Verdict, target: TargetDistributions) -> Draft:
    """Returns the accepted path as a chain, for the counts: as many tokens were drafted as positions were judged."""
    row_B = take_row(verdict.rows_BT, verdict.num_accepted_B)
    goes_on_B = ((draft.parents_BK == row_B[:, None]) & draft.is_drafted_BK).any(1)
    num_drafted_B = verdict.num_accepted_B + goes_on_B
    return dataclasses.replace(target.along(verdict).draft, num_drafted_B=num_drafted_B.astype(jnp.int32))


def grow(
    shape: TreeShape,
    sample: Sampler,
    logits_BV: Array,
    step: Callable[[range, Array, Any], tuple[Array, Any]],
    carry: Any,
) -> tuple[Draft, Any]:
    """Draws a tree level by level, with one call of ``step`` for each level but the last.

    Args:
      logits_BV: of the draft, after the pending token.
      step: ``(rows, tokens_BK, carry) -> (logits_BNV, carry)`` for the last of the scored rows so far: the logits after
        each of them. With N = 1 the logits do not depend on the tokens.
      carry: the drafter's own.
    """
    batch = len(logits_BV)
    tokens_BK, laws, law_rows, logits_BPV = (
        jnp.zeros((batch, 0), jnp.int32),
        [],
        [0] * (shape.K + 1),
        logits_BV[:, None],
    )
    states = jax.tree.map(lambda x: x[:, None], sample.warp_state)
    for depth in range(shape.depth):
        inner, families_PC = shape.inner(depth), shape.families(depth)
        if depth:
            rows = range(shape.level(depth).start, inner[-1] + 1)
            logits_BPV, carry = step(rows, tokens_BK, carry)
            states = _below(shape, sample, states, tokens_BK, shape.inner(depth - 1), inner)
            if logits_BPV.shape[1] > 1:
                logits_BPV = logits_BPV[:, np.array(inner) - rows.start]
        drawn_BPC, log_probs_BPV = sample.siblings(logits_BPV, families_PC, depth=depth, warp_state=states)
        for at, row in enumerate(inner):
            is_shared = log_probs_BPV is not None and log_probs_BPV.shape[1] == 1
            law_rows[row] = sum(law.shape[1] for law in laws) + (0 if is_shared else at)
        laws += [] if log_probs_BPV is None else [log_probs_BPV]
        places = {int(node): place for place, node in enumerate(families_PC.ravel()) if node >= 0}
        order = np.array([places[node] for node in sorted(places)])
        tokens_BK = jnp.concatenate([tokens_BK, drawn_BPC.reshape(batch, -1)[:, order]], axis=1)
    return shape_draft(shape, tokens_BK, laws and jnp.concatenate(laws, axis=1), law_rows), carry


def shape_draft(
    shape: TreeShape, tokens_BK: Array, log_probs_BRV: Array | list, law_rows: Sequence[int] | None = None
) -> Draft:
    """Returns a tree of this shape as a draft; without distributions it is one-hot."""
    batch, has_laws = len(tokens_BK), not isinstance(log_probs_BRV, list)

    def for_all(values: Sequence[int]) -> Array:
        return jnp.where(tokens_BK[:, :1] >= 0, jnp.asarray(values, jnp.int32)[None, :], 0)  # as in `block`

    return Draft(
        tokens_BK=tokens_BK,
        num_drafted_B=jnp.full((batch,), shape.K, jnp.int32),
        log_probs_BRV=log_probs_BRV if has_laws else None,
        parents_BK=for_all(shape.parents),
        law_rows_BT=for_all(law_rows) if has_laws else None,
        depth=shape.depth,
        width=shape.width,
    )


def _below(
    shape: TreeShape, sample: Sampler, states: Any, tokens_BK: Array, above: Sequence[int], rows: Sequence[int]
) -> Any:
    """Returns the warp's states after some rows, from those after the inner rows of the level above."""
    parents = np.array([above.index(shape.parents[row - 1]) for row in rows])
    tokens_BP = tokens_BK[:, np.array(rows) - 1]
    return sample.advance_all(jax.tree.map(lambda x: x[:, parents], states), tokens_BP)


def check_model(model: LanguageModel, siblings: int) -> None:
    """Raises ValueError unless a model, as target or draft, can take a token tree with so many siblings."""
    model = getattr(model, "model", model)  # of a model on a mesh
    if type(model).compact is LanguageModel.compact:
        raise ValueError(f"{type(model).__name__} has no compact(): it cannot move the slots of a token tree")
    if "block" not in inspect.signature(type(model).__call__).parameters:
        raise ValueError(f"{type(model).__name__} takes no block: it cannot see the ancestors of a token tree")
    if siblings > model.vocab_size:
        raise ValueError(f"the tree has {siblings} siblings, but there are {model.vocab_size} tokens: make it narrower")
