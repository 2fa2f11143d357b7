"""Stop tokens and stop strings, and the incremental decoding of tokens after a prompt."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specsamp.decoding.pair import Tokenizer

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
CONTEXT = 16  # tokens of a prompt that are decoded together with the continuation, whose first space depends on them


@dataclasses.dataclass(frozen=True)
class Stops:
    """Tokens and strings that end a text.

    The end of a text depends on its tokens alone, not on the rounds after which the host searches for strings.

    Attributes:
      ids: tokens, after which the loop emits nothing.
      texts: strings of any number of tokens, which may begin and end inside a token.
      least: how many tokens no string ends; one must end in the text of the tokens after them.
    """

    ids: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()
    least: int = 0

    def first(self, text: str, before: int = 0) -> int | None:
        """Returns where the first of the strings begins in ``text`` that ends after ``before`` characters, or None."""
        found = [text.find(stop, max(before + 1 - len(stop), 0)) for stop in self.texts]
        return min((at for at in found if at >= 0), default=None)

    def _begin(self, tokenizer, tokens: Sequence[int]) -> int | None:
        before = len(tokenizer.decode(tokens[: self.least])) if self.least else 0
        return self.first(tokenizer.decode(tokens), before)

    def count(self, tokenizer, tokens: Sequence[int]) -> int | None:
        """Returns the fewest of ``tokens`` whose text holds a stop string; None if the text of all tokens holds none."""
        if not self.texts or self._begin(tokenizer, tokens) is None:
            return None
        ends = range(1, len(tokens) + 1)
        return ends[bisect.bisect_left(ends, True, key=lambda n: self._begin(tokenizer, tokens[:n]) is not None)]

    def text(self, tokenizer, tokens: Sequence[int]) -> str:
        """Returns the text of ``tokens`` before the stop token or the stop string."""
        if tokens and tokens[-1] in self.ids:
            tokens = tokens[:-1]
        return tokenizer.decode(tokens)[: self._begin(tokenizer, tokens)]

    def held_back(self, text: str) -> int:
        """Returns the number of characters at the end of ``text`` that may be the beginning of a stop string."""
        most = max(map(len, self.texts), default=1) - 1
        sizes = range(min(most, len(text)), 0, -1)
        return next((n for n in sizes if any(stop.startswith(text[-n:]) for stop in self.texts)), 0)


class Continuation:
    """Decodes the tokens after a prompt, so that prompt + continuation is the text of all tokens.

    Tokenizers that begin every text with a space would drop the first space of a continuation that is decoded alone.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._context = list(prompt[-CONTEXT:])
        # A prompt may end inside a character, which the continuation completes.
        self._before = tokenizer.decode(self._context).rstrip(INCOMPLETE)

    def decode(self, tokens: Sequence[int]) -> str:
        whole = self._tokenizer.decode([*self._context, *tokens])
        return whole[len(self._before) :] if whole.startswith(self._before) else self._tokenizer.decode(tokens)


class TextStream:
    """Turns a growing list of tokens into pieces of text whose concatenation is the whole text.

    The text of the first tokens need not be a prefix of the whole text: the last character may lack bytes, and some
    tokenizers then decode a whole run of bytes as unknown. Characters that may still change are held back, and so is a
    possible beginning of a stop string. If a text ends inside a character, the last piece has its replacement.
    """

    def __init__(self, tokenizer: Tokenizer | Continuation, stops: Stops = Stops()):
        self._tokenizer = tokenizer
        self._stops = stops
        self._shown = ""

    def push(self, tokens: Sequence[int], finished: bool) -> str:
        """Returns the new text for ``tokens``, all tokens so far; with ``finished``, also the text held back."""
        text = self._stops.text(self._tokenizer, tokens)
        if not finished:
            text = text.rstrip(INCOMPLETE)
            text = text[: len(text) - self._stops.held_back(text)]
            if not text.startswith(self._shown):
                return ""
        new, self._shown = text[len(self._shown) :], text
        return new
