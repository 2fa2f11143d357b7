"""Assigns the rows of a batch to requests: of one call (`generate_many`), or of many callers
(`Service`).

The loop stays on the device until rows have ended. Their texts are fetched, the next prompts are
read and written over their rows, and the other rows stay unchanged
(`specsamp.decoding.batch_rows`). Sampling, noise, budget and stop tokens of a row are data, so
requests of different callers share a batch and its programs. Requests are decoded in order of
arrival.

The batch of a call has all its rows from the start. The batch of a service follows its requests: a
lone text is not decoded at the cost of all rows, nor a short text at the cost of the whole context.
Rows per data shard and slots are powers of two. A size is compiled on first use, in the background,
while decoding continues in the present size; a text that outgrows its slots meanwhile is preempted.

A prompt of any length is read by the same few programs; in a service in chunks, between slices. A
prefix that a row's cache already holds is copied instead of read. The memory of a batch is that of
its rows, of the rows that are being read, and of both sizes during a change of size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from specsamp.decoding.batch_rows import NOWHERE
from specsamp.decoding.engine import MANY_ROUNDS, Engine, count_known, to_host, without_caches
from specsamp.decoding.request import Request
from specsamp.decoding.results import RowText
from specsamp.decoding.state import DecodeState, Finish
from specsamp.serving.background import Background, Chunks, Resize, ScoreChunks, Size
from specsamp.serving.learner import Learner
from specsamp.serving.scores import Scores, score

SMALLEST_SLOTS = 256
PATIENCE = 16  # number of slices that fit a smaller batch before it shrinks
LEAST_COPIED = 4  # tokens; shorter prefixes are read again, which is faster
# The most rounds of a row between a stop string and its discovery.
LOST = 0.05


@dataclasses.dataclass
class Usage:
    """Counts the rounds in which rows were busy: in which they emitted tokens that are kept.

    Attributes:
      rows: number of rows of the batch.
      slices: number of runs of the loop.
      rounds: number of rounds of the loop.
      busy: the sum over rounds of the busy rows.
    """

    rows: int
    slices: int = 0
    rounds: int = 0
    busy: int = 0

    def add(self, rounds: int, busy: int) -> None:
        """Counts a slice."""
        self.slices, self.rounds, self.busy = (
            self.slices + 1,
            self.rounds + rounds,
            self.busy + busy,
        )


class Batch:
    """The rows of a batch, their requests, and the queue.

    A slice is `fill`, `run` and `collect`.

    Attributes:
      usage: counts of the rows.
      waiting: the queue of requests; the caller adds to it.
      reading: requests whose prompts are being read.
      running: the request that each row decodes, or None.
      size: the present size.
      programs: the compiled programs: each `Size`, `Resize`, `Chunks` and `ScoreChunks`.
      tokens_read, tokens_copied: numbers of prompt tokens.
      outgrown: number of texts that were preempted for more slots.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        rows: int,
        rounds: int | None = None,
        in_background: bool = False,
        together: int = 1,
    ):
        """Makes a batch without a state, which `fill` begins.

        Args:
          engine: for the most slots.
          rows: the most rows; rounded up to a multiple of the data shards.
          rounds: the most rounds of a slice. None: the size is always the largest, and prompts are
            read whole.
          in_background: whether sizes are compiled during decoding.
          together: number of prompts that are read in one call, per data shard.
        """
        self._shards, self._engine, self._rounds = engine.pair.shards, engine, rounds
        most = -(-rows // self._shards.count)
        self.usage = Usage(rows=most * self._shards.count)
        self.tokens_read = self.tokens_copied = self.outgrown = 0
        self.waiting: list[Request] = []
        self.reading: list[Request] = []
        self.programs = Background(self._compile, in_thread=in_background)
        self._all_rows = (most,) if rounds is None else powers(1, most)
        self._all_slots = (
            (engine.slots,) if rounds is None else powers(SMALLEST_SLOTS, engine.slots)
        )
        # From small to large.
        self._sizes = [Size(rows, slots) for slots in self._all_slots for rows in self._all_rows]
        self._chunks = tuple(min(size, self._all_slots[0]) for size in chunk_sizes())
        # Rows of each data shard that are read together.
        self._widths = sorted({1, min(together, self._all_rows[0])})
        self._engines = {engine.slots: engine}
        self._draft_params: Any = None  # other than the pair's
        self._state: DecodeState | None = None
        self._reader: Iterator[int] | None = None  # the reader of these requests' prompts
        # Shards and states of preempted texts.
        self._aside: dict[Request, tuple[int, DecodeState]] = {}
        self._lengths: dict[Request, int] = {}  # lengths of running texts with their prompts
        # The tokens of each row, the last used row last.
        self._held: dict[int, tuple[int, ...]] = {}
        # Rows from before the last update of the draft, see `learn`.
        self._not_copied: set[Request | None] = set()
        self._calm = 0  # number of slices that fit a smaller size
        self._ended = self._rounds_of_ended = 0  # finished texts and their rounds
        self._lay_out(self._sizes[0])

    @property
    def busy(self) -> int:
        """Returns the number of rows that decode a text."""
        return len(self.running) - self.running.count(None)

    def compile(self) -> None:
        """Compiles the smallest size; larger sizes are compiled on first use."""
        self._with_slots(self._sizes[0].slots)  # once, before two threads read it
        # On a mesh in one order.
        with ThreadPoolExecutor(2 if self._shards.mesh is None else 1) as threads:
            list(threads.map(self.programs.make, (self._sizes[0], Chunks(self._sizes[0].slots))))

    def fill(self) -> None:
        """Fits the size, gives free rows to queued requests, and reads their prompts, at most two
        chunks in a slice.
        """
        self._begin()
        if not self.reading:
            self._fit()
        allowance = math.inf if self._rounds is None else 2 * self._chunks[-1]
        while self.reading or self._take_next():
            if self.reading:
                allowance -= next(self._reader)
            if not self.reading:
                self._reader = None  # and the memory of its rows
            if allowance <= 0 and any(self.running):
                return

    def run(self) -> None:
        """Starts a slice: until as many rows have ended as there are data shards, or its rounds are
        over.

        A stop string is found half a slice late, on average, so slices are short while a request
        has one.
        """
        requests = [request for request in self.running if request is not None]
        max_rounds = MANY_ROUNDS if self._rounds is None else self._rounds
        if any(request.stops.texts for request in requests):
            max_rounds = min(max_rounds, self._engine.rounds_per_look(requests))
            if self._ended:
                max_rounds = min(
                    max_rounds, 1 + int(2 * LOST * self._rounds_of_ended / self._ended)
                )
        self._state = self._engine.run(
            self._state, max_rounds, max(len(requests) - self._shards.count + 1, 1)
        )

    def collect(
        self, read: Callable[[DecodeState, int, Request], RowText | None], always: bool = False
    ) -> list[tuple[Request, RowText | None]]:
        """Waits for the end of a slice, and frees the rows of requests that have ended.

        Args:
          read: returns the text in a row of a state, as `Engine.text` does; None frees the row.
          always: whether texts are read although no row has ended and no request has stop strings;
            otherwise only counts are copied to the host then.

        Returns:
          The requests that were running, with their texts; nothing if no text was read.
        """
        stats = to_host((self._state.stats.rounds_B, self._state.finish_B, self._state.lengths_B))
        rounds_B, finish_B, lengths_B = (array.tolist() for array in stats)
        held_B = self._engine.num_held(self._state).tolist()
        running = [
            (place, request) for place, request in enumerate(self.running) if request is not None
        ]
        self._lengths = {request: self._lengths[request] for request in self._aside}
        rounds = [rounds_B[place] - request.rounds for place, request in running]
        for place, request in running:
            request.rounds, self._lengths[request] = rounds_B[place], lengths_B[place]
            # Before its first round a row cannot be extended: heads keep a chunk's last feature.
            if request.rounds:
                self._hold(place, request.prompt[: held_B[place]])
        found, lost, late = [], 0, np.zeros(len(self.running), bool)
        if always or any(
            finish_B[place] != Finish.RUNNING or request.stops.texts for place, request in running
        ):
            state = to_host(without_caches(self._state))
            found = [(request, read(state, place, request)) for place, request in running]
        for (place, _), (request, text) in zip(running, found):
            if text is not None:
                self._hold(place, (*request.prompt, *text.tokens)[: held_B[place]])
                if text.finish == Finish.RUNNING:
                    continue
                self._ended, self._rounds_of_ended = (
                    self._ended + 1,
                    self._rounds_of_ended + text.stats.rounds,
                )
                lost += request.rounds - text.stats.rounds
            self.running[place], late[place] = None, finish_B[place] == Finish.RUNNING
            if text is None or text.finish == Finish.INVALID:  # its caches may hold NaN
                self._empty(place)
        if late.any():
            self._state = self._engine.end(self._state, late)
        self.usage.add(max(rounds), sum(rounds) - lost)
        return found

    def learn(self, learner: Learner, tokens: Sequence[int]) -> None:
        """Calls a learner with a finished text, and uses the draft parameters that it returns."""
        params = learner(tokens)
        if params is not None:
            self._draft_params, self._engine = params, self._engine.with_draft(params)
            # Other sizes are compiled on first use.
            self._engines = {self._engine.slots: self._engine}
            # Rows keep the draft's caches of former parameters. That is exact, since a proposal is
            # verified with the probabilities it was drawn with. But if they were copied on and on,
            # the caches would never be renewed.
            self._held.clear()
            self._not_copied = {*self.running, *self.reading, *self._aside}

    def free(self) -> None:
        """Frees the memory of the caches; nothing may be running."""
        self._state = None
        self._lay_out(self._sizes[0])

    def unread(self) -> list[Request]:
        """Stops reading prompts, and returns their requests."""
        self._reader, requests, self.reading = None, self.reading, []
        return requests

    # The size.

    def _lay_out(self, size: Size) -> None:
        """Sets the size of an empty batch."""
        self.size, self._per_shard = size, size.rows
        self.running = [None] * (size.rows * self._shards.count)
        self._held.clear()
        self.unread()

    def _begin(self) -> None:
        if self._state is None:
            self._engine = self._with_slots(self.size.slots)
            self._state = self._engine.blank(len(self.running))

    def _with_slots(self, slots: int) -> Engine:
        engines = self._engines  # `learn` may replace them during compilation
        if slots not in engines:
            engine = self._engine.with_slots(slots)
            engines[slots] = (
                engine if self._draft_params is None else engine.with_draft(self._draft_params)
            )
        return engines[slots]

    def _slots_for(self, request: Request) -> int:
        """Returns the fewest slots in which a request can be decoded for another slice."""
        if self._rounds is None:
            return self._all_slots[-1]
        slice_tokens = self._rounds * (self._engine.loop.depth + 1)
        tokens = min(request.limit, self._lengths.get(request, len(request.prompt)) + slice_tokens)
        needed = max(
            tokens + max(self._engine.loop.headroom, self._chunks[0]), self._engine.loop.window
        )
        return next((slots for slots in self._all_slots if slots >= needed), self._all_slots[-1])

    def _size_for(self, requests: Sequence[Request]) -> Size:
        per_shard = -(-len(requests) // self._shards.count)
        rows = next((rows for rows in self._all_rows if rows >= per_shard), self._all_rows[-1])
        return Size(rows, max(map(self._slots_for, requests), default=self._all_slots[0]))

    def _fit(self) -> None:
        """Resizes for all requests, or only for the requests that fit the present slots."""
        self._aside = {
            request: row for request, row in self._aside.items() if request in self.waiting
        }
        running = [request for request in self.running if request is not None]
        short = [request for request in self.waiting if self._slots_for(request) <= self.size.slots]
        self._calm += 1
        for asked in (self.waiting, short):
            wanted = self._size_for([*running, *asked])
            larger = Size(*map(max, wanted, self.size))
            if larger != self.size or wanted == self.size:
                self._calm = 0
            elif not running or self._calm > PATIENCE:
                larger = wanted
            if larger == self.size or self._resize(larger):
                break
        for place, request in enumerate(self.running):
            if request is not None and self._slots_for(request) > self.size.slots:
                self._aside[request] = (
                    place // self._per_shard,
                    self._engine.extract(self._state, self._only(place, 0)),
                )
                self.waiting.insert(0, request)
                self.running[place] = None
                self.outgrown += 1
                self._empty(place)

    def _resize(self, size: Size) -> bool:
        """Changes the size; returns False if it is not compiled yet."""
        if not all(
            [
                self.programs.is_ready(each)
                for each in (size, Chunks(size.slots), Resize(self.size, size))
            ]
        ):
            return False
        old_per_shard, running, held = self._per_shard, self.running, self._held
        in_use = [place for place, request in enumerate(running) if request is not None]
        # The last used texts are kept.
        order = [*in_use, *(place for place in reversed(held) if place not in in_use)]
        at = []
        for shard in range(self._shards.count):
            kept = [place for place in order if place // old_per_shard == shard][: size.rows]
            at += [*kept, *[None] * (size.rows - len(kept))]
        self._state = self._engine.resize(self._state, self._in_shards(at), size.slots)
        self._lay_out(size)
        self._engine = self._with_slots(size.slots)
        self.running = [None if place is None else running[place] for place in at]
        moved = {place: new for new, place in enumerate(at) if place is not None}
        self._held = {
            moved[place]: tokens[: size.slots] for place, tokens in held.items() if place in moved
        }
        self._calm = 0
        return True

    # Reading.

    def _take_next(self) -> bool:
        """Resumes a preempted text, or begins to read prompts; returns False if no row or request
        is left.
        """
        shards, width = self._shards.count, self._widths[-1]
        free = [
            [place for place in self._places(shard) if self.running[place] is None]
            for shard in range(shards)
        ]
        if min(len(self.waiting) // shards, *map(len, free)) < width:
            width = 1
        places, requests = [None] * (shards * width), [None] * (shards * width)
        for turn in range(width):
            for shard in (shard for shard in range(shards) if free[shard]):
                for request in self.waiting:
                    if (
                        self._slots_for(request) > self.size.slots
                        or self._aside.get(request, (shard,))[0] != shard
                    ):
                        continue
                    if request in self._aside and not self.reading:
                        self._resume(request, free[shard][0])
                        return True
                    if request not in self._aside:
                        at = shard * width + turn
                        places[at], requests[at] = free[shard].pop(0), request
                        self.reading.append(request)  # first: other threads count texts
                        self.waiting.remove(request)
                        break
        self._reader = self._read(requests, places)
        return bool(self.reading)

    def _resume(self, request: Request, place: int) -> None:
        """Writes the row of a preempted text into the batch."""
        shard, rows = self._aside.pop(request)
        arrays = self._engine.arrays(
            [request if each == shard else None for each in range(self._shards.count)]
        )
        self._state = self._engine.insert(
            self._state, dataclasses.replace(rows, request=arrays), self._only(place)
        )
        self.running[place] = request
        self.waiting.remove(request)

    def _read(self, requests: list[Request | None], places: list[int | None]) -> Iterator[int]:
        """Reads prompts after their cached prefixes, as many in each data shard; yields the number
        of tokens of each call.

        After its last chunk, a prompt is decoded in its row, of ``places``.
        """
        slots, width = self.size.slots, len(requests) // self._shards.count
        held = [self._longest_prefix(at // width, request) for at, request in enumerate(requests)]
        state, starts = self._engine.blank(len(requests)), [start for _, start in held]
        if any(starts):
            rows = self._engine.extract(self._state, self._in_shards(place for place, _ in held))
            rows = dataclasses.replace(rows, request=state.request)
            at = [n % width if start else NOWHERE for n, start in enumerate(starts)]
            state = self._engine.insert(state, rows, at)
        self.tokens_copied += sum(starts)
        while any(requests):
            left = [
                (len(request.prompt) - start, start)
                for request, start in zip(requests, starts)
                if request
            ]
            fitting = [
                size
                for size in self._chunks
                if all(
                    start + (size if self._rounds else -(-most // size) * size) <= slots
                    for most, start in left
                )
            ]
            chunk = next((size for size in fitting if size >= max(left)[0]), fitting[-1])
            counts = [1] if self._rounds else [-(-most // chunk) for most, _ in left]
            # All rows have as many calls; the last must not end beyond the slots of any
            # row.
            fits = max(starts) + max(counts) * chunk <= slots
            calls = max(counts) if fits else min(counts)
            ends = [
                min(start + calls * chunk, len(one.prompt)) if one else 1
                for one, start in zip(requests, starts)
            ]
            state = self._engine.extend(
                requests, dataclasses.replace(state, request=None), starts, ends, chunk
            )
            self.tokens_read += sum(
                end - start for one, start, end in zip(requests, starts, ends) if one
            )
            read = [one is not None and end == len(one.prompt) for one, end in zip(requests, ends)]
            if any(read):
                at = self._in_shards(
                    place if is_read else None for place, is_read in zip(places, read)
                )
                self._state = self._engine.insert(self._state, state, at)
            for n in np.flatnonzero(read):
                self.running[places[n]] = requests[n]
                self.reading.remove(requests[n])
                self._hold(places[n], ())
                requests[n] = None
            starts = [end if request else 0 for request, end in zip(requests, ends)]
            yield chunk

    def _longest_prefix(self, shard: int, request: Request | None) -> tuple[int, int]:
        """Returns the row with the longest prefix of a prompt, and the length of the prefix."""
        best = self._places(shard)[0], 0
        if request is None or len(request.prompt) + self._chunks[0] > self.size.slots:
            return best
        for place in self._places(shard):
            start = count_known(
                self._held.get(place, ()), request.prompt, self._engine.loop.drafter
            )
            best = (place, start) if start > max(best[1], LEAST_COPIED - 1) else best
        return best

    def _places(self, shard: int) -> range:
        """Returns the rows of a data shard."""
        return range(shard * self._per_shard, (shard + 1) * self._per_shard)

    def _in_shards(self, places: Iterable[int | None]) -> list[int]:
        """Returns the places of rows within their data shards."""
        return [NOWHERE if place is None else place % self._per_shard for place in places]

    def _only(self, place: int, elsewhere: int = NOWHERE) -> list[int]:
        """Returns, for each data shard, the place of a row within it, or ``elsewhere``."""
        shards = range(self._shards.count)
        return [
            place % self._per_shard if place in self._places(shard) else elsewhere
            for shard in shards
        ]

    def _empty(self, place: int) -> None:
        """Writes an empty row, which has ended, over a row of the batch."""
        self._hold(place, ())
        self._state = self._engine.insert(
            self._state, self._engine.blank(self._shards.count), self._only(place)
        )

    def _hold(self, place: int, tokens: Sequence[int]) -> None:
        """Records the tokens of a row, a prefix for later prompts."""
        self._held.pop(place, None)
        self._held[place] = () if self.running[place] in self._not_copied else tuple(tokens)

    # Programs.

    def score(self, tokens: Sequence[int]) -> Iterator[Scores | None] | None:
        """Returns the steps that score a text; None: their programs are not compiled yet."""
        calls = (
            ScoreChunks(slots, size) for size in reversed(self._chunks) for slots in self._all_slots
        )
        call = next(call for call in calls if call.slots >= len(tokens) + call.size)
        return (
            score(self._with_slots(call.slots), tokens, call.size)
            if self.programs.is_ready(call)
            else None
        )

    def _compile(self, thing: Size | Resize | Chunks | ScoreChunks) -> None:
        """Runs programs once, on rows that have ended."""
        count = self._shards.count
        if isinstance(thing, ScoreChunks):
            next(score(self._with_slots(thing.slots), [0, 0], thing.size))
            return
        if isinstance(thing, Resize):
            old = self._with_slots(thing.old.slots)
            at = [n % thing.old.rows for n in range(thing.new.rows)] * count
            state = old.resize(old.blank(thing.old.rows * count), at, thing.new.slots)
        elif isinstance(thing, Chunks):
            engine = self._with_slots(thing.slots)
            for rows in (width * count for width in self._widths):
                for chunk in self._chunks:
                    state = dataclasses.replace(engine.blank(rows), request=None)
                    state = engine.extend([None] * rows, state, [0] * rows, [1] * rows, chunk)
                state = engine.insert(state, engine.blank(rows), [NOWHERE] * rows)
        else:
            engine = self._with_slots(thing.slots)
            state = engine.blank(thing.rows * count)
            for rows in (width * count for width in self._widths):
                read = dataclasses.replace(
                    engine.extract(state, [0] * rows), request=engine.arrays([None] * rows)
                )
                state = engine.insert(state, read, [NOWHERE] * rows)
            state = engine.run(engine.end(state, ()), 0)
        jax.block_until_ready(state.lengths_B)


def chunk_sizes() -> tuple[int, int]:
    """Returns the tokens of a small and of a large call that reads prompts."""
    return (16, 64) if jax.default_backend() == "cpu" else (64, 512)


def powers(least: int, most: int) -> tuple[int, ...]:
    """Returns ``least``, its double and so on, below ``most``, and ``most``."""
    return (least, *powers(2 * least, most)) if least < most else (most,)
