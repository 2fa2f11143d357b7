"""The rows of a batch and the requests that they decode: all of a call (`generate_many`), or requests as they come (`Service`).

The loop stays on the device until rows have ended. What they wrote is fetched, the next prompts are read and written over
their rows, and the other rows go on as if nothing had happened (`specsamp.decoding.batch_rows`). A program is compiled
for the loop, and one for each bucket of prompts. All that is asked of a row (sampling, noise, budget, stop tokens) is
data, so requests of different callers share a batch and its programs.

A schedule says which request is decoded first (`specsamp.serving.schedule`). A preempted request waits in host memory for
a row of its own data shard, and goes on there with the same tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from specsamp.decoding.batch_rows import NOWHERE
from specsamp.decoding.data_shards import DataShards
from specsamp.decoding.engine import Engine, bucket, to_host, without_caches
from specsamp.decoding.request import Request
from specsamp.decoding.results import RowText
from specsamp.decoding.state import DecodeState, Finish
from specsamp.serving.schedule import Schedule


@dataclasses.dataclass
class Usage:
    """Counts of rounds in which the rows of a batch were busy; a row is busy in a round in which it emits something that is kept.

    Attributes:
      rows: of the batch.
      slices: runs of the loop.
      rounds: of the loop.
      busy: the sum over rounds of the rows that were busy.
      rounds_in_demand, busy_in_demand: the same, of slices at whose end requests were waiting.
      preempted: how often a request was preempted.
    """

    rows: int
    slices: int = 0
    rounds: int = 0
    busy: int = 0
    rounds_in_demand: int = 0
    busy_in_demand: int = 0
    preempted: int = 0

    @property
    def occupancy(self) -> float:
        """Returns the share of rows that were busy while requests were waiting; nan if none ever waited."""
        return self.busy_in_demand / (self.rows * self.rounds_in_demand) if self.rounds_in_demand else float("nan")

    def add(self, rounds_B: np.ndarray, lost: int, in_demand: bool) -> None:
        """Counts a slice in which the rows emitted for ``rounds_B`` rounds, ``lost`` of which are not kept."""
        rounds, busy = int(rounds_B.max()), int(rounds_B.sum()) - int(lost)
        self.slices, self.rounds, self.busy = self.slices + 1, self.rounds + rounds, self.busy + busy
        if in_demand:
            self.rounds_in_demand, self.busy_in_demand = self.rounds_in_demand + rounds, self.busy_in_demand + busy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preempted:
    """Rows in host memory; row ``index`` is the request's, and ``rounds`` of it are counted already."""

    rows: DecodeState
    index: int
    rounds: int


class Batch:
    """Holds the rows of a batch, the requests that they decode, and the requests that wait for them.

    A slice is `fill`, `run`, `fetch`, and, if that has returned a state, `settle`.

    Attributes:
      usage: of the rows so far.
      waiting: requests, in the order in which they began to wait; the caller adds to it.
      running: the request that each row decodes, or None.
      reading: where `fill` raised, the requests whose prompts it was reading; they are in ``running`` already.
    """

    def __init__(self, engine: Engine, *, rows: int, refill: int, schedule: Schedule, together: int = 1):
        """Makes a batch without a state, which `fill` or `compile` begins.

        Args:
          rows: of the batch; rounded up to a multiple of the data shards.
          refill: rows of a data shard whose prompts are read in one call; `run` returns once so many have ended.
          together: where so many rows of a data shard are free and prompts of one bucket wait for them, they are read
            in one call.
        """
        self._shards = engine.pair.shards
        rows = -(-rows // self._shards.count) * self._shards.count
        self.usage = Usage(rows=rows)
        self.waiting: list[Request] = []
        self.running: list[Request | None] = [None] * rows
        self.reading: list[Request] = []
        self._engine, self._schedule = engine, schedule
        self._per_shard = rows // self._shards.count
        self._refill = min(refill, self._per_shard)
        self._together = max(min(together, self._per_shard) // self._refill, 1) * self._refill
        self._state: DecodeState | None = None
        self._rounds_B = np.zeros(rows, int)  # that each of the requests has been busy for
        self._before_B = self._rounds_B  # the slice

    def compile(self, prompts: Iterable[Sequence[int]], texts_end_late: bool) -> None:
        """Compiles what reads and decodes these prompts, so that what follows can be timed.

        Args:
          texts_end_late: whether `settle` will end rows, such as rows whose texts a string ends.
        """
        self._begin()
        compiled = set()
        for prompt in prompts:
            if bucket(len(prompt)) in compiled:
                continue
            compiled.add(bucket(len(prompt)))
            request = dataclasses.replace(self._engine.idle, prompt=tuple(prompt), max_new_tokens=0)
            for width in {self._refill, self._together}:
                rows = self._engine.prefill([request] * (width * self._shards.count))
                self._state = self._engine.insert(self._state, rows, [NOWHERE] * (width * self._shards.count))
        if self._schedule.preempts:
            places = [NOWHERE] * (self._refill * self._shards.count)
            self._resume(Preempted(rows=self._extract(places), index=NOWHERE, rounds=0), None, NOWHERE)
        if texts_end_late:
            self._state = self._engine.end(self._state, ())
        self._state = self._engine.run(self._state, 0)
        jax.block_until_ready(self._state.lengths_B)

    def free(self) -> None:
        """Gives the memory of the caches back; nothing may be running."""
        self._state, self._rounds_B = None, np.zeros_like(self._rounds_B)  # a state begins without rounds

    def fill(self) -> None:
        """Gives free rows to waiting requests, then preempts running requests for those that are still waiting."""
        self._begin()
        self._admit()
        if self._schedule.preempts and self.waiting:
            self._preempt()
            self._admit()

    def run(self, max_rounds: int) -> None:
        """Starts a slice: until as many rows have ended as are refilled at a time, and for at most ``max_rounds``."""
        busy = sum(request is not None for request in self.running)
        self._state = self._engine.run(self._state, max_rounds, max(busy - self._refill * self._shards.count + 1, 1))

    def fetch(self, always: bool) -> DecodeState | None:
        """Waits for the end of a slice and returns what was written so far, for `Engine.text` and `settle`.

        Args:
          always: else None is returned where no row has ended, and nothing but counts travels to the host.
        """
        state = self._state
        rounds_B, finish_B, lengths_B = to_host((state.stats.rounds_B, state.finish_B, state.lengths_B))
        self._before_B, self._rounds_B = self._rounds_B, rounds_B.astype(int)
        is_running_B = np.array([request is not None for request in self.running])
        if always or (is_running_B & (finish_B != Finish.RUNNING)).any():
            return to_host(without_caches(state))
        self.usage.add(self._rounds_B - self._before_B, 0, bool(self.waiting))
        for request, length in zip(self.running, lengths_B):
            if request is not None:
                request.emitted = int(length) - len(request.prompt)
        return None

    def settle(self, texts: Sequence[RowText | None]) -> list[tuple[Request, RowText]]:
        """Frees the rows of requests that have ended, and returns these.

        Args:
          texts: of each row, after a slice; None: it decodes nothing, or its caller has left.
        """
        # A string that ended a text may have been found some rounds later.
        lost = [0 if text is None else rounds - text.stats.rounds for text, rounds in zip(texts, self._rounds_B)]
        self.usage.add(self._rounds_B - self._before_B, sum(lost), bool(self.waiting))
        unwanted = [request is not None and text is None for request, text in zip(self.running, texts)]
        if any(unwanted) or any(request is not None and request.stops.texts for request in self.running):
            is_stopped = [text is not None and text.finish == Finish.STOP for text in texts]
            self._state = self._engine.end(self._state, np.array(unwanted) | np.array(is_stopped))
        ended = []
        for place, (request, text) in enumerate(zip(self.running, texts)):
            if request is None:
                continue
            if text is not None:
                request.emitted = len(text.tokens)
                if text.finish == Finish.RUNNING:
                    continue
                ended.append((request, text))
                self._schedule.finish(request)
            self.running[place] = None
        return ended

    def _begin(self) -> None:
        """Makes a state whose rows have all ended, unless there is a state: one short prompt is read, and copied."""
        if self._state is None:
            self._state = self._engine.prefill([None] * len(self.running), self._per_shard)

    def _admit(self) -> None:
        """Gives free rows to waiting requests, equally many per data shard at a time: reads prompts, resumes rows."""
        shards = self._shards.count
        while self.waiting and None in self.running:
            requests, at = [], []  # of one turn, and their places within each shard
            many = min(self.running.count(None), len(self.waiting)) >= self._together * shards
            width = self._together if many else self._refill
            for shard in range(shards):
                first = shard * self._per_shard
                free = [n for n in range(self._per_shard) if self.running[first + n] is None]
                for n in (free + [NOWHERE] * width)[:width]:
                    able = self._able(self.waiting, shard) if n != NOWHERE else []
                    request = self._schedule.choose(able) if able else None
                    requests.append(request)
                    at.append(NOWHERE if request is None else n)
                    if request is not None:
                        self.waiting.remove(request)
                        request.shard, self.running[first + n] = shard, request
                        self._rounds_B[first + n] = 0 if request.preempted is None else request.preempted.rounds
            if not any(requests):  # the waiting requests were preempted in another shard
                break
            newcomers = [None if request is None or request.preempted else request for request in requests]
            self.reading = [request for request in newcomers if request is not None]
            sizes = {0 if request is None else bucket(len(request.prompt)) for request in newcomers}
            for part in self._parts(width, is_one_call=len(sizes) == 1):
                if any(newcomers[index] for index in part):
                    rows = self._engine.prefill([newcomers[index] for index in part])
                    places = [NOWHERE if newcomers[index] is None else at[index] for index in part]
                    self._state = self._engine.insert(self._state, rows, places)
            self.reading = []
            for request, n in zip(requests, at):
                if request is not None and request.preempted:
                    preempted, request.preempted = request.preempted, None
                    self._resume(preempted, request, n)

    def _parts(self, width: int, is_one_call: bool) -> list[list[int]]:
        """Splits ``width`` newcomers per data shard into calls: one for all of them, or of as many as are refilled."""
        each = width if is_one_call else self._refill
        shards = range(self._shards.count)
        return [
            [shard * width + index for shard in shards for index in range(start, start + each)]
            for start in range(0, width, each)
        ]

    def _preempt(self) -> None:
        """Moves the requests that the schedule names to host memory, per data shard at most as many as are refilled."""
        waiting, requests, at = list(self.waiting), [], []
        for shard in range(self._shards.count):
            first = shard * self._per_shard
            running = [request for request in self.running[first : first + self._per_shard] if request is not None]
            for _ in range(self._refill):
                able, request = self._able(waiting, shard), None
                if able and running:
                    newcomer = self._schedule.choose(able)
                    request = self._schedule.displace(newcomer, running)
                requests.append(request)
                at.append(NOWHERE if request is None else self.running.index(request) - first)
                if request is not None:
                    waiting.remove(newcomer)
                    running.remove(request)
        if not any(requests):
            return
        rows = self._extract(at)
        for index, request in enumerate(requests):
            if request is not None:
                place = self.running.index(request)
                request.preempted = Preempted(rows=rows, index=index, rounds=int(self._rounds_B[place]))
                self.running[place] = None
                self.waiting.append(request)
                self.usage.preempted += 1

    def _extract(self, at: Sequence[int]) -> DecodeState:
        """Returns some rows, in host memory; they are still in the batch."""
        return to_host_memory(self._engine.extract(self._state, at), self._shards)

    def _resume(self, preempted: Preempted, request: Request | None, n: int) -> None:
        """Writes a preempted request's row over the row ``n`` of its shard."""
        index = range(len(preempted.rows.lengths_B))
        arrays = self._engine.arrays([request if i == preempted.index else None for i in index])
        rows = dataclasses.replace(to_device_memory(preempted.rows, self._shards), request=arrays)
        places = [n if i == preempted.index else NOWHERE for i in index]
        self._state = self._engine.insert(self._state, rows, places)

    def _able(self, waiting: list[Request], shard: int) -> list[Request]:
        """Returns the waiting requests that a shard can decode: a request that has begun never leaves its shard."""
        if not self._schedule.preempts:
            return waiting
        return [request for request in waiting if request.shard in (None, shard)]


def to_host_memory(rows: DecodeState, shards: DataShards) -> DecodeState:
    """Moves ``rows``, which were extracted from a batch, to host memory; each device copies its part to its own host."""
    if shards.mesh is None:
        return jax.device_get(rows)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host")), rows)


def to_device_memory(rows: DecodeState, shards: DataShards) -> DecodeState:
    """Moves ``rows`` back to the devices that they came from."""
    if shards.mesh is None:
        return jax.tree.map(jax.numpy.asarray, rows)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind(None)), rows)
