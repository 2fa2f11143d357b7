"""Gives the rows of a batch to requests, and takes rows back: size, admission and preemption."""

import dataclasses

from specsamp.serving.prefill import Prefill
from specsamp.serving.runner import Runner
from specsamp.serving.scheduler import Entry, Scheduler, Stage
from specsamp.serving.sizes import Sizes
from specsamp.serving.slots import SlotTable


@dataclasses.dataclass
class Admission:
    """Admits the requests of a scheduler to the rows of a table; the fields are parts of a batch.

    Attributes:
      width: how many prompts of a data shard are read together.
      preempted: number of preemptions.
    """

    scheduler: Scheduler
    table: SlotTable
    sizes: Sizes
    runner: Runner
    prefill: Prefill
    width: int
    preempted: int = 0

    def fit(self) -> None:
        """Changes the size if necessary, and preempts texts that outgrow their slots, or that the
        order ranks behind waiting requests; for these at most as many as there are rows.
        """
        table, scheduler = self.table, self.scheduler
        decoding = [entry for _, entry in table.decoding]
        size = self.sizes.choose(table.size, decoding, scheduler.waiting)
        if size != table.size:
            self.runner.resize(table.resize(size), size)
        self.preempt_outgrown()
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

    def preempt_outgrown(self) -> None:
        """Preempts the texts whose next step might not fit their slots; they wait for more."""
        for row, entry in self.table.decoding:
            if not self._fits(entry):
                self._preempt(row, entry)

    def clear(self, row: int) -> None:
        """Writes an empty row, which has ended, over a row."""
        self.table.entries[row] = None
        self.table.hold(row, ())
        self.runner.clear(row)

    def admit(self) -> bool:
        """Resumes a preempted text, or begins to read prompts; returns False if no row or request
        is left.
        """
        width, shards = self.width, range(self.sizes.shards)
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
        self.clear(row)
        self.preempted += 1
