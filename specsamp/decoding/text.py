"""Text while it is being written."""

from __future__ import annotations

from collections.abc import Sequence

from specsamp.decoding.pair import Tokenizer
from specsamp.decoding.stops import Stops

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


CONTEXT = 16  # tokens of a prompt that are looked at: a text's first space depends on what is before it


class Continuation:
    """Decodes what follows a prompt, so that prompt and text together are the text of all their tokens.

    Decoded alone, a text would lose its first space with tokenizers that begin every text with a space.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._context = list(prompt[-CONTEXT:])
        # A prompt may end inside a character, which its text completes.
        self._before = tokenizer.decode(self._context).rstrip(INCOMPLETE)

    def decode(self, tokens: Sequence[int]) -> str:
        whole = self._tokenizer.decode([*self._context, *tokens])
        return whole[len(self._before) :] if whole.startswith(self._before) else self._tokenizer.decode(tokens)


class TextStream:
    """Turns a growing list of tokens into pieces of text that together are the text of the whole.

    A tokenizer's text of a prefix need not be a prefix of its text: the last character may lack bytes,
    and a tokenizer that falls back to bytes then shows the whole run of bytes as unknown. What may still
    change is held back until it agrees with what has been shown, and so is what may be the beginning of a
    string that ends the text. (A text that ends inside a character is the exception: its last piece shows
    what is left.)
    """

    def __init__(self, tokenizer: Tokenizer | Continuation, stops: Stops = Stops()):
        self._tokenizer = tokenizer
        self._stops = stops
        self._shown = ""

    def push(self, tokens: Sequence[int], finished: bool) -> str:
        """Returns the text that is new in ``tokens``, all tokens so far; everything if ``finished``."""
        text = self._stops.text(self._tokenizer, tokens)
        if not finished:
            text = text.rstrip(INCOMPLETE)
            text = text[: len(text) - self._stops.held_back(text)]
            if not text.startswith(self._shown):
                return ""
        new, self._shown = text[len(self._shown) :], text
        return new
