"""The queue behind `generate_many`: all texts of a job over the rows of a batch, in the order of a schedule.

`specsamp.serving.batch` says what happens to the rows. While the device works, the caller has the completions.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator, Sequence

import numpy as np

from specsamp.decoding.job import Job
from specsamp.decoding.results import Completion
from specsamp.mesh.distributed import from_first
from specsamp.serving.batch import Batch, Usage
from specsamp.serving.log import CompletionLog
from specsamp.serving.schedule import ROUNDS_PER_LOOK, Schedule, Served, Ticket

TOGETHER = 4  # prompts of a data shard that are read in one call, where so many wait and rows are free
LOST = 0.05  # of a row's rounds, at most: between a string that ends its text and the next look for it


class Clock:
    """Tells the time and lets it go by, in seconds."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


class Queue(Iterator[Completion]):
    """Completions of a job, in the order in which they end; see `generate_many`.

    Attributes:
      known: the completions that come from the log.
      served: when texts arrived and ended, by prompt and sample.
    """

    def __init__(
        self,
        job: Job,
        *,
        rows: int,
        refill: int,
        rounds: int | None,
        log: CompletionLog | None,
        schedule: Schedule,
        arrivals: Sequence[float] | None,
        clock: Clock,
    ):
        self.served: dict[tuple[int, int], Served] = {}
        self._batch = Batch(job, rows=min(rows, job.rows), refill=refill, schedule=schedule, together=TOGETHER)
        self._job, self._log, self._clock = job, log, clock
        looks = job.rounds_per_look
        self._most_rounds = rounds or (looks if arrivals is None else min(looks, ROUNDS_PER_LOOK))
        self._adapts = rounds is None and bool(job.stops.texts)
        self._done = {} if log is None else dict(log.completions)
        self.known = len(self._done)
        self._limits_B = np.asarray(job.request.limits_B)
        tickets = [self._ticket(row, arrivals) for row in range(job.rows)]
        for ticket in tickets:
            if self._index(ticket.row) in self._done:
                ticket.emitted = len(self._done[self._index(ticket.row)].tokens)
                schedule.finish(ticket)
        tickets = [ticket for ticket in tickets if self._index(ticket.row) not in self._done]
        self._to_come = collections.deque(sorted(tickets, key=lambda ticket: ticket.arrived))
        self._ended = self._rounds_of_ended = 0  # texts, and their rounds
        self._completions = self._logged()

    @property
    def usage(self) -> Usage:
        """Returns the counts of the rows so far."""
        return self._batch.usage

    def __next__(self) -> Completion:
        return next(self._completions)

    def compile(self) -> None:
        """Compiles what the waiting prompts take, so that what follows can be timed."""
        if self._to_come:
            self._batch.compile([ticket.prompt for ticket in self._to_come], bool(self._job.stops.texts))

    def close(self) -> None:
        """Leaves what is still to come undone; the log has what was handed out."""
        self._completions.close()
        self._batch.free()
        if self._log is not None:
            self._log.close()

    def _logged(self) -> Iterator[Completion]:
        try:
            yield from self._done.values()
            yield from self._run()
        finally:
            self._batch.free()
            if self._log is not None:
                self._log.close()

    def _run(self) -> Iterator[Completion]:
        batch, ended, begin = self._batch, [], self._clock.now()
        while True:
            if self._to_come:  # processes must agree on what has arrived
                now = from_first(lambda: self._clock.now() - begin)
                while self._to_come and self._to_come[0].arrived <= now:
                    batch.waiting.append(self._to_come.popleft())
            if batch.waiting:
                batch.fill()
            is_running = any(batch.running)
            if is_running:
                batch.run(self._rounds_of_slice())
            for completion in ended if self._log is not None else ():  # the device is at work
                self._log.add(completion)
            yield from ended
            ended = []
            if not is_running:
                if not self._to_come:
                    return
                self._clock.wait(max(begin + self._to_come[0].arrived - self._clock.now(), 0.0))
                continue
            state = batch.fetch(always=bool(self._job.stops.texts))
            if state is None:
                continue
            running = enumerate(batch.running)
            texts = [None if ticket is None else self._job.text(state, place, ticket.row) for place, ticket in running]
            for ticket, text in batch.settle(texts):
                ended.append(self._job.completion(ticket.row, text))
                self._ended, self._rounds_of_ended = self._ended + 1, self._rounds_of_ended + text.stats.rounds
                times = {"arrived": ticket.arrived, "ended": self._clock.now() - begin}
                self.served[self._index(ticket.row)] = Served(**times, emitted=ticket.emitted)

    def _rounds_of_slice(self) -> int:
        """Returns the most rounds of the next slice.

        A string that ends a text is found half a slice late, on average. Where texts are short, slices are: no more
        than a twentieth of a row's rounds shall be lost.
        """
        if not self._adapts or not self._ended:
            return self._most_rounds
        return min(self._most_rounds, 1 + int(2 * LOST * self._rounds_of_ended / self._ended))

    def _ticket(self, row: int, arrivals: Sequence[float] | None) -> Ticket:
        index, _ = self._index(row)
        prompt = self._job.prompts[index]
        return Ticket(
            job=self._job,
            row=row,
            prompt=prompt,
            budget=int(self._limits_B[row]) - len(prompt),
            arrived=0.0 if arrivals is None else arrivals[index],
        )

    def _index(self, row: int) -> tuple[int, int]:
        return row // self._job.num_samples, row % self._job.num_samples
