"""The rows of a batch, for whoever gives them texts: all of a closed job (`specsamp.serving.queue`), or requests as they come.

The loop stays on the device until rows have ended. Their texts are fetched, the next prompts are read and written over
their rows, and the other rows go on as if nothing had happened (`specsamp.decoding.batch_rows`). A program is compiled
for the loop, and one for each bucket of prompts. What is asked of a row (sampling, noise, budget, stop tokens) is data,
so texts of different jobs share a batch and its programs.

A schedule says who goes first (`specsamp.serving.schedule`). A text that is put aside for another one waits in host
memory, for a row of its own data shard, and goes on there with the same tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.decoding import batch_rows
from specsamp.decoding.batch_rows import NOWHERE
from specsamp.decoding.job import Job, bucket, to_host, written
from specsamp.decoding.results import RowText
from specsamp.decoding.state import DecodeState, Finish, RequestBatch
from specsamp.serving.host_rows import to_device_memory, to_host_memory
from specsamp.serving.schedule import Schedule, Ticket


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


class Batch:
    """Holds the rows of a batch, the texts that they decode, and those that wait for them.

    A slice is `fill`, `run`, `fetch`, and, if that has found something, `settle`.

    Attributes:
      usage: of the rows so far.
      waiting: texts, in the order in which they began to wait; the caller adds to it.
      running: the text that each row decodes, or None.
      reading: where `fill` raised, the texts whose prompts it was reading; they are in ``running`` already.
    """

    def __init__(self, job: Job, *, rows: int, refill: int, schedule: Schedule, together: int = 1):
        """Makes a batch without a state, which `fill` or `compile` begins.

        Args:
          job: whose loop, weights and slots the texts of all jobs share; none has more stop ids.
          rows: of the batch; rounded up to a multiple of the data shards.
          refill: rows of a data shard whose prompts are read in one call; `run` returns once so many have ended.
          together: where so many rows of a data shard are free and prompts of one bucket wait for them, they are read
            in one call.
        """
        shards = job.pair.shards.count
        rows = -(-rows // shards) * shards
        self.usage = Usage(rows=rows)
        self.waiting: list[Ticket] = []
        self.running: list[Ticket | None] = [None] * rows
        self.reading: list[Ticket] = []
        self._job, self._schedule = job, schedule
        self._refill = min(refill, rows // shards)
        self._together = max(min(together, rows // shards) // self._refill, 1) * self._refill
        self._state: DecodeState | None = None
        self._rounds_B = np.zeros(rows, int)  # that each of the texts has been busy for
        self._before_B = self._rounds_B  # the slice

    def compile(self, prompts: Iterable[Sequence[int]], texts_end_late: bool) -> None:
        """Compiles what takes these prompts, so that what follows can be timed.

        Args:
          texts_end_late: whether `settle` will end rows, as those of texts that strings end.
        """
        self._begin()
        compiled = set()
        for prompt in prompts:
            if bucket(len(prompt)) in compiled:
                continue
            compiled.add(bucket(len(prompt)))
            for width in {self._refill, self._together}:
                newcomers = [None] * (width * self._job.pair.shards.count)
                rows = self._job.read([prompt] * len(newcomers), self._request(newcomers))
                self._state = batch_rows.insert(self._state, rows, [NOWHERE] * len(newcomers), self._job.loop.shards)
        if self._schedule.preempts:
            places = [NOWHERE] * (self._refill * self._job.pair.shards.count)
            self._bring_back(Aside(rows=self._extract(places), index=NOWHERE, rounds=0), None, NOWHERE)
        if texts_end_late:
            self._state = batch_rows.end(self._state, np.zeros(len(self.running), bool))
        self._state = self._job.run(self._state, 0)
        jax.block_until_ready(self._state.lengths_B)

    def free(self) -> None:
        """Gives the memory of the caches back; nothing may be running."""
        self._state, self._rounds_B = None, np.zeros_like(self._rounds_B)  # a state begins without rounds

    def fill(self) -> None:
        """Gives free rows to those who wait, and then the rows of those who are put aside for others."""
        self._begin()
        self._take()
        if self._schedule.preempts and self.waiting:
            self._put_aside()
            self._take()

    def run(self, max_rounds: int) -> None:
        """Starts a slice: until as many texts have ended as are refilled at a time, and for at most ``max_rounds``."""
        enough = sum(ticket is not None for ticket in self.running) - self._refill * self._job.pair.shards.count + 1
        self._state = self._job.run(self._state, max_rounds, max(enough, 1))

    def fetch(self, always: bool) -> DecodeState | None:
        """Waits for the end of a slice and returns what was written so far, for `Job.text` and `settle`.

        Args:
          always: else None is returned where no text has ended, and nothing but counts travels to the host.
        """
        state = self._state
        rounds_B, finish_B, lengths_B = to_host((state.stats.rounds_B, state.finish_B, state.lengths_B))
        self._before_B, self._rounds_B = self._rounds_B, rounds_B.astype(int)
        is_running_B = np.array([ticket is not None for ticket in self.running])
        if always or (is_running_B & (finish_B != Finish.RUNNING)).any():
            return written(state)
        self.usage.add(self._rounds_B - self._before_B, 0, bool(self.waiting))
        for ticket, length in zip(self.running, lengths_B):
            if ticket is not None:
                ticket.emitted = int(length) - len(ticket.prompt)
        return None

    def settle(self, texts: Sequence[RowText | None]) -> list[tuple[Ticket, RowText]]:
        """Frees the rows of texts that have ended, and returns these.

        Args:
          texts: of each row, after a slice; None: it has none, or nobody wants it any more.
        """
        # A string that ended a text may have been found some rounds later.
        lost = [0 if text is None else rounds - text.stats.rounds for text, rounds in zip(texts, self._rounds_B)]
        self.usage.add(self._rounds_B - self._before_B, sum(lost), bool(self.waiting))
        unwanted = [ticket is not None and text is None for ticket, text in zip(self.running, texts)]
        if any(unwanted) or any(ticket is not None and ticket.job.stops.texts for ticket in self.running):
            is_stop_B = [text is not None and text.finish == Finish.STOP for text in texts]
            self._state = batch_rows.end(self._state, np.array(unwanted) | np.array(is_stop_B))
        ended = []
        for place, (ticket, text) in enumerate(zip(self.running, texts)):
            if ticket is None:
                continue
            if text is not None:
                ticket.emitted = len(text.tokens)
                if text.finish == Finish.RUNNING:
                    continue
                ended.append((ticket, text))
                self._schedule.finish(ticket)
            self.running[place] = None
        return ended

    def _begin(self) -> None:
        """Makes a state whose rows have all ended, unless there is one: one short prompt is read, and copied."""
        if self._state is None:
            shards, rows = self._job.pair.shards.count, len(self.running)
            self._state = self._job.read([[0]] * shards, self._request([None] * rows), rows // shards)

    def _take(self) -> None:
        """Gives free rows to waiting texts, equally many per data shard at a time: reads prompts, resumes preempted texts."""
        shards = self._job.pair.shards.count
        per_shard = len(self.running) // shards
        while self.waiting and None in self.running:
            tickets, at = [], []  # of one turn, and their places within each shard
            many = min(self.running.count(None), len(self.waiting)) >= self._together * shards
            width = self._together if many else self._refill
            for shard in range(shards):
                free = [n for n in range(per_shard) if self.running[shard * per_shard + n] is None]
                for n in (free + [NOWHERE] * width)[:width]:
                    able = self._able(self.waiting, shard) if n != NOWHERE else []
                    ticket = self._schedule.choose(able) if able else None
                    tickets.append(ticket)
                    at.append(NOWHERE if ticket is None else n)
                    if ticket is not None:
                        self.waiting.remove(ticket)
                        ticket.shard, place = shard, shard * per_shard + n
                        self.running[place] = ticket
                        self._rounds_B[place] = 0 if ticket.aside is None else ticket.aside.rounds
            if not any(tickets):  # who waits was put aside in another shard
                break
            newcomers = [None if ticket is None or ticket.aside else ticket for ticket in tickets]
            self.reading = [ticket for ticket in newcomers if ticket is not None]
            sizes = {0 if ticket is None else bucket(len(ticket.prompt)) for ticket in newcomers}
            for part in self._parts(width, is_one_call=len(sizes) == 1):
                if any(newcomers[index] for index in part):
                    self._read([newcomers[index] for index in part], [at[index] for index in part])
            self.reading = []
            for ticket, n in zip(tickets, at):
                if ticket is not None and ticket.aside:
                    aside, ticket.aside = ticket.aside, None
                    self._bring_back(aside, ticket, n)

    def _parts(self, width: int, is_one_call: bool) -> list[list[int]]:
        """Splits ``width`` newcomers per data shard into calls: one for all of them, or of as many as are refilled."""
        each = width if is_one_call else self._refill
        shards = range(self._job.pair.shards.count)
        return [
            [shard * width + index for shard in shards for index in range(start, start + each)]
            for start in range(0, width, each)
        ]

    def _read(self, newcomers: Sequence[Ticket | None], at: Sequence[int]) -> None:
        """Reads the prompts of newcomers and writes them over free rows, the same number in each data shard."""
        prompts = [[0] if ticket is None else ticket.prompt for ticket in newcomers]
        rows = self._job.read(prompts, self._request(newcomers))
        places = [NOWHERE if ticket is None else n for ticket, n in zip(newcomers, at)]
        self._state = batch_rows.insert(self._state, rows, places, self._job.loop.shards)

    def _put_aside(self) -> None:
        """Puts aside the texts that the schedule names, at most as many per data shard as are refilled at a time."""
        shards, waiting = self._job.pair.shards.count, list(self.waiting)
        per_shard, tickets, at = len(self.running) // shards, [], []
        for shard in range(shards):
            running = [one for one in self.running[shard * per_shard : (shard + 1) * per_shard] if one is not None]
            for _ in range(self._refill):
                able, ticket = self._able(waiting, shard), None
                if able and running:
                    newcomer = self._schedule.choose(able)
                    ticket = self._schedule.displace(newcomer, running)
                tickets.append(ticket)
                at.append(NOWHERE if ticket is None else self.running.index(ticket) - shard * per_shard)
                if ticket is not None:
                    waiting.remove(newcomer)
                    running.remove(ticket)
        if any(tickets):
            rows = self._extract(at)
            for index, ticket in enumerate(tickets):
                if ticket is not None:
                    place = self.running.index(ticket)
                    ticket.aside = Aside(rows=rows, index=index, rounds=int(self._rounds_B[place]))
                    self.running[place] = None
                    self.waiting.append(ticket)
                    self.usage.put_aside += 1

    def _extract(self, at: Sequence[int]) -> DecodeState:
        """Returns some rows, in host memory; they are still in the batch."""
        rows = batch_rows.extract(dataclasses.replace(self._state, request=None), at, self._job.loop.shards)
        return to_host_memory(rows, self._job.pair.shards)

    def _bring_back(self, aside: Aside, ticket: Ticket | None, n: int) -> None:
        """Writes a text that was put aside over the row ``n`` of its shard."""
        index = range(len(aside.rows.lengths_B))
        request = self._request([ticket if i == aside.index else None for i in index])
        rows = dataclasses.replace(to_device_memory(aside.rows, self._job.pair.shards), request=request)
        places = [n if i == aside.index else NOWHERE for i in index]
        self._state = batch_rows.insert(self._state, rows, places, self._job.loop.shards)

    def _able(self, waiting: list[Ticket], shard: int) -> list[Ticket]:
        """Returns those of ``waiting`` that can be decoded in a shard: no text that has begun leaves its own."""
        if not self._schedule.preempts:
            return waiting
        return [ticket for ticket in waiting if ticket.shard in (None, shard)]

    def _request(self, tickets: Sequence[Ticket | None]) -> RequestBatch:
        """Returns what is asked of some rows; of None, nothing."""
        asked = [(self._job, None) if ticket is None else (ticket.job, ticket.row) for ticket in tickets]
        parts = []
        for _, group in itertools.groupby(asked, key=lambda one: id(one[0])):
            jobs, rows = zip(*group)
            index_N = np.array([NOWHERE if row is None else row for row in rows], np.int32)
            parts.append(batch_rows.fit_request(_rows_of(jobs[0].request, index_N), self._job.request))
        return parts[0] if len(parts) == 1 else _concatenated(parts)


@jax.jit
def _rows_of(request: RequestBatch, index_N: jax.Array) -> RequestBatch:
    """Returns some rows of a request; `NOWHERE` is a row without a budget. Uncompiled, this takes a millisecond."""
    rows = jax.tree.map(lambda leaf: leaf[jnp.maximum(index_N, 0)], request)
    return dataclasses.replace(rows, limits_B=jnp.where(index_N == NOWHERE, 0, rows.limits_B))


@jax.jit
def _concatenated(parts: Sequence[RequestBatch]) -> RequestBatch:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
