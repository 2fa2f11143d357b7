"""The interface between the loop and a drafter.

A new way to draft is one class derived from `Drafter`, in a file of its own.

How drafters fit:

*Inside the target* (`EarlyExitDrafter`; EAGLE, Medusa, MTP): ``hidden_layers`` tells the loop which outputs of the target to
keep, `read` sees them for the prompt, chunk by chunk, and `commit` for the accepted path; ``weights.target`` and the
target's cache reach all three. A drafter that writes the target's cache hands it back.

*Token trees*, which the loop does not score yet: a `Draft` with ``parents_BK`` and ``depth``; the loop will give the
target a `Block`, the rule return the accepted rows, and the target move their slots together
(`LanguageModel.compact`). Drawing siblings without replacement will be a method of the rule beside `Rule.sample`.

*Several drafters* (`VotingDrafter`, `ChoosingDrafter`): one drafter that holds them; its state holds theirs. It picks one
*before* looking at what it sampled, or proposes tokens without a distribution. Each part has a `Sampler` of its own index.

*Adaptive length*: ``num_drafted_B`` is decided on device; shapes stay ``[B, K]``. A drafter that draws a chain through
`Sampler.chain` stops where `specsamp.decoding.adaptive` says so; of any other the loop takes as many tokens as a row wants.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Hashable
from typing import Any

import jax

from specsamp.decoding.sampler import Sampler
from specsamp.decoding.state import Weights
from specsamp.models.interface import LanguageModel, Output
from specsamp.sampling.rules import Draft, Verdict

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
    """The committed tokens ``tokens_BS[b, :lengths_B[b]]``; the last one is pending, what lies beyond is scratch."""

    tokens_BS: Array  # int32
    lengths_B: Array  # int32


class Drafter(abc.ABC):
    """Proposes K tokens per round. Static and hashable, such as a frozen dataclass; the loop never looks into its state.

    ``K`` and `propose` must be given; the rest has defaults that suit a drafter without weights or state. Few drafters
    need `LengthHooks` too.
    """

    K: int  # the most tokens of a draft; of a tree, its nodes
    exact: bool = True  # whether decoding stays lossless under a lossless rule
    hidden_layers: tuple[int, ...] = ()  # layers of the target whose outputs it reads
    max_positions: int | None = None  # the longest sequence it can draft for; None: no limit

    @property
    def weights_key(self) -> Hashable:
        """Returns what its prepared weights depend on besides its class, such as its model.

        Drafters of a class with equal keys share their weights, so leave K out of it.
        """
        return self

    def check(self, target: LanguageModel, draft: LanguageModel | None, draft_params: Any) -> None:
        """Raises ValueError unless a pair of these parts has what this drafter needs."""

    def prepare(self, params: Any) -> Any:
        """Turns ``Pair.draft_params`` into ``weights.draft``, once."""
        return None

    def fit_slots(self, weights: Any, slots: int) -> Any:
        """Adds to ``weights.draft`` what depends on the number of cache slots."""
        return weights

    def init(self, batch: int, slots: int) -> Any:
        """Returns an empty state, whose every leaf has the batch as its leading axis."""
        return ()

    def read(
        self,
        weights: Weights,
        state: Any,
        tokens_BT: Array,
        start_B: Array,
        lengths_B: Array,
        target_output: Output,
        cache: Any,
    ) -> tuple[Any, Any]:
        """Reads a chunk of the prompts after the target did; returns its state and the target's cache.

        Args:
          tokens_BT: right-padded, in slots ``start_B ..``; chunks come in order and T may differ. After rounds a longer
            text may be read on, from a token on that was read or emitted before.
          start_B: int32, the first slot of the chunk.
          lengths_B: int32, of the whole prompts: what lies beyond is padding.
          target_output: of the same chunk.
        """
        return state, cache

    @abc.abstractmethod
    def propose(
        self, weights: Weights, state: Any, prefix: Prefix, cache: Any, sample: Sampler
    ) -> tuple[Draft, Any, Any]:
        """Drafts a continuation of ``prefix``; returns the draft, its state and the target's cache.

        A token that was sampled must be proposed: dropping it because of its value is biased. Whether token k is
        submitted may depend on everything known before token k.
        """

    def commit(
        self, weights: Weights, state: Any, prefix: Prefix, draft: Draft, verdict: Verdict, output: Output, cache: Any
    ) -> tuple[Any, Any]:
        """Learns what was accepted; returns its state and the target's cache.

        Args:
          prefix: as it was when the round began.
          output: of the target, one row per position of the accepted path: ``[B, depth+1, ...]``. Row
            ``verdict.num_accepted_B`` is the last token whose position the target has seen.
        """
        return state, cache


class LengthHooks:
    """Adds to a drafter what adaptive draft lengths and trees ask for; derive from it beside `Drafter`.

    Every member has a default, which also holds for drafters that do not derive from it (`hooks_of`).
    """

    depth: int | None = None  # the most tokens of a draft that can be accepted, fewer than K for trees; None: K
    row_independent: bool = True  # whether the draft of a sequence depends on no other sequence of the batch
    # Whether the drafter misses tokens that are emitted while it is paused. `Drafter.read` then feeds it these tokens
    # before the next draft, without an output and a cache of the target: both are None.
    falls_behind: bool = False

    def of_length(self, K: int) -> Drafter | None:
        """Returns this drafter with another K of at least 1, on the same state; None: the field K is replaced."""
        return None

    def max_draft_length(self, state: Any, prefix: Prefix) -> Array | None:
        """Returns the most tokens it can draft after ``prefix``, int32 ``[B]``; None: always K.

        A round of adaptive lengths is no wider than that. It must cost little beside a call of the target.
        """
        return None


def hooks_of(drafter: Drafter) -> LengthHooks:
    """Returns the hooks of a drafter, or the defaults."""
    return drafter if isinstance(drafter, LengthHooks) else LengthHooks()
