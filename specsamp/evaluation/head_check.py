"""Checks that a head fits its target and is read as it was trained, since wrong features cost speed and nothing else.

    print("\\n".join(check_head(pair, ["def fibonacci(n):"]).sentences))

The pair continues a few prompts with one drafted token in each round. Layers off by one, swapped norms or offsets taken for
ids leave little of the acceptance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from specsamp.decoding.generate import generate
from specsamp.decoding.method import Method, head_drafter
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import Prompt
from specsamp.sampling.warp import Warp, chain, temperature

LOW = 0.2  # acceptance; heads that fit have more than a half


@dataclasses.dataclass(frozen=True)
class HeadCheck:
    """Counts of the tokens that a head drafted, each the first of its round, and of those that were accepted."""

    drafted: int
    accepted: int

    @property
    def acceptance(self) -> float:
        """Returns the accepted share; nan if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def fits(self) -> bool:
        """Returns whether nothing speaks against the head: an acceptance below `LOW`."""
        return not self.acceptance < LOW

    @property
    def sentences(self) -> list[str]:
        """Returns the acceptance, and a warning if it is low."""
        found = [f"{self.acceptance:.0%} of the head's first tokens are accepted ({self.drafted} drafts)"]
        if not self.fits:
            found.append(
                f"WARNING: THE HEAD DOES NOT FIT: {self.acceptance:.0%} of its first tokens are accepted, where "
                "heads that fit have more than half. Was it trained for this very target (a tuned model differs from its "
                "base), and on prompts like these (with the chat template)? Does its config.json name the right layers and "
                "norms?"
            )
        return found


def check_head(
    pair: Pair, prompts: Sequence[Prompt], *, tokens: int = 32, sampling: Warp | None = None, seed: int = 0
) -> HeadCheck:
    """Counts how many of a head's first tokens are accepted while ``tokens`` tokens are decoded after each prompt.

    Args:
      sampling: the warp of both distributions; default: temperature 1.

    Raises:
      ValueError: the pair has no head.
    """
    if pair.head is None:
        raise ValueError("the pair has no head that could be checked")
    sampling = chain(temperature(1.0)) if sampling is None else sampling
    method = Method(drafter=head_drafter(pair.target, pair.head, 1), sampling=sampling)
    rows = [completion.stats for completion in generate(pair, prompts, tokens, method=method, seed=seed)]
    return HeadCheck(drafted=sum(sum(row.reached) for row in rows), accepted=sum(row.accepted for row in rows))
