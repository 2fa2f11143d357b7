"""Compiles programs in a background thread, during decoding; names the programs of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from absl import logging


class Size(NamedTuple):
    """Rows of each data shard, and slots of each row."""

    rows: int
    slots: int


@dataclasses.dataclass(frozen=True)
class Resize:
    """The change from one size to another."""

    old: Size
    new: Size


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The calls that read tokens of one prompt per data shard."""

    slots: int


@dataclasses.dataclass(frozen=True)
class ScoreChunks:
    """The calls that score a text; see `specsamp.serving.scores.score`."""

    slots: int
    size: int


class Background:
    """Prepares things one after another, each once.

    Attributes:
      notify: is called after each thing that the thread has prepared.
    """

    def __init__(self, prepare: Callable[[Hashable], None], *, in_thread: bool):
        """Takes the function that prepares a thing; without ``in_thread``, `is_ready` calls it."""
        self.notify: Callable[[], None] = lambda: None
        self._prepare = prepare
        self._thread = ThreadPoolExecutor(1, "specsamp compiler") if in_thread else None
        self._asked: set[Hashable] = set()
        self._ready: set[Hashable] = set()

    def is_ready(self, thing: Hashable) -> bool:
        """Returns whether a thing is ready; the first call has it prepared."""
        if thing not in self._asked and self._thread is None:
            self.make(thing)
        elif thing not in self._asked:
            self._asked.add(thing)
            self._thread.submit(self._make_in_thread, thing)
        return thing in self._ready

    def make(self, thing: Hashable) -> None:
        """Prepares a thing now, unless it is ready."""
        if thing not in self._ready:
            self._prepare(thing)
            self._asked.add(thing)
            self._ready.add(thing)

    def close(self) -> None:
        """Waits for the end of the current preparation, and begins no other."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _make_in_thread(self, thing: Hashable) -> None:
        try:
            self._prepare(thing)
        except Exception:  # its use raises the error again
            logging.exception("%s was not compiled", thing)
        self._ready.add(thing)
        self.notify()
