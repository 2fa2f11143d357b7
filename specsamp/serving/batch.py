"""Decodes requests over the rows of a batch, step by step: of one call (`generate_many`), or of
many callers (`Service`).

The loop stays on the device until rows have ended. Their texts are fetched, the next prompts are
read and written over their rows, and the other rows stay unchanged
(`specsamp.decoding.batch_rows`). Sampling, noise, budget and stop tokens of a row are data, so
requests of different callers share a batch and its programs.

A batch joins five parts: `Scheduler` has the order of the requests, `SlotTable` their rows, `Sizes`
the size, `Prefill` the chunks of their prompts, and `Runner` has the arrays.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from specsamp.decoding.engine import MANY_ROUNDS, Engine
from specsamp.decoding.results import RowText
from specsamp.decoding.state import DecodeState, Finish
from specsamp.serving.learner import Learner
from specsamp.serving.orders import FirstCome, Order
from specsamp.serving.prefill import Prefill, chunk_sizes
from specsamp.serving.runner import Runner
from specsamp.serving.scheduler import Entry, Scheduler, Stage
from specsamp.serving.scores import Scores
from specsamp.serving.sizes import SMALLEST_SLOTS, Background, ScoreChunks, Size, Sizes, powers
from specsamp.serving.slots import SlotTable


@dataclasses.dataclass
class Usage:
    """Counts the work of a batch.

    Attributes:
      rows: number of rows of the batch.
      slices: number of runs of the loop.
      rounds: number of rounds of the loop.
      busy: the sum over rounds of the rows that emitted tokens that are kept.
      preempted: number of preemptions.
    """

    rows: int
    slices: int = 0
    rounds: int = 0
    busy: int = 0
    preempted: int = 0

    def add(self, rounds: int, busy: int) -> None:
        """Counts a run of the loop."""
        self.slices += 1
        self.rounds += rounds
        self.busy += busy


class Batch:
    """The rows of a batch, their requests, and the queue. A step is `fill`, `run` and `collect`.

    Attributes:
      usage: counts of the work.
      scheduler: the requests.
      sizes: the possible sizes, and the compiled programs.
      runner: the rows on the device.
      table: the request of each row.
      prefill: reads prompts.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        rows: int,
        rounds: int | None = None,
        in_background: bool = False,
        together: int = 1,
        order: Order = FirstCome(),
    ):
        """Makes a batch without a state, which `fill` begins.

        Args:
          engine: for the most slots.
          rows: the most rows; rounded up to a multiple of the data shards.
          rounds: the most rounds of a step. None: the size is always the largest, and prompts are
            read whole.
          in_background: whether sizes are compiled during decoding.
          together: number of prompts that are read in one call, per data shard.
          order: of the requests; it may learn, so that each batch needs its own.
        """
        loop, self._shards = engine.loop, engine.pair.shards.count
        most = -(-rows // self._shards)
        self._rounds = MANY_ROUNDS if rounds is None else rounds
        all_rows, all_slots = (most,), (engine.slots,)
        if rounds is not None:
            all_rows = powers(1, most)
            all_slots = powers(SMALLEST_SLOTS, engine.slots)
        size = Size(all_rows[0], all_slots[0])
        self._chunks = chunks = [min(count, size.slots) for count in chunk_sizes()]
        # How many prompts of a data shard are read together.
        self._width = min(together, size.rows)
        self.usage, self.scheduler = Usage(most * self._shards), Scheduler(order)
        self.runner = Runner(engine, size, widths=sorted({1, self._width}), chunks=chunks)
        self.sizes = Sizes(
            rows=all_rows,
            slots=all_slots,
            shards=self._shards,
            step_tokens=self._rounds * (loop.depth + 1),
            spare=max(loop.headroom, chunks[0]),
            programs=Background(self.runner.compile, in_thread=in_background),
        )
        self.table = SlotTable(size, self._shards, loop)
        self.prefill = Prefill(self.scheduler, self.table, self.runner, chunks, rounds is None)

    def compile(self) -> None:
        """Compiles the smallest size and all rows; others are compiled during decoding."""
        self.runner.with_slots(self.sizes.all[0].slots)  # once, before two threads read it
        # On a mesh in one order.
        is_on_mesh = self.runner.engine.pair.shards.mesh is not None
        self.sizes.compile_first(threads=1 if is_on_mesh else 2)

    def free(self) -> None:
        """Frees the memory of the caches; nothing may be decoding."""
        self.prefill.stop()
        self.runner.free(self.sizes.all[0])
        self.table.clear(self.sizes.all[0])

    def fill(self) -> None:
        """Fits the size, gives free rows to waiting requests, and reads their prompts, as many as
        the budget of a step allows.
        """
        self.runner.begin()
        if self.prefill.entries:
            self._preempt_outgrown()
        else:
            self._make_room()
        budget = self.prefill.budget
        while self.prefill.entries or self._admit():
            if self.prefill.entries:
                budget -= self.prefill.read()
            if budget <= 0 and self.table.decoding:
                return

    def _make_room(self) -> None:
        """Changes the size if necessary, and preempts texts that outgrow their slots, or that the
        order ranks behind waiting requests; for these at most as many as there are rows.
        """
        table, scheduler = self.table, self.scheduler
        decoding = [entry for _, entry in table.decoding]
        size = self.sizes.choose(table.size, decoding, scheduler.waiting)
        if size != table.size:
            self.runner.resize(table.resize(size), size)
        self._preempt_outgrown()
        taken: list[Entry] = []
        full = [shard for shard in range(self.sizes.shards) if not table.free(shard)]
        for shard in full if scheduler.order.preempts else ():
            kept = sum(entry.stage == Stage.PREEMPTED for entry in scheduler.waiting)
            if kept >= len(table.entries):  # a row takes as much host memory as of the device
                break
            newcomer = scheduler.next(shard, lambda entry: entry not in taken and self._fits(entry))
            rows = {table.entries[row]: row for row in table.rows(shard)}
            entry = newcomer and scheduler.displaced(newcomer, rows)
            if entry is not None:
                taken.append(newcomer)
                self._preempt(rows[entry], entry, after=newcomer)

    def _preempt_outgrown(self) -> None:
        """Preempts the texts whose next step might not fit their slots; they wait for more."""
        for row, entry in self.table.decoding:
            if not self._fits(entry):
                self._preempt(row, entry)

    def _clear(self, row: int) -> None:
        """Writes an empty row, which has ended, over a row."""
        self.table.entries[row] = None
        self.table.hold(row, ())
        self.runner.clear(row)

    def _admit(self) -> bool:
        """Resumes a preempted text, or begins to read prompts; returns False if no row or request
        is left.
        """
        width, shards = self._width, range(self.sizes.shards)
        free = [self.table.free(shard) for shard in shards]
        if min(len(self.scheduler.waiting) // len(shards), *map(len, free)) < width:
            width = 1
        entries = [None] * (len(shards) * width)
        rows = [None] * (len(shards) * width)
        for turn in range(width):
            for shard in (shard for shard in shards if free[shard]):
                entry = self.scheduler.next(shard, self._fits, can_resume=not any(entries))
                if entry is None:
                    continue
                row = free[shard].pop(0)
                if entry.stage == Stage.PREEMPTED:
                    self.runner.bring_back(entry.kept, entry.request, row)
                    self.table.hold(row, ())
                    self.table.entries[row] = entry
                    self.scheduler.resume(entry)
                    return True
                at = shard * width + turn
                entries[at], rows[at] = entry, row
                self.scheduler.admit(entry)
        if any(entries):
            self.prefill.begin(entries, rows, width)
        return any(entries)

    def _fits(self, entry: Entry) -> bool:
        return self.sizes.slots_for(entry) <= self.table.size.slots

    def _preempt(self, row: int, entry: Entry, after: Entry | None = None) -> None:
        shard = row // self.table.size.rows
        self.scheduler.preempt(entry, shard, self.runner.set_aside(row), after)
        self._clear(row)
        self.usage.preempted += 1

    def run(self) -> None:
        """Starts a run of the loop: until as many rows have ended as there are data shards, or its
        rounds are over.

        A stop string is found half a run late, on average, so runs are short while a request has
        one.
        """
        requests = [entry.request for _, entry in self.table.decoding]
        max_rounds = min(self._rounds, self.runner.engine.rounds_per_look(requests))
        self.runner.run(max_rounds, max(len(requests) - self._shards + 1, 1))

    def collect(
        self, read: Callable[[DecodeState, int, Entry], RowText | None], always: bool = False
    ) -> list[tuple[Entry, RowText | None]]:
        """Waits for the end of a run, and frees the rows of requests that have ended.

        Args:
          read: returns the text in a row of a state, as `Engine.text` does; None frees the row.
          always: whether texts are read although no row has ended and no request has stop strings;
            otherwise only counts are copied to the host then.

        Returns:
          The requests that were decoding, with their texts; nothing if no text was read.
        """
        rounds_B, finish_B, lengths_B, held_B = self.runner.counts()
        decoding = self.table.decoding
        rounds = [rounds_B[row] - entry.rounds for row, entry in decoding]
        for row, entry in decoding:
            entry.rounds = rounds_B[row]
            entry.length = lengths_B[row]
            # Before its first round a row cannot be extended: heads keep a chunk's last feature.
            if entry.rounds:
                self.table.hold(row, entry.request.prompt[: held_B[row]], lengths_B[row])
        found = []
        lost = 0
        late = [False] * len(rounds_B)
        if always or any(
            finish_B[row] != Finish.RUNNING or entry.request.stops.texts for row, entry in decoding
        ):
            state = self.runner.on_host()
            found = [(entry, read(state, row, entry)) for row, entry in decoding]
        for (row, _), (entry, text) in zip(decoding, found):
            if text is not None:
                tokens = *entry.request.prompt, *text.tokens
                self.table.hold(row, tokens[: held_B[row]], lengths_B[row])
                if text.finish == Finish.RUNNING:
                    continue
                entry.length = len(entry.request.prompt) + len(text.tokens)
                self.scheduler.order.finish(entry)
                lost += entry.rounds - text.stats.rounds
            self.scheduler.finish(entry)
            self.table.entries[row] = None
            late[row] = finish_B[row] == Finish.RUNNING
            if text is None or text.finish == Finish.INVALID:  # its caches may hold NaN
                self._clear(row)
        if any(late):
            self.runner.end(late)
        self.usage.add(max(rounds), sum(rounds) - lost)
        return found

    def learn(self, learner: Learner, tokens: Sequence[int]) -> None:
        """Calls a learner with a finished text, and uses the draft parameters that it returns."""
        params = learner(tokens)
        if params is None:
            return
        self.runner.use_draft(params)
        # If rows of a former draft were copied on and on, their caches would never be renewed.
        self.table.forget()
        for entry in (*self.scheduler.active, *self.scheduler.waiting):
            entry.is_outdated = entry.stage != Stage.QUEUED

    def score(self, tokens: Sequence[int]) -> Iterator[Scores | None] | None:
        """Returns the steps that score a text; None: their programs are not compiled yet."""
        program = next(
            ScoreChunks(slots, chunk)
            for chunk in reversed(self._chunks)
            for slots in self.sizes.slots
            if slots >= len(tokens) + chunk
        )
        is_ready = self.sizes.programs.is_ready(program)
        return self.runner.score(tokens, program) if is_ready else None
