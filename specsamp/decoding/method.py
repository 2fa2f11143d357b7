"""A way to decode as one value: drafter, rule and sampling."""

from __future__ import annotations

import dataclasses

from specsamp.decoding.adaptive import Adaptive
from specsamp.decoding.drafter import Drafter, hooks_of
from specsamp.decoding.loop import Loop, decode_window
from specsamp.decoding.pair import Pair
from specsamp.sampling.rejection import TokenRule
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp, greedy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A way to decode with a pair.

    Attributes:
      drafter: proposes tokens.
      rule: verifies them.
      sampling: the target's warp; its numbers are scalar or one per prompt.
      draft_sampling: the draft's own warp; None: the target's.
      adaptive: the adaptive draft length; None: the drafter's K in every round.
    """

    drafter: Drafter
    rule: Rule = TokenRule()
    sampling: Warp = greedy()
    draft_sampling: Warp | None = None
    adaptive: Adaptive | None = None

    @property
    def exact(self) -> bool:
        """Returns whether rule and drafter are lossless."""
        return self.rule.exact and self.drafter.exact

    @property
    def row_independent(self) -> bool:
        """Returns whether the tokens of a sequence are the same in every batch.

        With adaptive lengths, the tokens of a seed also depend on the batch size.
        """
        adapts = self.adaptive is not None and self.adaptive.costs_ms is not None
        return hooks_of(self.drafter).row_independent and not adapts or self.rule.draft_independent

    def loop(self, pair: Pair, *, keep_log_probs: bool = False, keep_rounds: bool = False) -> Loop:
        """Returns the loop that decodes with ``pair`` this way on the platform at hand."""
        return Loop(
            target=pair.target,
            drafter=self.drafter,
            rule=self.rule,
            window=decode_window(),
            keep_log_probs=keep_log_probs,
            keep_rounds=keep_rounds,
            shards=pair.shards,
        )
