"""Answers of a service: the chunks of their texts, or the reason of a failure."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from absl import logging

from specsamp.decoding.pair import Tokenizer
from specsamp.decoding.request import Request
from specsamp.decoding.results import Chunk
from specsamp.serving.sampling_request import SamplingRequest
from specsamp.serving.scheduler import Entry
from specsamp.serving.scores import Scores


class Busy(Exception):
    """The queue is full."""


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
      asked: the request of the caller.
      deliver: takes chunks and failures.
      requests: of the call, in order of prompts and samples.
      arrived: when the caller came, by `time.monotonic` of process 0.
      scores: of the finished texts, if they are scored.
      number: its name in all processes; None: there is one process.
      has_left: whether the caller has cancelled it.
      is_over: whether nothing more is delivered, so that the rows are free.
      first: when the first token was written, by `time.monotonic`; None before.
    """

    asked: SamplingRequest
    deliver: Callable[[Chunk | Failed], None]
    requests: Sequence[Request] = ()
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    scores: dict[Request, Scores] = dataclasses.field(default_factory=dict)
    number: int | None = None
    has_left: bool = False
    is_over: bool = False
    first: float | None = None

    def cancel(self) -> None:
        """Cancels the answer, from any thread; the rows are free after the step.

        Several processes free the rows together, after the next broadcast of process 0.
        """
        self.has_left = True
        if self.number is None:
            self.is_over = True

    def send(self, sent: Chunk | Failed) -> None:
        """Delivers a chunk or the reason of a failure; cancels the answer if the caller raises."""
        if self.is_over:
            return
        if isinstance(sent, Failed):
            self.is_over = True
        if self.has_left:
            return
        try:
            self.deliver(sent)
        except Exception as error:
            logging.error("an answer was not taken: %r", error)
            self.cancel()

    def entries(self) -> list[Entry]:
        """Returns an entry of the scheduler for each text."""
        told = dict(client=self.asked.client, priority=self.asked.priority, arrived=self.arrived)
        return [Entry(request, answer=self, **told) for request in self.requests]

    def copy(self) -> Answer:
        """Returns the answer for another process, which does not have the caller."""
        requests = [dataclasses.replace(request, tokenizer=None) for request in self.requests]
        return dataclasses.replace(self, requests=requests, deliver=_ignore)

    def complete(self, tokenizer: Tokenizer | None) -> Answer:
        """Adds the tokenizer to a copy in another process."""
        for request in self.requests:
            request.tokenizer = tokenizer
        return self


class News(NamedTuple):
    """The message of process 0 to the other processes before a step.

    Attributes:
      answers: new ones, with their requests.
      left: numbers of the cancelled answers.
      closed: the reason why the service ends, or None.
    """

    answers: list[Answer]
    left: set[int]
    closed: str | None


def _ignore(chunk: Chunk | Failed) -> None:
    """Delivers nothing, where another process has the caller."""
