"""A batch of a service: its rows and slots follow its requests, and prompts are read in chunks between slices.

A lone text is not decoded at the cost of all rows, nor a short text at that of the whole context. Rows per data shard and
slots are powers of two. A size is compiled when requests first want it, in the background, while the batch goes on in
its present size; a text that has outgrown its slots meanwhile waits beside the batch.

A prompt of any length is read by the same few programs. What a row holds of it already, of a text that runs or has ended,
is copied instead of read: the memory of a batch is that of its rows, of one more row per data shard that is being read,
and of both sizes for the moment in which it changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from specsamp.decoding.batch_rows import NOWHERE
from specsamp.decoding.engine import Engine, to_host
from specsamp.decoding.request import Request
from specsamp.decoding.results import RowText
from specsamp.decoding.state import DecodeState, Finish
from specsamp.serving.background import Background
from specsamp.serving.batch import Batch
from specsamp.serving.scores import Scores, score

SMALLEST_SLOTS = 256
PATIENCE = 16  # slices in which a smaller batch would do, before it shrinks
AGAIN = 2  # last tokens of what a row holds that are read again: a draft may not have read them


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
    """The calls that read tokens of one prompt per data shard."""

    slots: int


@dataclasses.dataclass(frozen=True)
class ScoreChunks:
    """The calls that score a text; see `specsamp.serving.scores.score`."""

    slots: int
    size: int


class ElasticBatch(Batch):
    """A `Batch` whose size changes between slices.

    Attributes:
      size: of the batch now.
      programs: what is compiled: each `Size`, `Resize`, `Chunks` and `ScoreChunks`.
      reading: requests whose prompts are being read.
      tokens_read, tokens_copied: of prompts so far.
      outgrown: how often a text has waited for more slots.
    """

    def __init__(self, engine: Engine, *, rows: int, rounds: int, in_background: bool):
        """Makes a batch of the smallest size.

        Args:
          engine: for the most slots.
          rows: the most rows; rounded up to a multiple of the data shards.
          rounds: the most rounds of a slice.
          in_background: whether sizes are compiled while the batch goes on.
        """
        super().__init__(engine, rows=rows)
        self.tokens_read = self.tokens_copied = self.outgrown = 0
        self.reading: list[Request] = []
        self.programs = Background(self._compile, in_thread=in_background)
        self._margin = rounds * (engine.loop.depth + 1)  # tokens of a slice
        self._all_rows = powers(1, self._per_shard)
        self._all_slots = powers(SMALLEST_SLOTS, engine.slots)
        self._chunks = tuple(min(size, self._all_slots[0]) for size in chunk_sizes())
        self._engines = {engine.slots: engine}
        self._draft_params: Any = None  # other than the pair's
        self._reader: Iterator[int] | None = None  # reads the prompts of these requests
        self._aside: dict[Request, tuple[int, DecodeState]] = {}  # shards and rows of texts that have outgrown theirs
        self._lengths: dict[Request, int] = {}  # of running texts, prompts included
        self._held: dict[int, tuple[int, ...]] = {}  # the tokens of each row, the last used row last
        self._calm = 0  # slices in which a smaller size would have done
        self._sizes = [Size(rows, slots) for slots in self._all_slots for rows in self._all_rows]  # from small to large
        self._lay_out(self._sizes[0])

    def compile(self, all_sizes: bool = False) -> None:
        """Compiles what the first requests need, or all sizes and all changes of the size."""
        programs = [self._sizes[0], Chunks(self._sizes[0].slots)]
        if all_sizes:
            programs += [*self._sizes, *map(Chunks, self._all_slots)]
            programs += [Resize(old, new) for old in self._sizes for new in self._sizes if old != new]
            programs += [ScoreChunks(slots, size) for slots in self._all_slots for size in self._chunks]
        for program in programs:
            self.programs.make(program)

    def fill(self) -> None:
        """Fits the size, reads one chunk of prompts if texts are running, and gives free rows to waiting requests."""
        self._begin()
        if not self.reading:
            self._fit()
        allowance = 2 * self._chunks[-1]
        while self.reading or self._take_next():
            if self.reading:
                allowance -= next(self._reader)
            if not self.reading:
                self._reader = None  # and the memory of its rows
            if allowance <= 0 and any(self.running):
                return

    def collect(
        self, read: Callable[[DecodeState, int, Request], RowText | None], always: bool = False
    ) -> list[tuple[Request, RowText | None]]:
        running = {request: place for place, request in enumerate(self.running) if request is not None}
        lengths = to_host(self._state.lengths_B).tolist()
        waiting = {request: self._lengths[request] for request in self._aside}
        self._lengths = waiting | {request: lengths[place] for request, place in running.items()}
        found = super().collect(read, always)
        for request, place in running.items():
            if request.rounds:  # before its first round a row cannot be read on: heads keep a chunk's last feature
                self._hold(place, request.prompt)
        for request, text in found:
            place = running[request]
            if text is None or text.finish == Finish.INVALID:  # its caches may hold NaN
                self._empty(place)
            else:
                self._hold(place, (*request.prompt, *text.tokens))
        return found

    def free(self) -> None:
        super().free()
        self._lay_out(self._sizes[0])

    def unread(self) -> list[Request]:
        """Gives up the prompts that are being read, and returns their requests."""
        self._reader, requests, self.reading = None, self.reading, []
        return requests

    # The size.

    def _lay_out(self, size: Size) -> None:
        """Takes a size for a batch in which nothing runs."""
        self.size, self._per_shard = size, size.rows
        self.running = [None] * (size.rows * self._shards.count)
        self._held.clear()
        self.unread()

    def _begin(self) -> None:
        if self._state is None:
            self._engine = self._with_slots(self.size.slots)
            self._state = self._engine.blank(len(self.running))

    def _with_slots(self, slots: int) -> Engine:
        if slots not in self._engines:
            engine = self._engine.with_slots(slots)
            self._engines[slots] = engine if self._draft_params is None else engine.with_draft(self._draft_params)
        return self._engines[slots]

    def set_draft(self, params: Any) -> None:
        super().set_draft(params)
        self._draft_params = params
        self._engines = {slots: engine.with_draft(params) for slots, engine in self._engines.items()}

    def _slots_for(self, request: Request) -> int:
        """Returns the fewest slots in which a request can be decoded for another slice."""
        tokens = min(request.limit, self._lengths.get(request, len(request.prompt)) + self._margin)
        needed = max(tokens + max(self._engine.loop.headroom, self._chunks[0]), self._engine.loop.window)
        return next((slots for slots in self._all_slots if slots >= needed), self._all_slots[-1])

    def _size_for(self, requests: Sequence[Request]) -> Size:
        per_shard = -(-len(requests) // self._shards.count)
        rows = next((rows for rows in self._all_rows if rows >= per_shard), self._all_rows[-1])
        return Size(rows, max(map(self._slots_for, requests), default=self._all_slots[0]))

    def _fit(self) -> None:
        """Gives the batch the size that all requests want, or that those want which its slots are enough for."""
        self._aside = {request: row for request, row in self._aside.items() if request in self.waiting}
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
                self._aside[request] = place // self._per_shard, self._engine.extract(self._state, self._only(place, 0))
                self.waiting.insert(0, request)
                self.running[place] = None
                self.outgrown += 1
                self._empty(place)

    def _resize(self, size: Size) -> bool:
        """Changes the size; returns False if it is not compiled yet."""
        if not all([self.programs.is_ready(each) for each in (size, Chunks(size.slots), Resize(self.size, size))]):
            return False
        old_per_shard, running, held = self._per_shard, self.running, self._held
        in_use = [place for place, request in enumerate(running) if request is not None]
        order = [*in_use, *(place for place in reversed(held) if place not in in_use)]  # the last used texts are kept
        at = []
        for shard in range(self._shards.count):
            kept = [place for place in order if place // old_per_shard == shard][: size.rows]
            at += [*kept, *[None] * (size.rows - len(kept))]
        self._state = self._engine.resize(self._state, self._in_shards(at), size.slots)
        self._lay_out(size)
        self._engine = self._with_slots(size.slots)
        self.running = [None if place is None else running[place] for place in at]
        moved = {place: new for new, place in enumerate(at) if place is not None}
        self._held = {moved[place]: tokens[: size.slots] for place, tokens in held.items() if place in moved}
        self._calm = 0
        return True

    # Reading.

    def _take_next(self) -> bool:
        """Resumes a waiting text, or begins to read prompts; returns False where no row or request is left."""
        places, requests = [None] * self._shards.count, [None] * self._shards.count
        for shard in range(self._shards.count):
            place = next((place for place in self._places(shard) if self.running[place] is None), None)
            for request in self.waiting if place is not None else ():
                if self._slots_for(request) > self.size.slots or self._aside.get(request, (shard,))[0] != shard:
                    continue
                if request in self._aside and not self.reading:
                    self._resume(request, place)
                    return True
                if request not in self._aside:
                    places[shard], requests[shard] = place, request
                    self.reading.append(request)  # first: others count texts at any moment
                    self.waiting.remove(request)
                    break
        self._reader = self._read(requests, places)
        return bool(self.reading)

    def _resume(self, request: Request, place: int) -> None:
        """Writes the row of a text that was put aside into the batch."""
        shard, rows = self._aside.pop(request)
        arrays = self._engine.arrays([request if each == shard else None for each in range(self._shards.count)])
        self._state = self._engine.insert(self._state, dataclasses.replace(rows, request=arrays), self._only(place))
        self.running[place] = request
        self.waiting.remove(request)

    def _read(self, requests: list[Request | None], places: list[int | None]) -> Iterator[int]:
        """Reads prompts, at most one of each data shard, after what rows hold of them; yields the tokens of each call.

        A prompt that is read to its end begins in its row, of ``places``.
        """
        count, slots = self._shards.count, self.size.slots
        held = [self._longest_prefix(shard, request) for shard, request in enumerate(requests)]
        state, starts = self._engine.blank(count), [start for _, start in held]
        if any(starts):
            rows = self._engine.extract(self._state, self._in_shards([place for place, _ in held]))
            rows = dataclasses.replace(rows, request=state.request)
            state = self._engine.insert(state, rows, [0 if start else NOWHERE for start in starts])
        self.tokens_copied += sum(starts)
        while self.reading:
            left = [(len(request.prompt) - start, start) for request, start in zip(requests, starts) if request]
            fitting = [size for size in self._chunks if all(start + size <= slots for _, start in left)]
            chunk = next((size for size in fitting if size >= max(left)[0]), fitting[-1])
            ends = [
                min(start + chunk, len(request.prompt)) if request else 1 for request, start in zip(requests, starts)
            ]
            state = self._engine.extend(requests, dataclasses.replace(state, request=None), starts, ends, chunk)
            self.tokens_read += sum(end - start for request, start, end in zip(requests, starts, ends) if request)
            read = [shard for shard, request in enumerate(requests) if request and ends[shard] == len(request.prompt)]
            if read:
                at = self._in_shards([place if shard in read else None for shard, place in enumerate(places)])
                self._state = self._engine.insert(self._state, state, at)
            for shard in read:
                self.running[places[shard]] = requests[shard]
                self.reading.remove(requests[shard])
                self._hold(places[shard], ())
                requests[shard] = None
            starts = [end if request else 0 for request, end in zip(requests, ends)]
            yield chunk

    def _longest_prefix(self, shard: int, request: Request | None) -> tuple[int, int]:
        """Returns the row that holds most of a prompt, and how many tokens of it need not be read."""
        best = self._places(shard)[0], 0
        for place in self._places(shard) if request is not None else ():
            held, prompt = self._held.get(place, ()), request.prompt
            most = min(len(held), len(prompt))
            common = next((at for at in range(most) if held[at] != prompt[at]), most)
            start = max(min(common, len(prompt) - 1, len(held) - 1) + 1 - AGAIN, 0)
            best = (place, start) if start > best[1] else best
        return best

    def _places(self, shard: int) -> range:
        """Returns the rows of a data shard."""
        return range(shard * self._per_shard, (shard + 1) * self._per_shard)

    def _in_shards(self, places: Sequence[int | None]) -> list[int]:
        """Returns the places of rows within their data shards."""
        return [NOWHERE if place is None else place % self._per_shard for place in places]

    def _only(self, place: int, elsewhere: int = NOWHERE) -> list[int]:
        """Returns, for each data shard, the place of a row within it, or ``elsewhere``."""
        shards = range(self._shards.count)
        return [place % self._per_shard if place in self._places(shard) else elsewhere for shard in shards]

    def _empty(self, place: int) -> None:
        """Writes a row that has ended, and holds nothing, over a row of the batch."""
        self._hold(place, ())
        self._state = self._engine.insert(self._state, self._engine.blank(self._shards.count), self._only(place))

    def _hold(self, place: int, tokens: Sequence[int]) -> None:
        """Notes the tokens that a row holds."""
        self._held.pop(place, None)
        self._held[place] = tuple(tokens)

    # Programs.

    def score(self, tokens: Sequence[int]) -> Iterator[Scores | None] | None:
        """Begins to score a text; None: its programs are not compiled yet."""
        calls = (ScoreChunks(slots, size) for size in reversed(self._chunks) for slots in self._all_slots)
        call = next(call for call in calls if call.slots >= len(tokens) + call.size)
        return score(self._with_slots(call.slots), tokens, call.size) if self.programs.is_ready(call) else None

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
            for chunk in self._chunks:
                state = dataclasses.replace(engine.blank(count), request=None)
                state = engine.extend([None] * count, state, [0] * count, [1] * count, chunk)
            state = engine.insert(state, engine.blank(count), [NOWHERE] * count)
        else:
            engine = self._with_slots(thing.slots)
            state = engine.blank(thing.rows * count)
            rows = dataclasses.replace(engine.extract(state, [0] * count), request=engine.arrays([None] * count))
            state = engine.insert(state, rows, [NOWHERE] * count)
            state = engine.run(engine.end(state, ()), 0)
        jax.block_until_ready(state.lengths_B)


def chunk_sizes() -> tuple[int, int]:
    """Returns the tokens of a small and of a large call that reads prompts."""
    return (16, 64) if jax.default_backend() == "cpu" else (64, 512)


def powers(least: int, most: int) -> tuple[int, ...]:
    """Returns ``least``, its double and so on, below ``most``, and ``most``."""
    return (least, *powers(2 * least, most)) if least < most else (most,)
