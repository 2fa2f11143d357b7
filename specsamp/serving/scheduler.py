"""Decides which request is prefilled, decoded or preempted next: lists on the host, without JAX.

The life of a request:

    queued       waits for a row of the batch.
    prefilling   has a row, and its prompt is read in chunks between steps.
    decoding     gains tokens in each step.
    preempted    has given its row up; its caches are in host memory, and it waits for another row
                 of the same data shard.
    finished     has its whole text, was cancelled, or has failed; its row is free.

A request is preempted if its text outgrows the slots of its row, or for a request that an order
(`specsamp.serving.orders`) ranks before it. It resumes with the same tokens.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from specsamp.serving.orders import Order

if TYPE_CHECKING:
    from specsamp.decoding.request import Request


class Stage(enum.Enum):
    """Names the stages in the life of a request, which the module describes."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False)
class Entry:
    """A request, and its progress in serving.

    Attributes:
      request: the sequence to decode.
      client: name of the caller.
      priority: smaller numbers go first.
      arrived: time of arrival in seconds, of the clock of process 0.
      answer: the answer of a service that the text belongs to (`specsamp.serving.answer`).
      stage: the present stage.
      rounds: rounds so far, updated after each step.
      shown: number of tokens that the caller has received.
      length: tokens so far, those of the prompt included.
      shard: the data shard of a preempted request.
      kept: the row of a preempted request, in host memory.
      is_outdated: whether its row was drafted with former parameters of the draft.
    """

    request: Request
    client: str = ""
    priority: int = 0
    arrived: float = 0.0
    answer: Any = None
    stage: Stage = Stage.QUEUED
    rounds: int = 0
    shown: int = 0
    length: int = 0
    shard: int | None = None
    kept: Any = None
    is_outdated: bool = False

    def __post_init__(self):
        self.length = self.length or len(self.request.prompt)

    @property
    def emitted(self) -> int:
        """Returns the number of tokens of the text so far."""
        return self.length - len(self.request.prompt)


class Scheduler:
    """Holds the unfinished requests. Only lists and stages change here, no rows.

    Other threads may count the requests at any moment, so a request enters its next list before it
    leaves the last.

    Attributes:
      order: ranks the requests.
      waiting: queued and preempted requests, the next one first.
      active: requests that are prefilling or decoding.
    """

    def __init__(self, order: Order):
        self.order = order
        self.waiting: list[Entry] = []
        self.active: list[Entry] = []

    def sort(self) -> None:
        """Sorts waiting requests by priority, clients in turn, and rank.

        A client with fewer active requests goes first. So do preempted requests, unless the order
        preempts.
        """
        counts = collections.Counter(entry.client for entry in self.active)
        turns = {}
        for entry in sorted(self.waiting, key=self.order.rank):
            is_first = entry.stage == Stage.PREEMPTED and not self.order.preempts
            turns[entry] = entry.priority, 0 if is_first else 1 + counts[entry.client]
            counts[entry.client] += 1
        self.waiting[:] = sorted(turns, key=turns.__getitem__)

    def displaced(self, newcomer: Entry, decoding: Iterable[Entry]) -> Entry | None:
        """Returns the decoding request that is preempted for a waiting one, or None."""
        last = max(decoding, key=lambda entry: (entry.priority, self.order.rank(entry)))
        return last if self.order.is_displaced(last, newcomer) else None

    def next(
        self, shard: int, fits: Callable[[Entry], bool], *, can_resume: bool = True
    ) -> Entry | None:
        """Returns the first waiting request that a free row of a data shard can take, or None."""
        for entry in self.waiting:
            can_start = can_resume or entry.stage == Stage.QUEUED
            if can_start and entry.shard in (None, shard) and fits(entry):
                return entry
        return None

    def admit(self, entry: Entry) -> None:
        """Begins to prefill a queued request."""
        self._move(entry, Stage.PREFILLING)

    def start(self, entry: Entry) -> None:
        """Begins to decode a request whose prompt was read."""
        entry.stage = Stage.DECODING

    def preempt(self, entry: Entry, shard: int, kept: Any, after: Entry | None = None) -> None:
        """Returns a decoding request to the front of the queue, with its row in host memory; or
        behind the request ``after``, which takes its row.
        """
        entry.stage, entry.shard, entry.kept = Stage.PREEMPTED, shard, kept
        self.waiting.insert(0 if after is None else self.waiting.index(after) + 1, entry)
        self.active.remove(entry)

    def resume(self, entry: Entry) -> None:
        """Continues to decode a preempted request, whose row was written back."""
        entry.shard = entry.kept = None
        self._move(entry, Stage.DECODING)

    def finish(self, entry: Entry) -> None:
        """Removes a request from all lists."""
        is_waiting = entry.stage in (Stage.QUEUED, Stage.PREEMPTED)
        entries = self.waiting if is_waiting else self.active
        entry.stage, entry.kept = Stage.FINISHED, None
        if entry in entries:
            entries.remove(entry)

    def _move(self, entry: Entry, stage: Stage) -> None:
        entry.stage = stage
        self.active.append(entry)
        self.waiting.remove(entry)
