"""The queue behind `generate_many`: texts that wait, the rows of a batch that decode them, and how busy these are.

The loop stays on the device until rows have ended. Their texts are fetched, the next prompts are read and written over
their rows, and the other rows go on as if nothing had happened (`specsamp.decoding.batch_rows`). While the device
works, the caller has the completions. A program is compiled for the loop, and one for each bucket of prompts.

A schedule says who goes first (`specsamp.serving.schedule`). A text that is put aside for another one waits in host
memory, for a row of its own data shard, and goes on there with the same tokens.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.decoding.batch_rows import NOWHERE
from specsamp.decoding.job import Job, bucket, to_host
from specsamp.decoding.results import Completion
from specsamp.decoding.state import DecodeState, Finish, Request
from specsamp.mesh.distributed import from_first
from specsamp.serving.host_rows import to_device_memory, to_host_memory
from specsamp.serving.log import CompletionLog
from specsamp.serving.schedule import ROUNDS_PER_LOOK, Schedule, Served, Ticket

LOST = 0.05  # of a row's rounds, at most: between a string that ends its text and the next look for it


class Clock:
    """Tells the time and lets it go by, in seconds."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclasses.dataclass
class Usage:
    """Counts of rounds in which the rows of a batch were busy; a row is busy in a round in which it emits something that is kept.

    Attributes:
      rows: of the batch.
      slices: runs of the loop.
      rounds: of the loop.
      busy: the sum over rounds of the rows that were busy.
      rounds_in_demand, busy_in_demand: the same, of slices at whose end prompts were waiting.
      put_aside: how often a text was put aside for another one.
    """

    rows: int
    slices: int = 0
    rounds: int = 0
    busy: int = 0
    rounds_in_demand: int = 0
    busy_in_demand: int = 0
    put_aside: int = 0

    @property
    def occupancy(self) -> float:
        """Returns the share of rows that were busy while prompts were waiting; nan if none ever waited."""
        return self.busy_in_demand / (self.rows * self.rounds_in_demand) if self.rounds_in_demand else float("nan")

    def add(self, rounds_B: np.ndarray, lost: int, in_demand: bool) -> None:
        """Counts a slice in which the rows emitted for ``rounds_B`` rounds, ``lost`` of which are not kept."""
        rounds, busy = int(rounds_B.max()), int(rounds_B.sum()) - int(lost)
        self.slices, self.rounds, self.busy = self.slices + 1, self.rounds + rounds, self.busy + busy
        if in_demand:
            self.rounds_in_demand, self.busy_in_demand = self.rounds_in_demand + rounds, self.busy_in_demand + busy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aside:
    """Rows in host memory, of which one is a text's that was put aside; ``rounds`` of it are counted already."""

    rows: DecodeState
    index: int
    rounds: int


class Queue(Iterator[Completion]):
    """Completions of a job, in the order in which they end; see `generate_many`.

    Attributes:
      usage: of the rows so far.
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
        shards = job.pair.shards.count
        rows = -(-min(rows, job.rows) // shards) * shards
        self.usage, self.served = Usage(rows=rows), {}
        self._job, self._log, self._schedule, self._clock = job, log, schedule, clock
        self._refill = min(refill, rows // shards)
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
        self._waiting: list[Ticket] = []
        self._running: list[Ticket | None] = [None] * rows  # the text that each row of the batch decodes
        self._rounds_B = np.zeros(rows, int)  # that each of them has been busy for
        self._ended = self._rounds_of_ended = 0  # texts, and their rounds
        self._completions = self._logged()

    def __next__(self) -> Completion:
        return next(self._completions)

    def compile(self) -> None:
        """Compiles what the waiting prompts take, so that what follows can be timed."""
        buckets = {bucket(len(ticket.prompt)): ticket.prompt for ticket in self._to_come}
        if not buckets:
            return
        state, newcomers = self._idle(), self._refill * self._job.pair.shards.count
        for prompt in buckets.values():
            rows = self._job.read([prompt] * newcomers, self._request([None] * newcomers))
            state = self._job.loop.insert(state, rows, [NOWHERE] * newcomers)
        if self._schedule.preempts:
            aside = Aside(rows=self._extract(state, [NOWHERE] * newcomers), index=0, rounds=0)
            state = self._bring_back(state, dataclasses.replace(self._to_come[0], aside=aside), NOWHERE)
        if self._job.stops.texts:
            state = self._job.end(state, [None] * len(self._running))
        jax.block_until_ready(self._job.run(state, 0).lengths_B)

    def close(self) -> None:
        """Leaves what is still to come undone; the log has what was handed out."""
        self._completions.close()
        if self._log is not None:
            self._log.close()

    def _logged(self) -> Iterator[Completion]:
        try:
            yield from self._done.values()
            yield from self._run()
        finally:
            if self._log is not None:
                self._log.close()

    def _run(self) -> Iterator[Completion]:
        if not self._to_come:
            return
        state, ended, begin = self._idle(), [], self._clock.now()
        while True:
            if self._to_come:  # processes must agree on what has arrived
                now = from_first(lambda: self._clock.now() - begin)
                while self._to_come and self._to_come[0].arrived <= now:
                    self._waiting.append(self._to_come.popleft())
            state = self._fill(state)
            running = sum(ticket is not None for ticket in self._running)
            if running:
                enough = running - self._refill * self._job.pair.shards.count + 1
                state = self._job.run(state, self._rounds_of_slice(), max(enough, 1))
            for completion in ended if self._log is not None else ():  # the device is at work
                self._log.add(completion)
            yield from ended
            ended = []
            if not running:
                if not self._to_come:
                    return
                self._clock.wait(max(begin + self._to_come[0].arrived - self._clock.now(), 0.0))
                continue
            rounds_B, finish_B, lengths_B = to_host((state.stats.rounds_B, state.finish_B, state.lengths_B))
            before_B, self._rounds_B = self._rounds_B, rounds_B.astype(int)
            is_running_B = np.array([ticket is not None for ticket in self._running])
            if not self._job.stops.texts and not (is_running_B & (finish_B != Finish.RUNNING)).any():
                self.usage.add(self._rounds_B - before_B, 0, bool(self._waiting))
                for ticket, length in zip(self._running, lengths_B):
                    if ticket is not None:
                        ticket.emitted = int(length) - len(ticket.prompt)
                continue  # no text is fetched before one has ended
            texts = self._job.texts(state, [None if ticket is None else ticket.row for ticket in self._running])
            # A string that ended a text may have been found some rounds later.
            lost = [0 if text is None else rounds - text.stats.rounds for text, rounds in zip(texts, self._rounds_B)]
            self.usage.add(self._rounds_B - before_B, sum(lost), bool(self._waiting))
            if self._job.stops.texts:
                state = self._job.end(state, texts)
            for place, (ticket, text) in enumerate(zip(self._running, texts)):
                if ticket is None:
                    continue
                ticket.emitted = len(text.tokens)
                if text.finish != Finish.RUNNING:
                    ended.append(self._job.completion(ticket.row, text))
                    self._running[place] = None
                    self._schedule.finish(ticket)
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

    def _idle(self) -> DecodeState:
        """Returns a state whose rows have all ended: one short prompt is read, and copied."""
        shards, rows = self._job.pair.shards.count, len(self._running)
        return self._job.read([[0]] * shards, self._request([None] * rows), rows // shards)

    def _fill(self, state: DecodeState) -> DecodeState:
        """Gives free rows to those who wait, and then the rows of those who are put aside for others."""
        state = self._take(state)
        if self._schedule.preempts and self._waiting:
            state = self._take(self._put_aside(state))
        return state

    def _take(self, state: DecodeState) -> DecodeState:
        """Gives free rows to those who wait, as many per data shard at a time: reads prompts, brings back the others."""
        shards = self._job.pair.shards.count
        per_shard = len(self._running) // shards
        while self._waiting and None in self._running:
            tickets, at = [], []  # of one call, and their places within each shard
            for shard in range(shards):
                free = [n for n in range(per_shard) if self._running[shard * per_shard + n] is None]
                for n in (free + [NOWHERE] * self._refill)[: self._refill]:
                    able = self._able(self._waiting, shard) if n != NOWHERE else []
                    ticket = self._schedule.choose(able) if able else None
                    tickets.append(ticket)
                    at.append(NOWHERE if ticket is None else n)
                    if ticket is not None:
                        self._waiting.remove(ticket)
                        ticket.shard, place = shard, shard * per_shard + n
                        self._running[place] = ticket
                        self._rounds_B[place] = 0 if ticket.aside is None else ticket.aside.rounds
            if not any(tickets):  # who waits was put aside in another shard
                break
            rows = [None if ticket is None or ticket.aside else ticket.row for ticket in tickets]
            if rows != [None] * len(rows):
                newcomers = self._job.read(list(map(self._prompt, rows)), self._request(rows))
                places = [NOWHERE if row is None else n for row, n in zip(rows, at)]
                state = self._job.loop.insert(state, newcomers, places)
            for ticket, n in zip(tickets, at):
                if ticket is not None and ticket.aside:
                    state = self._bring_back(state, ticket, n)
        return state

    def _put_aside(self, state: DecodeState) -> DecodeState:
        """Puts aside the texts that the schedule names, at most as many per data shard as are refilled at a time."""
        shards, waiting = self._job.pair.shards.count, list(self._waiting)
        per_shard, tickets, at = len(self._running) // shards, [], []
        for shard in range(shards):
            running = [one for one in self._running[shard * per_shard : (shard + 1) * per_shard] if one is not None]
            for _ in range(self._refill):
                able, ticket = self._able(waiting, shard), None
                if able and running:
                    newcomer = self._schedule.choose(able)
                    ticket = self._schedule.displace(newcomer, running)
                tickets.append(ticket)
                at.append(NOWHERE if ticket is None else self._running.index(ticket) - shard * per_shard)
                if ticket is not None:
                    waiting.remove(newcomer)
                    running.remove(ticket)
        if any(tickets):
            rows = self._extract(state, at)
            for index, ticket in enumerate(tickets):
                if ticket is not None:
                    place = self._running.index(ticket)
                    ticket.aside = Aside(rows=rows, index=index, rounds=int(self._rounds_B[place]))
                    self._running[place] = None
                    self._waiting.append(ticket)
                    self.usage.put_aside += 1
        return state

    def _extract(self, state: DecodeState, at: Sequence[int]) -> DecodeState:
        """Returns some rows, in host memory; they are still in ``state``."""
        rows = self._job.loop.extract(dataclasses.replace(state, request=None), at)
        return to_host_memory(rows, self._job.pair.shards)

    def _bring_back(self, state: DecodeState, ticket: Ticket, n: int) -> DecodeState:
        """Writes a text that was put aside over the row ``n`` of its shard."""
        aside, ticket.aside = ticket.aside, None
        index = range(len(aside.rows.lengths_B))
        request = self._request([ticket.row if i == aside.index else None for i in index])
        rows = dataclasses.replace(to_device_memory(aside.rows, self._job.pair.shards), request=request)
        return self._job.loop.insert(state, rows, [n if i == aside.index else NOWHERE for i in index])

    def _able(self, waiting: list[Ticket], shard: int) -> list[Ticket]:
        """Returns those of ``waiting`` that can be decoded in a shard: no text that has begun leaves its own."""
        if not self._schedule.preempts:
            return waiting
        return [ticket for ticket in waiting if ticket.shard in (None, shard)]

    def _ticket(self, row: int, arrivals: Sequence[float] | None) -> Ticket:
        prompt = self._prompt(row)
        return Ticket(
            row=row,
            prompt=prompt,
            budget=int(self._limits_B[row]) - len(prompt),
            arrived=0.0 if arrivals is None else arrivals[self._index(row)[0]],
        )

    def _request(self, rows: Sequence[int | None]) -> Request:
        """Returns what is asked of some rows of the job; of None, nothing."""
        taken = np.array([row or 0 for row in rows])
        request = jax.tree.map(lambda leaf: leaf[taken], self._job.request)
        is_asked = np.array([row is not None for row in rows])
        return dataclasses.replace(request, limits_B=jnp.where(is_asked, request.limits_B, 0))

    def _prompt(self, row: int | None) -> Sequence[int]:
        return [0] if row is None else self._job.prompts[row // self._job.num_samples]

    def _index(self, row: int) -> tuple[int, int]:
        return row // self._job.num_samples, row % self._job.num_samples
