"""Assigns the rows of a batch to requests: of one call (`generate_many`), or of many callers (`Service`).

The loop stays on the device until rows have ended. Their texts are fetched, the next prompts are read and written over
their rows, and the other rows go on unchanged (`specsamp.decoding.batch_rows`). One program is compiled for the loop, and
one for each bucket of prompts. Sampling, noise, budget and stop tokens of a row are data, so requests of different
callers share a batch and its programs.

A schedule says which request is decoded first (`specsamp.serving.schedule`). A preempted request waits in host memory for
a row of its own data shard, and goes on there with the same tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from specsamp import validate
from specsamp.decoding.batch_rows import NOWHERE
from specsamp.decoding.data_shards import DataShards
from specsamp.decoding.engine import Engine, bucket, to_host, without_caches
from specsamp.decoding.request import Request
from specsamp.decoding.results import RowText
from specsamp.decoding.state import DecodeState, Finish
from specsamp.serving.schedule import Schedule

LOST = 0.05  # the most of a row's rounds that pass between a string that ends its text and the next look for it


@dataclasses.dataclass
class Usage:
    """Counts the rounds in which rows were busy: in which they emitted tokens that are kept.

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

    def add(self, rounds: int, busy: int, in_demand: bool) -> None:
        """Counts a slice."""
        self.slices, self.rounds, self.busy = self.slices + 1, self.rounds + rounds, self.busy + busy
        if in_demand:
            self.rounds_in_demand, self.busy_in_demand = self.rounds_in_demand + rounds, self.busy_in_demand + busy


class Batch:
    """Holds the rows of a batch, the requests that they decode, and the requests that wait for them.

    A slice is `fill`, `run` and `collect`.

    Attributes:
      usage: of the rows so far.
      waiting: requests, in the order in which they began to wait; the caller adds to it.
      running: the request that each row decodes, or None.
      reading: where `fill` raised, the requests whose prompts it was reading; they are in ``running`` already.
    """

    def __init__(self, engine: Engine, *, rows: int, schedule: Schedule, together: int = 1):
        """Makes a batch without a state, which `fill` or `compile` begins.

        Args:
          rows: of the batch; rounded up to a multiple of the data shards.
          together: where so many rows of a data shard are free and prompts of one bucket wait for them, they are read
            in one call.
        """
        self._shards = engine.pair.shards
        self._per_shard = -(-rows // self._shards.count)
        rows = self._per_shard * self._shards.count
        self.usage = Usage(rows=rows)
        self.waiting: list[Request] = []
        self.running: list[Request | None] = [None] * rows
        self.reading: list[Request] = []
        self._engine = engine
        self._schedule = validate.instance("schedule", schedule, Schedule, "ShortestFirst()")
        self._together = min(together, self._per_shard)
        self._state: DecodeState | None = None
        self._ended = self._rounds_of_ended = 0  # texts, and their rounds

    def compile(self, prompts: Iterable[Sequence[int]]) -> None:
        """Compiles the programs that read and decode these prompts, so that decoding can be timed."""
        self._begin()
        nowhere, compiled = [NOWHERE] * self._shards.count, set()
        for prompt in prompts:
            if bucket(len(prompt)) in compiled:
                continue
            compiled.add(bucket(len(prompt)))
            request = dataclasses.replace(self._engine.idle, prompt=tuple(prompt), max_new_tokens=0)
            for width in {1, self._together}:
                rows = self._engine.prefill([request] * (width * self._shards.count))
                self._state = self._engine.insert(self._state, rows, nowhere * width)
        if self._schedule.preempts:
            self._put_back(self._put_aside(nowhere), [None] * self._shards.count, nowhere)
        if self._engine.loop.keep_rounds:  # strings may end texts, and `collect` their rows
            self._state = self._engine.end(self._state, ())
        self._state = self._engine.run(self._state, 0)
        jax.block_until_ready(self._state.lengths_B)

    def free(self) -> None:
        """Gives the memory of the caches back; nothing may be running."""
        self._state = None

    def fill(self) -> None:
        """Gives free rows to waiting requests, then preempts running requests for the rest."""
        self._begin()
        self._admit()
        if self._schedule.preempts and self.waiting:
            self._preempt()
            self._admit()

    def run(self, max_rounds: int) -> None:
        """Starts a slice: until as many rows have ended as there are data shards, and for at most ``max_rounds``.

        A string that ends a text is found half a slice late, on average, so slices are short where such texts are.
        """
        requests = [request for request in self.running if request is not None]
        if any(request.stops.texts for request in requests):
            max_rounds = min(max_rounds, self._engine.rounds_per_look(requests))
            if self._ended:
                max_rounds = min(max_rounds, 1 + int(2 * LOST * self._rounds_of_ended / self._ended))
        self._state = self._engine.run(self._state, max_rounds, max(len(requests) - self._shards.count + 1, 1))

    def collect(
        self, read: Callable[[DecodeState, int, Request], RowText | None], always: bool = False
    ) -> list[tuple[Request, RowText | None]]:
        """Waits for the end of a slice, and frees the rows of requests that have ended.

        Args:
          read: returns the text in a row of a state, as `Engine.text` does; None frees the row.
          always: whether texts are read where no row has ended and no string ends texts; else only counts travel to the
            host then.

        Returns:
          The requests that were running, with their texts; nothing where no text was read.
        """
        stats = to_host((self._state.stats.rounds_B, self._state.finish_B, self._state.lengths_B))
        rounds_B, finish_B, lengths_B = (array.tolist() for array in stats)
        running = [(place, request) for place, request in enumerate(self.running) if request is not None]
        rounds = [rounds_B[place] - request.rounds for place, request in running]
        for place, request in running:
            request.rounds, request.emitted = rounds_B[place], lengths_B[place] - len(request.prompt)
        found, lost, late = [], 0, np.zeros(len(self.running), bool)
        if always or any(finish_B[place] != Finish.RUNNING or request.stops.texts for place, request in running):
            state = to_host(without_caches(self._state))
            found = [(request, read(state, place, request)) for place, request in running]
        for (place, _), (request, text) in zip(running, found):
            if text is not None:
                request.emitted = len(text.tokens)
                if text.finish == Finish.RUNNING:
                    continue
                self._ended, self._rounds_of_ended = self._ended + 1, self._rounds_of_ended + text.stats.rounds
                lost += request.rounds - text.stats.rounds
                self._schedule.finish(request)
            self.running[place], late[place] = None, finish_B[place] == Finish.RUNNING
        if late.any():
            self._state = self._engine.end(self._state, late)
        self.usage.add(max(rounds), sum(rounds) - lost, bool(self.waiting))
        return found

    def _begin(self) -> None:
        """Makes a state whose rows have all ended, unless there is a state."""
        if self._state is None:
            self._state = self._engine.prefill([None] * len(self.running), self._per_shard)

    def _admit(self) -> None:
        """Gives free rows to waiting requests, one per data shard in a turn: reads prompts, resumes preempted requests."""
        while self.waiting and None in self.running:
            free = min(self.running.count(None), len(self.waiting))
            count = self._together if free >= self._together * self._shards.count else 1
            turns = [self._take_turn() for _ in range(count)]
            taken = [place for turn in turns for place in turn if place is not None]
            if not taken:  # the waiting requests were preempted in another shard
                break
            preempted = [place for place in taken if self.running[place].preempted is not None]
            self.reading = [self.running[place] for place in taken if place not in preempted]
            is_one_bucket = len({bucket(len(request.prompt)) for request in self.reading}) == 1
            for call in [turns] if is_one_bucket else [[turn] for turn in turns]:
                by_shard = [place for column in zip(*call) for place in column]
                places = [None if place in preempted else place for place in by_shard]
                if any(place is not None for place in places):
                    rows = self._engine.prefill([None if place is None else self.running[place] for place in places])
                    self._state = self._engine.insert(self._state, rows, self._in_shards(places))
            self.reading = []
            for place in preempted:
                request, places = self.running[place], [None] * self._shards.count
                rows, request.preempted, places[request.shard] = request.preempted, None, place
                requests = [None if place is None else request for place in places]
                self._put_back(rows, requests, self._in_shards(places))

    def _take_turn(self) -> list[int | None]:
        """Gives a row of each data shard to a waiting request; returns the rows, None where no row or request is left."""
        turn: list[int | None] = []
        for shard in range(self._shards.count):
            place = next((place for place in self._places(shard) if self.running[place] is None), None)
            able = self._able(self.waiting, shard)
            if place is None or not able:
                turn.append(None)
                continue
            request = self._schedule.choose(able)
            request.shard, self.running[place] = shard, request  # first: others count texts at any moment
            self.waiting.remove(request)
            turn.append(place)
        return turn

    def _preempt(self) -> None:
        """Moves the requests that the schedule names to host memory, at most one of each data shard."""
        waiting, places = list(self.waiting), []
        for shard in range(self._shards.count):
            running = [self.running[place] for place in self._places(shard) if self.running[place] is not None]
            able, request = self._able(waiting, shard), None
            if able and running:
                newcomer = self._schedule.choose(able)
                request = self._schedule.displace(newcomer, running)
            if request is not None:
                waiting.remove(newcomer)
            places.append(None if request is None else self.running.index(request))
        taken = [place for place in places if place is not None]
        if taken:
            rows = self._put_aside(self._in_shards(places))
        for place in taken:
            request, self.running[place] = self.running[place], None
            request.preempted = rows
            self.waiting.append(request)
            self.usage.preempted += 1

    def _put_aside(self, at: Sequence[int]) -> DecodeState:
        """Returns one row of each data shard, in host memory; they are still in the batch."""
        return to_host_memory(self._engine.extract(self._state, at), self._shards)

    def _put_back(self, rows: DecodeState, requests: Sequence[Request | None], at: Sequence[int]) -> None:
        """Writes rows that were put aside over rows of the batch, and gives them the arrays of their requests."""
        rows = dataclasses.replace(to_device_memory(rows, self._shards), request=self._engine.arrays(requests))
        self._state = self._engine.insert(self._state, rows, at)

    def _places(self, shard: int) -> range:
        """Returns the rows of a data shard."""
        return range(shard * self._per_shard, (shard + 1) * self._per_shard)

    def _in_shards(self, places: Sequence[int | None]) -> list[int]:
        """Returns the places of rows within their data shards."""
        return [NOWHERE if place is None else place % self._per_shard for place in places]

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
