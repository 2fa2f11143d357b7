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
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.decoding.sampler import Sampler
from specsamp.decoding.state import Weights
from specsamp.models.heads import FeatureHead
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
    """Proposes K nodes per round. Static and hashable, such as a frozen dataclass; the loop never looks into its state.

    ``K`` and `propose` must be given; the rest has defaults that suit a drafter without weights or state.
    """

    K: int  # nodes, the most that are ever proposed
    exact: bool = True  # whether decoding stays lossless under a lossless rule
    row_independent: bool = True  # whether a row's draft depends on nothing of other rows
    hidden_layers: tuple[int, ...] = ()  # layers of the target whose outputs it reads
    max_positions: int | None = None  # the longest text it can draft for; None: no limit
    falls_behind: bool = False  # whether rounds in which it does not draft leave a hole in its state
    depth: int | None = None  # the most tokens of a draft that can be accepted, fewer than K for trees; None: K

    @property
    def max_accepted(self) -> int:
        """The most tokens of a draft that can be accepted."""
        return self.K if self.depth is None else self.depth

    @property
    def weights_key(self) -> Hashable:
        """Returns what its prepared weights depend on besides its class, such as its model.

        Drafters of a class with equal keys share their weights, so leave K out of it.
        """
        return self

    @property
    def reader(self) -> LanguageModel | None:
        """Returns the model whose distribution after the text so far each token is drawn from; None: there is none.

        Audits and measurements read texts with it.
        """
        return None

    @property
    def reader_depth(self) -> int | None:
        """Returns how many tokens of a draft are drawn from what `reader` says of the text so far; None: all of them.

        Others depend on more than the text, such as on where the round began. With a number, prompts of one token are
        not read either: they may draft nothing in their first round.
        """
        return None

    def reader_weights(self, weights: Weights) -> Any:
        """Returns the weights of `reader` among those of a pair."""
        return weights.draft

    def with_models(self, target: LanguageModel, draft: LanguageModel | FeatureHead | None) -> Drafter:
        """Returns the drafter of a pair of other models of the same shapes, such as those of another dtype.

        Args:
          draft: the pair's draft model, or its head.
        """
        return self

    def drafting_with(self, target: LanguageModel) -> Drafter | None:
        """Returns the drafter that draws from the whole target, of a pair in which it is the draft model as well.

        All it drafts is accepted, which checks whatever the two share. None: there is no such drafter.
        """
        return None

    def check(self, target: LanguageModel, draft: LanguageModel | None, draft_params: Any) -> None:
        """Raises ValueError unless a pair of these parts has what this drafter needs."""

    def prepare(self, params: Any) -> Any:
        """Turns ``Pair.draft_params`` into ``weights.draft``, once."""
        return None

    def of_length(self, K: int) -> Drafter:
        """Returns this drafter with another K, on the same state; with 0 it drafts nothing, and reads on if it can."""
        return Paused(self) if K == 0 else self if K == self.K else dataclasses.replace(self, K=K)

    def foresee(self, state: Any, prefix: Prefix) -> Array | None:
        """Returns how many tokens at most it will draft after ``prefix``, int32 ``[B]``; None: as many as it is asked for.

        Where lengths adapt, a round is no wider than that. It must cost little beside a call of the target.
        """
        return None

    def catch_up(
        self, weights: Weights, state: Any, prefix: Prefix, seen_B: Array, is_behind: Callable[[Array], Array]
    ) -> tuple[Any, Array]:
        """Reads what rounds without a draft left out, for drafters that `falls_behind`.

        Args:
          seen_B: int32, the tokens that the drafter's state knows of each row.
          is_behind: of ``seen_B``, whether there is something to be read.

        Returns:
          Its state, and ``seen_B`` after that.
        """
        return state, seen_B

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

    def pin(self, state: Any, replicate: Callable[[Any], Any]) -> Any:
        """Applies ``replicate`` to what of its state is no cache, so that slices of a run find it where it was."""
        return replicate(state)

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


@dataclasses.dataclass(frozen=True)
class Paused(Drafter):
    """Drafts nothing with the state of ``drafter``, which still learns what was emitted."""

    drafter: Drafter
    K = 0

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.drafter.hidden_layers

    def propose(
        self, weights: Weights, state: Any, prefix: Prefix, cache: Any, sample: Sampler
    ) -> tuple[Draft, Any, Any]:
        empty_BK = jnp.zeros((len(prefix.lengths_B), 0), jnp.int32)
        return Draft(tokens_BK=empty_BK, num_drafted_B=jnp.zeros_like(prefix.lengths_B)), state, cache

    def commit(
        self, weights: Weights, state: Any, prefix: Prefix, draft: Draft, verdict: Verdict, output: Output, cache: Any
    ) -> tuple[Any, Any]:
        return self.drafter.commit(weights, state, prefix, draft, verdict, output, cache)
