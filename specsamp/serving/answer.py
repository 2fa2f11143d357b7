"""A request that is being served, as its caller sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from absl import logging

from specsamp.decoding.job import Job
from specsamp.decoding.results import RowStats
from specsamp.decoding.text import TextStream


class Busy(Exception):
    """So many texts wait already that no more are taken."""


class TooLong(ValueError):
    """A prompt and what is asked for after it are longer than the rows."""


class Failed(Exception):
    """A request ends without its texts: the service failed, or was closed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Holds what a text has gained; of a request that is not streamed there is one for each text, which is the whole.

    Attributes:
      row: sample ``row % num_samples`` of prompt ``row // num_samples``.
      finish: None while the text goes on.
      stats: counts of the whole text, in its last piece.
    """

    row: int
    tokens: list[int]
    from_draft: list[bool]
    log_probs: list[float]
    finish: str | None
    stats: RowStats | None


class Answer:
    """A request that is being served.

    Attributes:
      job: what was asked, checked.
    """

    def __init__(self, job: Job, deliver: Callable[[Piece | Failed], None], is_streamed: bool):
        self.job, self.is_streamed, self.is_over = job, is_streamed, False
        self._deliver = deliver

    def cancel(self) -> None:
        """Says, from any thread, that nobody wants the answer any more: its rows are free after the slice."""
        self.is_over = True

    def text_stream(self, row: int) -> TextStream | None:
        """Returns what makes text of the tokens of a row; None if the pair has no tokenizer."""
        decoder = self.job.continuation(row)
        return None if decoder is None else TextStream(decoder, self.job.stops)

    def send(self, what: Piece | Failed) -> None:
        """Hands something to the caller. One who cannot take it wants nothing more."""
        if self.is_over:
            return
        self.is_over = isinstance(what, Failed)
        try:
            self._deliver(what)
        except Exception as error:
            logging.error("an answer was not taken: %r", error)
            self.is_over = True
