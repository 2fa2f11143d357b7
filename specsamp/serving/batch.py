"""Assigns the rows of a batch to requests: of one call (`generate_many`), or of many callers (`Service`).

The loop stays on the device until rows have ended. Their texts are fetched, the next prompts are read and written over
their rows, and the other rows go on unchanged (`specsamp.decoding.batch_rows`). One program is compiled for the loop, and
one for each bucket of prompts. Sampling, noise, budget and stop tokens of a row are data, so requests of different
callers share a batch and its programs. Requests are decoded in the order in which they came.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from specsamp.decoding.batch_rows import NOWHERE
from specsamp.decoding.drafters import ModelDrafter
from specsamp.decoding.engine import Engine, bucket, to_host, without_caches
from specsamp.decoding.method import Method
from specsamp.decoding.request import Request
from specsamp.decoding.results import RowText
from specsamp.decoding.state import DecodeState, Finish

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
    """

    rows: int
    slices: int = 0
    rounds: int = 0
    busy: int = 0
    rounds_in_demand: int = 0
    busy_in_demand: int = 0

    @property
    def occupancy(self) -> float:
        """Returns the share of rows that were busy while requests were waiting; nan if none ever waited."""
        return self.busy_in_demand / (self.rows * self.rounds_in_demand) if self.rounds_in_demand else float("nan")

    def add(self, rounds: int, busy: int, in_demand: bool) -> None:
        """Counts a slice."""
        self.slices, self.rounds, self.busy = self.slices + 1, self.rounds + rounds, self.busy + busy
        if in_demand:
            self.rounds_in_demand, self.busy_in_demand = self.rounds_in_demand + rounds, self.busy_in_demand + busy


Learner = Callable[[Sequence[int]], Any]  # takes a whole text; returns new parameters of the draft, or None


def check_learner(learner: Learner | None, method: Method) -> None:
    """Raises ValueError where no parameters of a draft model could learn."""
    if learner is not None and not isinstance(method.drafter, ModelDrafter):
        raise ValueError(
            f"learner was given, but {type(method.drafter).__name__} has no draft model of its own: take ModelDrafter"
        )


class Batch:
    """Holds the rows of a batch, the requests that they decode, and the requests that wait for them.

    A slice is `fill`, `run` and `collect`.

    Attributes:
      usage: of the rows so far.
      waiting: requests, in the order in which they began to wait; the caller adds to it.
      running: the request that each row decodes, or None.
    """

    def __init__(self, engine: Engine, *, rows: int, together: int = 1):
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
        self._engine = engine
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
        if self._engine.loop.keep_rounds:  # strings may end texts, and `collect` their rows
            self._state = self._engine.end(self._state, ())
        self._state = self._engine.run(self._state, 0)
        jax.block_until_ready(self._state.lengths_B)

    def learn(self, learner: Learner, request: Request, text: RowText) -> None:
        """Hands a text that has ended to a learner, and takes the parameters that it returns."""
        params = learner((*request.prompt, *text.tokens))
        if params is not None:
            self.set_draft(params)

    def set_draft(self, params: Any) -> None:
        """Takes other parameters of the draft, between two slices."""
        self._engine = self._engine.with_draft(params)

    def free(self) -> None:
        """Gives the memory of the caches back; nothing may be running."""
        self._state = None

    def fill(self) -> None:
        """Gives free rows to waiting requests, one per data shard in a turn, and reads their prompts."""
        self._begin()
        while self.waiting and None in self.running:
            free = min(self.running.count(None), len(self.waiting))
            count = self._together if free >= self._together * self._shards.count else 1
            turns = [self._take_turn() for _ in range(count)]
            taken = [self.running[place] for turn in turns for place in turn if place is not None]
            is_one_bucket = len({bucket(len(request.prompt)) for request in taken}) == 1
            for call in [turns] if is_one_bucket else [[turn] for turn in turns]:
                places = [place for column in zip(*call) for place in column]
                rows = self._engine.prefill([None if place is None else self.running[place] for place in places])
                in_shards = [NOWHERE if place is None else place % self._per_shard for place in places]
                self._state = self._engine.insert(self._state, rows, in_shards)

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
        stats = to_host((self._state.stats.rounds_B, self._state.finish_B))
        rounds_B, finish_B = (array.tolist() for array in stats)
        running = [(place, request) for place, request in enumerate(self.running) if request is not None]
        rounds = [rounds_B[place] - request.rounds for place, request in running]
        for place, request in running:
            request.rounds = rounds_B[place]
        found, lost, late = [], 0, np.zeros(len(self.running), bool)
        if always or any(finish_B[place] != Finish.RUNNING or request.stops.texts for place, request in running):
            state = to_host(without_caches(self._state))
            found = [(request, read(state, place, request)) for place, request in running]
        for (place, _), (request, text) in zip(running, found):
            if text is not None:
                if text.finish == Finish.RUNNING:
                    continue
                self._ended, self._rounds_of_ended = self._ended + 1, self._rounds_of_ended + text.stats.rounds
                lost += request.rounds - text.stats.rounds
            self.running[place], late[place] = None, finish_B[place] == Finish.RUNNING
        if late.any():
            self._state = self._engine.end(self._state, late)
        self.usage.add(max(rounds), sum(rounds) - lost, bool(self.waiting))
        return found

    def _begin(self) -> None:
        """Makes a state whose rows have all ended, unless there is a state."""
        if self._state is None:
            self._state = self._engine.prefill([None] * len(self.running), self._per_shard)

    def _take_turn(self) -> list[int | None]:
        """Gives a row of each data shard to a waiting request; returns the rows, None where no row or request is left."""
        turn: list[int | None] = []
        for shard in range(self._shards.count):
            places = range(shard * self._per_shard, (shard + 1) * self._per_shard)
            place = next((place for place in places if self.running[place] is None), None)
            if place is None or not self.waiting:
                turn.append(None)
                continue
            self.running[place] = self.waiting[0]  # first: others count texts at any moment
            del self.waiting[0]
            turn.append(place)
        return turn
