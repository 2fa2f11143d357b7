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
      adaptive: the draft length, where it is not always the drafter's K.
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
        """Returns whether a text is the one it would be alone, whatever is decoded beside it.

        Lengths that adapt in a batch suit the number of its rows, so that the text of a seed depends on that number too.
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
