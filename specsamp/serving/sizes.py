"""Chooses the size of a batch, and compiles the programs of further sizes during decoding.

The batch of a call has its largest size from the start. The batch of a service follows its
requests: a lone text is not decoded at the cost of all rows, nor a short text at the cost of the
whole context. Rows per data shard and slots are powers of two. Decoding continues in the present
size while another one is compiled.
"""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from absl import logging

from specsamp.serving.scheduler import Entry

SMALLEST_SLOTS = 256
PATIENCE = 16  # number of steps that fit a smaller batch before it shrinks


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
    """The calls that read tokens of prompts."""

    slots: int
    rows: int = 1


@dataclasses.dataclass(frozen=True)
class ScoreChunks:
    """The calls that score a text; see `specsamp.serving.scores.score`."""

    slots: int
    size: int


class Background:
    """Prepares programs one after another, each once: first the last one that was needed, then the
    others in their order.

    Attributes:
      notify: is called after each program that the thread has prepared.
      ready: the programs that were prepared, or could not be.
      failed: the programs that could not be prepared; their use raises the error again.
    """

    def __init__(self, prepare: Callable[[Hashable], None], *, in_thread: bool):
        """Takes the function that prepares a program.

        Without ``in_thread``, `is_ready` calls it.
        """
        self.notify: Callable[[], None] = lambda: None
        self.ready: set[Hashable] = set()
        self.failed: set[Hashable] = set()
        self._prepare = prepare
        self._thread = None
        if in_thread:
            self._thread = ThreadPoolExecutor(1, "specsamp compiler", _leave_a_core)
        self._lock = threading.Lock()  # guards the next two
        self._begun: set[Hashable] = set()
        self._queue: list[Hashable] = []  # the next one last

    def is_ready(self, program: Hashable) -> bool:
        """Returns whether a needed program is ready; it is prepared before all others that wait."""
        if self._thread is None:
            self.make(program)
        elif program not in self.ready:
            self._demand(program, is_needed=True)
        return program in self.ready

    def begin(self, program: Hashable) -> None:
        """Prepares a program in the thread, if there is one, when no other is needed."""
        if self._thread is not None:
            self._demand(program, is_needed=False)

    def _demand(self, program: Hashable, *, is_needed: bool) -> None:
        with self._lock:
            if program not in self._begun:
                self._begun.add(program)
                self._queue.insert(len(self._queue) if is_needed else 0, program)
                self._thread.submit(self._make_next)
            elif is_needed and program in self._queue:
                self._queue.remove(program)
                self._queue.append(program)

    def make(self, program: Hashable) -> None:
        """Prepares a program now, unless it is ready."""
        if program not in self.ready:
            self._prepare(program)
            self._begun.add(program)
            self.ready.add(program)

    def attempt(self, program: Hashable) -> None:
        """Prepares a program now, unless it is ready, or adds it to those that failed."""
        try:
            self.make(program)
        except Exception:
            logging.exception("%s was not compiled", program)
            self.failed.add(program)
            self._begun.add(program)
            self.ready.add(program)

    def close(self) -> None:
        """Waits for the end of the current preparation, and begins no other."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _make_next(self) -> None:
        with self._lock:
            program = self._queue.pop()
        self.attempt(program)
        self.notify()


@dataclasses.dataclass
class Sizes:
    """The possible sizes of a batch, and the choice of the next.

    Attributes:
      rows: possible rows of each data shard, from small to large.
      slots: possible slots of each row, from small to large.
      shards: number of data shards.
      step_tokens: the most tokens that a text gains in a step.
      spare: slots beyond the tokens of a text.
      programs: the compiled programs.
    """

    rows: tuple[int, ...]
    slots: tuple[int, ...]
    shards: int
    step_tokens: int
    spare: int
    programs: Background
    _calm: int = 0  # number of steps that fit a smaller size

    @property
    def all(self) -> list[Size]:
        """Returns all sizes, from small to large."""
        return [Size(rows, slots) for slots in self.slots for rows in self.rows]

    def compile_first(self, threads: int) -> None:
        """Compiles one row and all rows, with the fewest slots; if all rows fail, the service runs
        in smaller sizes.
        """
        smallest, chunks, *larger = self._first_programs()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self.programs.make, (smallest, chunks)))
        for program in larger:  # one after another, since their caches are large
            self.programs.attempt(program)

    def begin_first(self) -> None:
        """Begins to compile the programs of the first requests, and the way back to fewer rows."""
        *_, grown = programs = self._first_programs()
        for program in programs:
            self.programs.begin(program)
        if isinstance(grown, Resize):
            self.programs.begin(Resize(grown.new, grown.old))

    def _first_programs(self) -> list[Hashable]:
        """Returns the programs of the smallest size, and of all rows with as many slots."""
        smallest, full = self.all[0], Size(self.rows[-1], self.slots[0])
        programs = [smallest, Chunks(smallest.slots)]
        return programs if full == smallest else [*programs, full, Resize(smallest, full)]

    def slots_for(self, entry: Entry) -> int:
        """Returns the fewest slots in which a request can be decoded for another step."""
        return self._slots_of(min(entry.request.limit, entry.length + self.step_tokens))

    def choose(self, size: Size, decoding: Sequence[Entry], waiting: Sequence[Entry]) -> Size:
        """Returns the size of the next step.

        It holds all requests. While its programs are compiled, a larger size that was compiled
        before takes its place, or else the largest below it; if there is none, the size holds the
        requests that fit the present slots. A batch shrinks after some steps, or when it is empty;
        while its best size is compiled, to the best one that was compiled before. Programs for the
        whole of a text are compiled from its first step on.
        """
        whole = max((self._slots_of(entry.request.limit) for entry in decoding), default=0)
        if whole > size.slots:
            self._begin(size, Size(size.rows, whole))
        short = [entry for entry in waiting if self.slots_for(entry) <= size.slots]
        self._calm += 1
        for entries in (waiting, short):
            needed = self._size_for([*decoding, *entries])
            wanted = Size(*map(max, needed, size))
            if wanted != size or needed == size:
                self._calm = 0
            elif not decoding or self._calm > PATIENCE:
                wanted = needed
            if wanted == size:
                return size
            if self._is_ready(size, wanted):
                self._calm = 0
                return wanted
            if not _holds(size, wanted):  # it grows
                larger = self._compiled(size, least=wanted, most=self.all[-1])
                smaller = self._compiled(size, least=size, most=wanted)
                if larger or smaller:
                    return larger[0] if larger else smaller[-1]
        return (self._compiled(size, least=needed, most=size) or [size])[0]

    def _compiled(self, size: Size, *, least: Size, most: Size) -> list[Size]:
        """Returns the sizes between two, other than the present one, that were compiled."""
        return [
            other
            for other in self.all
            if _holds(other, least) and _holds(most, other) and other != size
            if {other, Chunks(other.slots)} <= self.programs.ready
            if self._is_ready(size, other)
            if self.programs.failed.isdisjoint(_programs(size, other))
        ]

    def _size_for(self, entries: Sequence[Entry]) -> Size:
        per_shard = -(-len(entries) // self.shards)
        slots = max(map(self.slots_for, entries), default=self.slots[0])
        return Size(_at_least(self.rows, per_shard), slots)

    def _slots_of(self, tokens: int) -> int:
        """Returns the fewest slots that hold a text."""
        return _at_least(self.slots, tokens + self.spare)

    def _begin(self, old: Size, new: Size) -> None:
        """Begins to compile what a change of size takes."""
        for program in _programs(old, new):
            self.programs.begin(program)

    def _is_ready(self, old: Size, new: Size) -> bool:
        return all([self.programs.is_ready(program) for program in _programs(old, new)])


def _programs(old: Size, new: Size) -> tuple[Size, Chunks, Resize]:
    return new, Chunks(new.slots), Resize(old, new)


def _holds(size: Size, other: Size) -> bool:
    return size.rows >= other.rows and size.slots >= other.slots


def _leave_a_core() -> None:
    """Keeps this thread, and the compiler's threads that it starts, from one of several cores."""
    if hasattr(os, "sched_setaffinity"):  # Linux
        first, *others = sorted(os.sched_getaffinity(0))
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setaffinity(0, others or [first])


def powers(least: int, most: int) -> tuple[int, ...]:
    """Returns ``least``, its double and so on, below ``most``, and ``most``."""
    return (least, *powers(2 * least, most)) if least < most else (most,)


def _at_least(choices: Sequence[int], needed: int) -> int:
    return next((choice for choice in choices if choice >= needed), choices[-1])
