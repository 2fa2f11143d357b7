"""The text of tokens as they come, stop tokens and stop strings.

A text is the bytes of its tokens, decoded as UTF-8. A character is fixed once its last byte has
come: the text of the first tokens is the beginning of every longer text. Bytes of an incomplete
character are held back, and become U+FFFD if no token completes them.
"""

from __future__ import annotations

import bisect
import codecs
import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specsamp.decoding.pair import Tokenizer

LONGEST_CHARACTER = 4  # bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """What a token writes after others.

    For example, after the tokens ``a E2 82``, of which two are bytes of "€", the token ``AC``
    writes "€", and ``b`` writes U+FFFD and "b".

    Attributes:
      text: the characters that it completes.
      size: the number of characters so far.
      pending: the bytes of a character that is not complete.
      last: the last token so far that has bytes; None: no token has.
    """

    text: str = ""
    size: int = 0
    pending: bytes = b""
    last: int | None = None

    def then(self, tokenizer: Tokenizer, token: int) -> Written:
        """Returns what ``token`` writes next."""
        added = tokenizer.token_bytes(token, self.last)
        if added is None:
            return dataclasses.replace(self, text="")
        unread = self.pending + added
        text, used = codecs.utf_8_decode(unread, "replace", False)
        return Written(text, self.size + len(text), unread[used:], token)


class Continuation:
    """The text of the tokens after a prompt.

    The prompt matters: its last bytes may begin a character, and many tokenizers drop the first
    space of a text, but not of a continuation. Tokens that come again in the next call are decoded
    once.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        backwards = (
            token for token in reversed(prompt) if tokenizer.token_bytes(token) is not None
        )
        start = Written()
        for token in reversed([*itertools.islice(backwards, LONGEST_CHARACTER)]):
            start = start.then(tokenizer, token)
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._steps = [dataclasses.replace(start, text="", size=0)]
        self._text = ""

    def steps(self, tokens: Sequence[int]) -> list[Written]:
        """Returns what is written before the first of ``tokens``, and by each of them."""
        tokens = list(tokens)
        if self._tokens[: len(tokens)] != tokens[: len(self._tokens)]:
            self._tokens, self._steps, self._text = [], self._steps[:1], ""
        new = tokens[len(self._tokens) :]
        for token in new:
            self._steps.append(self._steps[-1].then(self._tokenizer, token))
        self._tokens += new
        self._text += "".join(step.text for step in self._steps[len(self._steps) - len(new) :])
        return self._steps[: len(tokens) + 1]

    def complete(self, tokens: Sequence[int]) -> str:
        """Returns the complete characters of ``tokens``, which no further tokens change."""
        size = self.steps(tokens)[-1].size
        return self._text[:size]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of ``tokens``, after which no more follow."""
        return self.complete(tokens) + self.steps(tokens)[-1].pending.decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class Stops:
    """Tokens and strings that end a text.

    The end of a text depends on its tokens alone, not on the rounds after which the host searches
    for strings.

    Attributes:
      ids: tokens, which are not part of the text.
      texts: strings of any number of tokens, which may begin and end inside a token.
      least: how many tokens no string ends; one must end in the text of the tokens after them.
      sure: tokens that write one of the strings wherever they stand, so that the loop ends there.
    """

    ids: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()
    least: int = 0
    sure: frozenset[int] = frozenset()

    @property
    def loop_ids(self) -> list[int]:
        """Returns the tokens after which the loop emits nothing."""
        return sorted(self.ids | self.sure)

    def first(self, text: str, before: int = 0) -> int | None:
        """Returns where the first of the strings begins in ``text`` that ends after ``before``
        characters, or None.
        """
        found = [text.find(stop, max(before + 1 - len(stop), 0)) for stop in self.texts]
        return min((at for at in found if at >= 0), default=None)

    def _begin(self, decoder: Continuation, tokens: Sequence[int]) -> int | None:
        before = len(decoder.complete(tokens[: self.least])) if self.least else 0
        return self.first(decoder.complete(tokens), before)

    def count(self, decoder: Continuation | None, tokens: Sequence[int]) -> int | None:
        """Returns the fewest of ``tokens`` whose text holds a stop string; None if the text of all
        tokens holds none.
        """
        if not self.texts or self._begin(decoder, tokens) is None:
            return None
        return bisect.bisect_left(
            range(len(tokens)), True, key=lambda n: self._begin(decoder, tokens[:n]) is not None
        )

    def text(self, decoder: Continuation, tokens: Sequence[int]) -> str:
        """Returns the text of ``tokens`` before the stop token or the stop string."""
        if tokens and tokens[-1] in self.ids:
            tokens = tokens[:-1]
        return decoder.decode(tokens)[: self._begin(decoder, tokens)]

    def held_back(self, text: str) -> int:
        """Returns the number of characters at the end of ``text`` that may be the beginning of a
        stop string.
        """
        most = max(map(len, self.texts), default=1) - 1
        sizes = range(min(most, len(text)), 0, -1)
        return next((n for n in sizes if any(stop.startswith(text[-n:]) for stop in self.texts)), 0)


class TextStream:
    """Turns a growing list of tokens into pieces of text whose concatenation is the whole text.

    Incomplete characters are held back, and so is a possible beginning of a stop string.
    """

    def __init__(self, decoder: Continuation, stops: Stops = Stops()):
        self._decoder, self._stops = decoder, stops
        self._shown = 0

    def push(self, tokens: Sequence[int], finished: bool) -> str:
        """Returns the new text for ``tokens``, all tokens so far; with ``finished``, also the text
        held back.
        """
        if finished:
            text = self._stops.text(self._decoder, tokens)
        else:
            text = self._decoder.complete(tokens)
            text = text[: len(text) - self._stops.held_back(text)]
        new = text[self._shown :]
        self._shown += len(new)
        return new
