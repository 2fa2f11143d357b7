"""Compiles programs in a thread of its own, so that what runs goes on."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Hashable

from absl import logging


class Background:
    """Prepares things one after another, each once.

    Attributes:
      count: things that were prepared.
    """

    def __init__(self, prepare: Callable[[Hashable], None], *, in_thread: bool):
        """Takes what prepares a thing; without ``in_thread``, whoever asks first does the work."""
        self.count = 0
        self.notify: Callable[[], None] = lambda: None  # called after each
        self._prepare, self._in_thread = prepare, in_thread
        self._changed = threading.Condition()  # guards the next four
        self._known: set[Hashable] = set()
        self._ready: set[Hashable] = set()
        self._queue: collections.deque[Hashable] = collections.deque()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def is_ready(self, thing: Hashable) -> bool:
        """Returns whether a thing is ready; who asks first has it prepared."""
        with self._changed:
            if thing in self._known or self._is_closed:
                return thing in self._ready
            if self._in_thread:
                self._known.add(thing)
                self._queue.append(thing)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="specsamp compiler", daemon=True)
                    self._thread.start()
                self._changed.notify()
                return False
        self.make(thing)
        return True

    def make(self, thing: Hashable) -> None:
        """Prepares a thing now, unless it is ready."""
        if thing not in self._ready:
            self._prepare(thing)
            with self._changed:
                self._known.add(thing)
                self._ready.add(thing)
                self.count += 1

    def close(self) -> None:
        """Waits for the end of what is being prepared; nothing else is begun."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._is_closed):
                    self._changed.wait()
                if self._is_closed:
                    return
                thing = self._queue.popleft()
            try:
                self._prepare(thing)
            except Exception:  # who uses it meets the error again, and answers for it
                logging.exception("%s was not compiled", thing)
            with self._changed:
                self._ready.add(thing)
                self.count += 1
            self.notify()
