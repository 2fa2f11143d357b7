"""What a caller of a service gets: the chunks of an answer as they come, or why there are none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from absl import logging

from specsamp.decoding.request import Request
from specsamp.decoding.results import Chunk
from specsamp.serving.scores import Scores


class Busy(Exception):
    """Too many texts wait already."""


class TooLong(ValueError):
    """A prompt and its budget are longer than the context."""


class Failed(Exception):
    """A call ends without its texts: the service failed, or was closed."""


class Unmet(Failed):
    """A text cannot follow the grammar of its own request."""


@dataclasses.dataclass(eq=False)
class Answer:
    """A call that is being answered, as its caller sees it.

    Attributes:
      requests: of the call, in order of prompts and samples.
      is_streamed: whether chunks are delivered while a text grows; else each text is one chunk.
      client: whose it is.
      is_scored: whether the last chunk of each text waits for `scores`, those of its request.
      number: by which the processes of a mesh name it; None: one process has it alone.
      has_left: whether the caller takes no more.
      is_over: whether nothing more is delivered, so that the rows are free.
      first: when the first token was written, by `time.monotonic`; None before.
    """

    requests: Sequence[Request]
    deliver: Callable[[Chunk | Failed], None]
    is_streamed: bool
    client: str = ""
    is_scored: bool = False
    scores: dict[Request, Scores] = dataclasses.field(default_factory=dict)
    number: int | None = None
    has_left: bool = False
    is_over: bool = False
    first: float | None = None

    def cancel(self) -> None:
        """Says, from any thread, that the caller has left; the rows are free after the slice.

        Where several processes decode, they free the rows together, after the first has told the
        others.
        """
        self.has_left = True
        if self.number is None:
            self.is_over = True

    def send(self, what: Chunk | Failed) -> None:
        """Delivers a chunk or the reason of a failure; a caller that raises has left."""
        if self.is_over:
            return
        if isinstance(what, Failed):
            self.is_over = True
        if self.has_left:
            return
        try:
            self.deliver(what)
        except Exception as error:
            logging.error("an answer was not taken: %r", error)
            self.cancel()

    def copy(self) -> Answer:
        """Returns the answer for another process, which does not have the caller."""
        requests = [
            dataclasses.replace(request, answer=None, tokenizer=None) for request in self.requests
        ]
        return dataclasses.replace(self, requests=requests, deliver=_ignore)


class News(NamedTuple):
    """Holds what the first of several processes tells the others before a slice.

    Attributes:
      answers: new ones, with their requests.
      left: numbers of the answers whose callers have left.
      closed: why the service ends; None: it goes on.
    """

    answers: list[Answer]
    left: set[int]
    closed: str | None


def _ignore(chunk: Chunk | Failed) -> None:
    """Delivers nothing, where another process has the caller."""
