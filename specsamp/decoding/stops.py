"""Stop conditions: token ids, checked on the device; strings, checked on the host between runs of the loop."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Stops:
    """Tokens and strings that end a text.

    Where a text ends depends on its tokens alone, not on the slice in which they were looked at.

    Attributes:
      ids: tokens; the loop emits nothing after one of them.
      texts: strings of any number of tokens, which may begin and end inside a token.
    """

    ids: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()

    def first(self, text: str) -> int | None:
        """Returns where the first of the strings begins in ``text``, or None."""
        found = [at for at in map(text.find, self.texts) if at >= 0]
        return min(found, default=None)

    def count(self, tokenizer, tokens: Sequence[int]) -> int | None:
        """Returns the fewest of ``tokens`` whose text holds a stop string; None if the text of all tokens holds none."""
        if not self.texts or self.first(tokenizer.decode(tokens)) is None:
            return None
        ends = range(1, len(tokens) + 1)
        return ends[bisect.bisect_left(ends, True, key=lambda n: self.first(tokenizer.decode(tokens[:n])) is not None)]

    def text(self, tokenizer, tokens: Sequence[int]) -> str:
        """Returns the text of ``tokens`` before what ended it."""
        if tokens and tokens[-1] in self.ids:
            tokens = tokens[:-1]
        text = tokenizer.decode(tokens)
        return text[: self.first(text)]

    def held_back(self, text: str) -> int:
        """Returns how many characters at the end of ``text`` may be the beginning of a stop string."""
        most = max(map(len, self.texts), default=1) - 1
        sizes = range(min(most, len(text)), 0, -1)
        return next((n for n in sizes if any(stop.startswith(text[-n:]) for stop in self.texts)), 0)
