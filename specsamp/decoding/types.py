"""The protocol of a drafter and the state of the loop.

``Draft``, ``Verdict`` and the rules live in `specsamp.sampling.rules`, ``LanguageModel`` and
``Output`` in `specsamp.models.interface`: they are needed below this room.

How other drafters fit, worked out before the loop was frozen:

*Early exit* (LayerSkip) drafts with the target's first layers and writes the target's own cache, so
``propose`` and ``commit`` receive it and hand it back::

    class EarlyExit:  exit_layer: int
        init(...)    -> ((), cache)                            # the target's prefill filled the cache
        propose(...) -> (Draft, (), cache with the first layers written)
        commit(...)  -> ((), cache)                            # rollback moves lengths only

*Feature head* (EAGLE) reads hidden states: ``hidden_layers`` tells the loop which to keep, ``init``
sees them for the prompt and ``commit`` for the scored block; row ``verdict.num_accepted_B`` is the
last token that is now known::

    class FeatureHead:  hidden_layers = (2, 20, 37)
        init(...)    -> (state with features and head cache, cache)
        commit(..., verdict, target_output, cache) -> (state with target_output.hidden at the accepted rows, cache)

*Token tree*: a Draft with N nodes also carries ``parents`` and ``depths``; the loop passes
``positions_BT = length - 1 + depth`` and the ancestors as ``block_mask_TT`` to the target, the rule
returns the accepted ``path`` besides the tokens, and the model gets one more method, which moves the
accepted nodes' slots together. Chains leave all of these out, statically, and pay nothing.

*Voting* of two drafts: one drafter holding two; its state is the pair of states, it picks one
*before* looking at what it sampled, and its draws are kept apart by the drafter's index:
``sample(logits_BV, offset, drafter=1)``.

*Adaptive length*: ``num_drafted_B`` is decided on device; shapes stay [B, K].
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from specsamp.models.interface import LanguageModel, Output
from specsamp.sampling.rules import Draft, Draw, Rule, Verdict
from specsamp.sampling.warp import Chain, Greedy, Warp, log_probs

__all__ = [
    "DecodeState",
    "Draft",
    "Drafter",
    "Finish",
    "LanguageModel",
    "OneShare",
    "Output",
    "Request",
    "Rule",
    "Sampler",
    "Shares",
    "Stats",
    "Verdict",
    "Weights",
]

Array = jax.Array


class Finish(enum.IntEnum):
    """Why a row ended."""

    RUNNING = 0
    STOP = 1  # a stop token was emitted
    LENGTH = 2  # the row's budget is spent
    INVALID = 3  # the target's logits held NaN or inf, or only -inf; nothing was emitted from there on


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """What travels beside the static objects."""

    target: Any
    draft: Any = None


@dataclasses.dataclass(frozen=True)
class Sampler:
    """How a drafter turns logits into a token, so that the distribution sampled is the distribution verified."""

    warp: Warp
    draw: Draw

    @property
    def is_one_hot(self) -> bool:
        """Statically greedy: the distribution is its token, and need not be written out."""
        warps = self.warp.warps if isinstance(self.warp, Chain) else (self.warp,)
        return any(isinstance(warp, Greedy) for warp in warps)

    def __call__(self, logits_BV: Array, offset: Array | int, drafter: int = 0) -> tuple[Array, Array | None]:
        """Draws a token per row.

        Args:
          logits_BV: the draft's, before warping.
          offset: position within the round, 0 for the first drafted token.
          drafter: index, where several draft in one round.

        Returns:
          ``tokens_B`` int32, and the ``[B, V]`` log-probabilities they were drawn from; None where sampling
          is statically greedy, which makes the distribution one-hot (the default of `generate`).
        """
        warped_BV = log_probs(self.warp, logits_BV)
        if self.is_one_hot:
            return jnp.argmax(warped_BV, axis=-1).astype(jnp.int32), None
        return self.draw(warped_BV, offset, drafter), warped_BV


class Drafter(Protocol):
    """Proposes tokens. Static and hashable; the loop never looks inside its state.

    Attributes:
      K: the most tokens it ever proposes.
      exact: whether decoding stays lossless under a lossless rule.
      hidden_layers: layers of the target whose outputs it reads.
    """

    K: int
    exact: bool
    hidden_layers: tuple[int, ...]

    def prepare(self, params: Any, slots: int) -> Any:
        """Turns ``Pair.draft_params`` into ``weights.draft``, for caches of ``slots`` slots."""

    def init(
        self, weights: Weights, tokens_BP: Array, lengths_B: Array, slots: int, target_output: Output, cache: Any
    ) -> tuple[Any, Any]:
        """Reads the prompts (right-padded ``[B, P]``) after the target did; returns state and target cache.

        Every leaf of the state has the batch as its leading axis.
        """

    def propose(
        self, weights: Weights, state: Any, tokens_BS: Array, lengths_B: Array, cache: Any, sample: Sampler
    ) -> tuple[Draft, Any, Any]:
        """Drafts a continuation of ``tokens_BS[b, :lengths_B[b]]``; returns draft, state, target cache.

        A token that was sampled must be proposed: dropping it because of its value is biased. When to
        stop may depend on everything drafted so far.
        """

    def commit(
        self, weights: Weights, state: Any, draft: Draft, verdict: Verdict, target_output: Output, cache: Any
    ) -> tuple[Any, Any]:
        """Learns the verdict; ``target_output`` has one row per scored position, ``[B, K+1, ...]``."""


class Shares(Protocol):
    """How the rows of a batch are shared out over devices. Static and hashable.

    Rows know nothing of each other, so each share runs the loop by itself, apart from agreeing on when to end:
    a collective of all devices (compilers make them of smaller ones) must find all of them in the same round.

    Attributes:
      ways: number of shares; batches are multiples of it.
    """

    ways: int

    def __call__(self, function: Callable, by_rows: tuple) -> Callable:
        """``function`` on each share.

        Args:
          function: its results lead with the rows everywhere.
          by_rows: per argument a tree (or a prefix of one) that says True where leaves lead with the rows
            and False where every share gets them whole.
        """

    def any(self, here: Array) -> Array:
        """Within such a function: whether a bool is true on any share."""

    def whole(self, tree: Any) -> Any:
        """Within such a function: the same values, on all devices of the share. They may have sampled apart."""


@dataclasses.dataclass(frozen=True)
class OneShare:
    """All rows together."""

    ways = 1

    def __call__(self, function: Callable, by_rows: tuple) -> Callable:
        return function

    def any(self, here: Array) -> Array:
        return here

    def whole(self, tree: Any) -> Any:
        return tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What a user may turn between calls without recompiling; constant during the loop."""

    sampling: Warp  # numbers of shape [B]
    draft_sampling: Warp  # numbers of shape [B]
    row_keys_B: Array  # from sampling.rng.row_keys
    limits_B: Array  # int32, the length at which each row's budget ends
    stop_ids: Array  # [n] int32, -1 is never emitted

    @classmethod
    def by_rows(cls) -> Request:
        """What leads with the rows, see `Shares`."""
        return cls(sampling=True, draft_sampling=True, row_keys_B=True, limits_B=True, stop_ids=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """Counts of what was emitted; positions cut off by a stop token or a budget do not count."""

    rounds_B: Array  # int32, rounds that emitted something
    emitted_B: Array  # int32 tokens
    drafted_B: Array  # int32, drafted tokens that were verified or followed a verified refusal
    num_verified_BK: Array  # int32, rounds in which drafted position i was verified: all before it were accepted
    accepted_BT: Array  # int32 [B, K+1], rounds by the number of accepted tokens that were emitted

    @classmethod
    def zeros(cls, batch: int, num_tokens: int) -> Stats:
        def count(*shape):
            return jnp.zeros(shape, jnp.int32)

        return cls(
            rounds_B=count(batch),
            emitted_B=count(batch),
            drafted_B=count(batch),
            num_verified_BK=count(batch, num_tokens),
            accepted_BT=count(batch, num_tokens + 1),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """The carry of the loop.

    ``tokens_BS[b, :lengths_B[b]]`` is committed. The last committed token is *pending*: the caches
    hold the positions before it.
    """

    tokens_BS: Array  # int32, prompts and emitted tokens; beyond the length: scratch
    lengths_B: Array  # int32, committed tokens, prompt included
    finish_B: Array  # int32 Finish
    from_draft_BS: Array  # bool, whether the emitted token had been drafted
    log_probs_BS: Array | None  # float32, log-probability of emitted tokens under the target (unwarped)
    cache: Any  # the target's
    drafter_state: Any
    stats: Stats

    @property
    def running_B(self) -> Array:
        return self.finish_B == Finish.RUNNING
