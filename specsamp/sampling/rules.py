"""Types of acceptance rules, which decide which drafted tokens stay and which token follows them.

A rule takes the drafted tokens ``d_1 .. d_K``, the draft's distributions ``p_1 .. p_K`` that they
were drawn from, and the target's distributions ``q_1 .. q_{K+1}`` (``q_i`` and ``p_i`` condition on
``d_1 .. d_{i-1}``). It keeps ``n`` drafted tokens and appends a token of the target: a *correction*
if fewer than all drafted tokens are kept, else a *bonus*. (The letters p and q are those of Chen et
al., arXiv 2302.01318; Leviathan et al. exchange them.)

The *scored rows* are the positions of the target's call: 0 is the pending token, i is node i - 1 of
the draft. A chain is a tree whose ``parents_BK`` is None, which is static: chains trace no code for
trees. Three numbers are equal for chains and differ for trees: *nodes* (K), *depth* (the most
tokens that can be accepted) and R, the rows of ``log_probs_BRV``.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.arrays import pad_axis
from specsamp.pytrees import pytree
from specsamp.sampling.rng import RoundKeys
from specsamp.sampling.warp import Chain, Warp, advance_where, is_stateless, log_probs

Array = jax.Array


@pytree
class Draft:
    """A drafter's proposal for one round: K nodes, which are tokens of a chain or of a tree.

    Nodes are in topological order, siblings in the order in which they were drawn. So the first
    ``num_drafted_B`` nodes are always a tree.
    """

    tokens_BK: Array  # int32
    num_drafted_B: Array  # int32 in [0, K]; later tokens are padding
    # float32, normalised: row r is the distribution that the children of scored row r were drawn
    # from. For chains R = K. None: one-hot. It must be None for tokens that were not drawn but
    # chosen (top-k, pruned, retrieved).
    log_probs_BRV: Array | None = None
    # float32, the draft's log-probability of each token of a chain that was chosen for it.
    scores_BK: Array | None = None
    # int32, the scored row of each node's parent; None: a chain, 0, 1, .., K-1.
    parents_BK: Array | None = None
    # int32 [B, K+1], for each scored row its row of ``log_probs_BRV`` (the law of its children);
    # None: the same number
    law_rows_BT: Array | None = None
    depth: int | None = dataclasses.field(default=None, metadata={"static": True})  # None: K
    # Most siblings; None: K.
    width: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def is_drafted_BK(self) -> Array:
        return jnp.arange(self.tokens_BK.shape[1])[None, :] < self.num_drafted_B[:, None]

    @property
    def most_accepted(self) -> int:
        """Returns the largest number of nodes on a path."""
        return self.tokens_BK.shape[1] if self.depth is None else self.depth

    def only_in(self, rows_B: Array) -> Draft:
        """Returns the draft without the tokens of the rows where ``rows_B`` is false."""
        num_drafted_B = jnp.where(rows_B, self.num_drafted_B, 0)
        return dataclasses.replace(self, num_drafted_B=num_drafted_B)

    def laws(self, like_BTV: Array) -> Array:
        """Returns ``log_probs_BRV``, also for a one-hot chain, with vocabulary and dtype of
        ``like_BTV``.
        """
        if self.log_probs_BRV is not None:
            return self.log_probs_BRV
        vocabulary = jnp.arange(like_BTV.shape[-1])[None, None, :]
        is_token_BKV = vocabulary == self.tokens_BK[..., None]
        return jnp.where(is_token_BKV, 0.0, -jnp.inf).astype(like_BTV.dtype)

    def law_rows(self, row_B: Array) -> Array:
        """Returns the rows of ``log_probs_BRV`` for the children of scored rows; arbitrary where
        there are none.
        """
        rows_B = row_B if self.law_rows_BT is None else take_row(self.law_rows_BT, row_B)
        return jnp.minimum(rows_B, self.log_probs_BRV.shape[1] - 1)

    def probs_at(self, row_B: Array) -> Array | None:
        """Returns the distributions that the children of scored rows were drawn from, ``[B, V]``;
        None: one-hot.
        """
        if self.log_probs_BRV is None:
            return None
        return jnp.exp(take_row(self.log_probs_BRV, self.law_rows(row_B)))


@pytree
class Meter:
    """Cost and gain of a lossy rule for each emitted token; both are 0 if nothing was drafted.

    ``variation`` is the total variation between the distributions that the rule and the target give
    a token, given the tokens before it. Its sum over a text, averaged over texts, bounds the total
    variation between the texts of the rule and of the target. The sum of a single text bounds
    nothing: if it is 0 after one likely token and 1 after another, texts that begin with the first
    token report 0.
    """

    variation: Array  # float32 in [0, 1]: [B, T] of a verdict, [B, S] of a state
    # float32, the probability of acceptance minus that of the token rule; shapes as above.
    extra: Array


@pytree
class Verdict:
    """A rule's decision on a draft, before stop tokens and budgets. T = depth + 1."""

    tokens_BT: Array  # int32: the accepted tokens, then one of the target's, then -1
    num_accepted_B: Array  # int32 in [0, depth]
    # int32, the scored rows of the pending and the accepted tokens, increasing; None: 0, 1, 2, ..
    rows_BT: Array | None = None
    meter: Meter | None = None  # of a rule that is metered, [B, T]

    @property
    def num_emitted_B(self) -> Array:
        return self.num_accepted_B + 1


@pytree
class TargetDistributions:
    """The target's distributions after each scored row; rows are warped when a rule reads them.

    Warping a row costs time (top-p searches the whole vocabulary), so rules for trees read only the
    rows on their path. A warp with a state gets the state of the path to a row.
    """

    logits_BTV: Array  # float32, one row per scored row
    warp: Warp
    draft: Draft
    warp_state: Any = ()  # of the pending token's context; () for warps without a state

    def all(self) -> Array:
        """Returns the log-probabilities of all scored rows, ``[B, T, V]``."""
        if is_stateless(self.warp_state):
            return log_probs(self.warp, self.logits_BTV)
        states = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *self._states())
        return jax.vmap(functools.partial(log_probs, self.warp), in_axes=1, out_axes=1)(
            self.logits_BTV, states
        )

    def has_token(self) -> Array:
        """Returns whether the warps leave a token in each scored row, bool ``[B, T]``.

        Only the warps up to the last that may exclude all tokens are applied: the rest always keep
        a token.
        """
        warp, state = self.warp, self.warp_state
        if isinstance(warp, Chain):
            warp, state = warp.excluding(state)
        return ~jnp.isnan(dataclasses.replace(self, warp=warp, warp_state=state).all()).any(-1)

    def at(self, row_B: Array, warp_state: Any) -> Array:
        """Returns the log-probabilities of one scored row per text, ``[B, V]``.

        Args:
          warp_state: after the path to this row, from `advance`; ``self.warp_state`` at row 0.
        """
        return log_probs(self.warp, take_row(self.logits_BTV, row_B), warp_state)

    def advance(self, warp_state: Any, token_B: Array, moves_B: Array) -> Any:
        """Returns the warp's state after one more token where ``moves_B`` is true, and the old
        state elsewhere.
        """
        return advance_where(moves_B, self.warp, warp_state, token_B)

    def along(self, verdict: Verdict) -> TargetDistributions:
        """Returns the distributions of the accepted path alone, as those of a chain."""
        logits_BTV = jnp.take_along_axis(self.logits_BTV, verdict.rows_BT[..., None], axis=1)
        path = Draft(
            tokens_BK=jnp.maximum(verdict.tokens_BT[:, :-1], 0),
            num_drafted_B=verdict.num_accepted_B,
        )
        return dataclasses.replace(self, logits_BTV=logits_BTV, draft=path)

    def _states(self) -> list[Any]:
        """Returns the warp's state at each scored row."""
        states = [self.warp_state]
        for node in range(self.draft.tokens_BK.shape[1]):
            parent = states[-1]
            if self.draft.parents_BK is not None:
                row_B = self.draft.parents_BK[:, node]

                def take(*leaves: Array, row_B: Array = row_B) -> Array:
                    return jax.vmap(lambda leaf, row: leaf[row])(jnp.stack(leaves, axis=1), row_B)

                parent = jax.tree.map(take, *states)
            states.append(self.warp.advance(parent, self.draft.tokens_BK[:, node]))
        return states


class Rule(abc.ABC):
    """Base of the acceptance rules. A rule is static and hashable, and chooses the addresses of its
    random numbers.
    """

    exact: bool = True  # whether emitted tokens follow the target's distribution
    metered: bool = False  # whether its verdicts have a meter; True for lossy rules
    draft_independent: bool = False  # whether the text is the same for every draft
    trees: bool = False  # whether it verifies token trees
    chains: bool = True  # whether it verifies chains
    # Whether siblings are the most probable tokens; then drafts have no distributions.
    chooses: bool = False
    of_chains: Rule  # the equivalent rule on chains, of a rule that does not verify them

    def sample(self, log_probs_BV: Array, keys: RoundKeys, offset: Array | int) -> Array:
        """Draws the next token of a chain per row, int32 ``[B]``. Rules of trees draw none.

        Args:
          log_probs_BV: the draft's distribution, warped and normalised.
          keys: of the round.
          offset: number of drafted tokens before this token: the address of its random numbers.
        """
        raise NotImplementedError(f"{self!r} verifies trees: it draws no chain")

    def siblings(
        self, log_probs_BPV: Array, keys: RoundKeys, *, nodes_PC: Array, depth: Array | int
    ) -> Array:
        """Draws the children of P rows, int32 ``[B, P, C]``; child c does not depend on the number
        of children. Rules of chains draw none.

        Args:
          log_probs_BPV: the draft's distributions, warped and normalised.
          nodes_PC: the node of each child, the address of its random numbers; -1 where a row has
            fewer children.
          depth: number of drafted tokens before the children: the address of random numbers that
            belong to a position.
        """
        raise NotImplementedError(f"{self!r} verifies chains: it draws no siblings")

    @abc.abstractmethod
    def verify(self, draft: Draft, target: TargetDistributions, keys: RoundKeys) -> Verdict:
        """Decides which tokens of ``draft`` stay, and draws the token that follows."""


def count_leading(is_true_BK: Array) -> Array:
    """Returns the number of true entries before the first false one, ``[B]`` int32; any number of
    leading axes.
    """
    return jnp.sum(jnp.cumprod(is_true_BK, axis=-1, dtype=jnp.int32), axis=-1, dtype=jnp.int32)


def take_row(x_BT: Array, row_B: Array) -> Array:
    """Returns ``x_BT[b, row_B[b]]``, of an array with any further axes.

    By `jax.vmap`: read one by one, sequences that are split over a mesh would all move to one
    device.
    """
    return jax.vmap(functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False))(x_BT, row_B)


def at_tokens(x_TV: Array, tokens_T: Array) -> Array:
    """Returns the entry of each token; both arrays may have any leading axes."""
    return jnp.take_along_axis(x_TV, tokens_T[..., None], axis=-1)[..., 0]


def divide(x: Array, total: Array, otherwise: Array | float) -> Array:
    """Returns ``x / total``, and ``otherwise`` where the total is not positive."""
    return jnp.where(total > 0, x / jnp.where(total > 0, total, 1), otherwise)


def make_verdict(
    draft: Draft,
    num_accepted_B: Array,
    last_B: Array,
    rows_BT: Array | None = None,
    meter: Meter | None = None,
) -> Verdict:
    """Returns the verdict that accepts the first tokens of a chain or the path ``rows_BT``, and
    appends ``last_B``.
    """
    path_BD = draft.tokens_BK
    if rows_BT is not None:
        path_BD = jnp.take_along_axis(path_BD, jnp.maximum(rows_BT[:, 1:] - 1, 0), axis=1)
    positions, n_B1 = jnp.arange(path_BD.shape[1] + 1)[None, :], num_accepted_B[:, None]
    tokens_BT = jnp.where(positions < n_B1, pad_axis(path_BD, 1), -1)
    tokens_BT = jnp.where(positions == n_B1, last_B[:, None], tokens_BT)
    return Verdict(tokens_BT=tokens_BT, num_accepted_B=num_accepted_B, rows_BT=rows_BT, meter=meter)
