"""The interface between the loop and a drafter.

To add a way to draft, derive a class from `Drafter`, in a file of its own.

*Drafters inside the target* (`EarlyExitDrafter`; EAGLE, Medusa, MTP). ``hidden_layers`` names the
layers of the target whose outputs the loop keeps. `read` gets these outputs for the prompt, chunk
by chunk, and `commit` for the accepted path. All methods get ``weights.target`` and the target's
cache, and return this cache.

*Adaptive lengths.* Every round has arrays ``[B, K]``, of which the first ``num_drafted_B`` tokens
count. `Sampler.chain` stops drafting early; the drafts of drafters that do not use it are cut to
the chosen lengths.

*Token trees* (`specsamp.decoding.drafters.tree`). A tree is a `Draft` with ``parents_BK``,
``depth`` and ``width``. The loop scores it in one call, moves the accepted path together in the
target's cache, and gives `commit` the output of that path; a drafter with a cache moves it by the
same rows (`LanguageModel.compact`). `specsamp.decoding.trees.grow` draws trees level by level.
"""

import abc
import dataclasses
import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.decoding.sampler import Sampler
from specsamp.decoding.state import Prefix, Weights
from specsamp.models.interface import LanguageModel, Output
from specsamp.sampling.rules import Draft, Verdict

Array = jax.Array
Proposal = tuple[Draft, Any, Any]  # a draft, the drafter's state and the target's cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptChunk:
    """Consecutive tokens of each prompt, which the target has read.

    Chunks come in order, and T may differ. If prompts grow after some rounds, the first new chunk
    may begin with tokens that were read or emitted before.
    """

    tokens_BT: Array  # padded on the right
    start_B: Array  # int32, the slot of the first token
    lengths_B: Array  # int32, the lengths of the whole prompts; tokens beyond them are padding
    output: Output | None  # of the target; None: see `DrafterHooks.falls_behind`


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredRound:
    """A round after verification, before its tokens are appended."""

    prefix: Prefix  # the tokens at the beginning of the round
    draft: Draft
    verdict: Verdict
    # Of the target at the positions of the accepted path, [B, depth+1, ...]. Position
    # ``verdict.num_accepted_B`` is the last accepted token; without accepted tokens, the pending
    # token.
    output: Output


class Drafter(abc.ABC):
    """Proposes K tokens per round. Static and hashable, such as a frozen dataclass; its state is
    opaque to the loop.

    ``K`` and `propose` are required; the defaults of the rest suit a drafter without weights or
    state. Overrides take and return the types that are given here. Few drafters need `DrafterHooks`
    too.
    """

    K: int  # the most tokens of a draft; of a tree, its nodes
    exact: bool = True  # whether decoding stays lossless under a lossless rule
    hidden_layers: tuple[int, ...] = ()  # layers of the target whose outputs it reads
    max_positions: int | None = None  # the longest sequence it can draft for; None: no limit

    @property
    def weights_key(self) -> Hashable:
        """Returns the key under which its prepared weights are kept, such as its model.

        Drafters of the same class with equal keys share their weights. So leave K out of the key.
        """
        return self

    def check(self, target: LanguageModel, draft: LanguageModel | None, draft_params: Any) -> None:
        """Raises ValueError if this drafter cannot draft for a pair of these parts."""

    def prepare(self, params: Any) -> Any:
        """Turns ``Pair.draft_params`` into ``weights.draft``, once."""
        return None

    def fit_slots(self, weights: Any, slots: int) -> Any:
        """Adds the tables that depend on the number of cache slots to ``weights.draft``, and
        returns it.
        """
        return weights

    def init(self, batch: int, slots: int) -> Any:
        """Returns an empty state. The leading axis of every array is the batch.

        On a mesh, arrays whose shape depends on ``slots`` are caches, laid out by their model; the
        rest is replicated.
        """
        return ()

    def read(self, weights: Weights, state: Any, chunk: PromptChunk, cache: Any) -> tuple[Any, Any]:
        """Reads a chunk of the prompts, after the target; returns the drafter's state and the
        target's cache.
        """
        return state, cache

    @abc.abstractmethod
    def propose(
        self, weights: Weights, state: Any, prefix: Prefix, cache: Any, sample: Sampler
    ) -> Proposal:
        """Drafts a continuation of ``prefix``.

        Every sampled token must be proposed: dropping it because of its value would bias the
        output. Whether token k is proposed may depend on everything that is known before token k is
        sampled.
        """

    def commit(
        self, weights: Weights, state: Any, scored: ScoredRound, cache: Any
    ) -> tuple[Any, Any]:
        """Updates the drafter with the accepted tokens; returns the drafter's state and the
        target's cache.
        """
        return state, cache


class DrafterHooks:
    """Optional methods for adaptive draft lengths, schedulers and trees: ``class
    MyDrafter(DrafterHooks, Drafter)``.

    For a drafter without this base class, the defaults apply (`hooks_of`).
    """

    # The most tokens of a draft that can be accepted, if that is less than K, as in a tree.
    depth: int | None = None
    # The model whose distributions it draws from; None: the target or none.
    draft_model: LanguageModel | None = None
    # Whether the draft of a sequence is independent of the other sequences of the batch.
    row_independent: bool = True
    # How many slots of its caches before the last two may be wrong, since they depend on later
    # tokens or hold masks. The first call of a round reads these tokens again.
    looks_ahead: int = 0
    # Whether its state lacks the tokens that are emitted while it is paused. If so, `Drafter.read`
    # is called with these tokens before the next draft, and with None for the target's output and
    # cache.
    falls_behind: bool = False

    def of_length(self, K: int) -> Drafter | None:
        """Returns this drafter with another K, at least 1, for the same state. Default: with the
        field K replaced.
        """
        return None

    def draft_lengths(self, state: Any, prefix: Prefix) -> Array | None:
        """Returns the number of tokens that it is able to draft after ``prefix``, int32 ``[B]``;
        None: always K.

        With adaptive lengths, drafts are no longer than this. The computation must be cheap
        compared to a target call.
        """
        return None


def hooks_of(drafter: Drafter) -> DrafterHooks:
    """Returns the hooks of a drafter, or the defaults."""
    return drafter if isinstance(drafter, DrafterHooks) else DrafterHooks()


def depth_of(drafter: Drafter) -> int:
    """Returns the largest number of tokens of a draft that can be accepted."""
    depth = hooks_of(drafter).depth
    return drafter.K if depth is None else depth


def positions_of(*parts: LanguageModel | Drafter) -> float:
    """Returns the smallest number of positions of models and drafters; inf: no limit."""
    return min(filter(None, (part.max_positions for part in parts)), default=math.inf)


def check_is_target(model: LanguageModel, target: LanguageModel) -> None:
    """Raises ValueError if ``model``, which would draft with the target's weights, is another
    model.
    """
    if model != target:
        raise ValueError(
            f"the drafter's model is not the pair's target, whose weights it would use: {model!r} "
            f"and {target!r}; make it with pair.target, after the pair was sharded"
        )


@dataclasses.dataclass(frozen=True)
class NoDrafter(Drafter):
    """Drafts nothing: every round emits one token of the target."""

    K = 0

    def propose(self, weights, state, prefix, cache, sample):
        empty_BK = jnp.zeros((len(prefix.lengths_B), 0), jnp.int32)
        return (
            Draft(tokens_BK=empty_BK, num_drafted_B=jnp.zeros_like(prefix.lengths_B)),
            state,
            cache,
        )


@dataclasses.dataclass(frozen=True)
class Paused(NoDrafter):
    """Drafts nothing and keeps the state of ``drafter``, whose `commit` is still called with the
    emitted tokens.
    """

    drafter: Drafter

    @property
    def hidden_layers(self):
        return self.drafter.hidden_layers

    def commit(self, weights, state, scored, cache):
        return self.drafter.commit(weights, state, scored, cache)


def with_length(drafter: Drafter, K: int) -> Drafter:
    """Returns the drafter with another K, for the same state; for K = 0, a paused drafter."""
    if K in (0, drafter.K):
        return drafter if K else Paused(drafter)
    return hooks_of(drafter).of_length(K) or dataclasses.replace(drafter, K=K)
