"""A call of the service that is being answered, as its caller sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from absl import logging

from specsamp.decoding.request import Request
from specsamp.decoding.results import Chunk


class Busy(Exception):
    """So many texts wait already that no more are taken."""


class TooLong(ValueError):
    """A prompt and what is asked for after it are longer than the rows."""


class Failed(Exception):
    """A call ends without its texts: the service failed, or was closed."""


class Answer:
    """A call of the service that is being answered.

    Attributes:
      requests: of the call, in order of prompts and samples.
      is_streamed: chunks are delivered while a text grows; else there is one chunk for each text, which is the whole.
      is_over: nothing more is delivered.
    """

    def __init__(self, requests: Sequence[Request], deliver: Callable[[Chunk | Failed], None], is_streamed: bool):
        self.requests, self.is_streamed, self.is_over = requests, is_streamed, False
        self._deliver = deliver

    def cancel(self) -> None:
        """Says, from any thread, that the caller has left: the rows are free after the slice."""
        self.is_over = True

    def send(self, what: Chunk | Failed) -> None:
        """Hands something to the caller; a caller that cannot take it has left."""
        if self.is_over:
            return
        self.is_over = isinstance(what, Failed)
        try:
            self._deliver(what)
        except Exception as error:
            logging.error("an answer was not taken: %r", error)
            self.is_over = True
