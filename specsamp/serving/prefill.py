"""Reads prompts in chunks: which tokens in the next call, and how many in a step.

A prompt of any length is read by the same few programs. In a service, prompts are read between
steps of decoding, so that a long prompt delays running texts by two chunks at most. A prefix that
the slots of a row already hold is copied instead of read.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax

from specsamp.serving.runner import Runner
from specsamp.serving.scheduler import Entry, Scheduler
from specsamp.serving.slots import SlotTable

CHUNKS_PER_STEP = 2


@dataclasses.dataclass
class Prefill:
    """Reads several prompts together, equally many in each data shard.

    Attributes:
      scheduler, table, runner: parts of a batch.
      chunks: numbers of tokens of a call, from small to large.
      is_whole: whether a step reads whole prompts.
      budget: tokens of a step.
      entries: requests whose prompts are being read; None where a data shard has none.
      tokens_copied: number of prompt tokens that a row held already.
    """

    scheduler: Scheduler
    table: SlotTable
    runner: Runner
    chunks: Sequence[int]
    is_whole: bool
    entries: list[Entry | None] = dataclasses.field(default_factory=list)
    tokens_copied: int = 0

    def __post_init__(self):
        self.budget = math.inf if self.is_whole else CHUNKS_PER_STEP * self.chunks[-1]
        self._rows: list[int | None] = []
        self._starts: list[int] = []

    def begin(self, entries: list[Entry | None], rows: list[int | None], width: int) -> None:
        """Makes rows for prompts, with the longest prefixes that rows of the batch hold.

        Args:
          rows: the row of the batch in which each text will be decoded.
          width: prompts of each data shard.
        """
        self.entries, self._rows = entries, rows
        found = []
        for at, entry in enumerate(entries):
            prompt = () if entry is None else entry.request.prompt
            # The first chunk after a copy must fit.
            fits = len(prompt) + self.chunks[0] <= self.table.size.slots
            found.append(self.table.longest_prefix(at // width, prompt if fits else ()))
        sources, self._starts = map(list, zip(*found))
        self.runner.begin_prompts(sources, self._starts)
        self.tokens_copied += sum(self._starts)

    def read(self) -> int:
        """Reads the next chunks; texts whose prompts were read are decoded from now on.

        Returns:
          The number of tokens of a call.
        """
        starts, entries = self._starts, self.entries
        lengths = [1 if entry is None else len(entry.request.prompt) for entry in entries]
        left = [
            (length - start, start)
            for length, start, entry in zip(lengths, starts, entries)
            if entry
        ]
        chunk, calls = plan(left, self.chunks, self.table.size.slots, self.is_whole)
        ends = [min(start + calls * chunk, length) for start, length in zip(starts, lengths)]
        self.runner.read([entry and entry.request for entry in entries], starts, ends, chunk)
        is_read = [entry and end == length for entry, end, length in zip(entries, ends, lengths)]
        if any(is_read):
            rows = [row if done else None for row, done in zip(self._rows, is_read)]
            self.runner.insert_prompts(rows)
        for at in (at for at, done in enumerate(is_read) if done):
            self.table.entries[self._rows[at]] = entries[at]
            self.table.hold(self._rows[at], ())
            self.scheduler.start(entries[at])
            entries[at] = None
        self._starts = [end if entry else 0 for entry, end in zip(entries, ends)]
        if not any(entries):
            self.stop()
        return chunk

    def stop(self) -> list[Entry]:
        """Frees the memory of prompts; returns the requests that were not read, as finished."""
        left = [entry for entry in self.entries if entry is not None]
        self.entries = []
        self.runner.free_prompts()
        for entry in left:
            self.scheduler.finish(entry)
        return left


def plan(
    left: Sequence[tuple[int, int]], chunks: Sequence[int], slots: int, is_whole: bool
) -> tuple[int, int]:
    """Returns the number of tokens of the next calls, and the number of calls.

    Args:
      left: for each prompt its tokens that are left, and its tokens that were read.
      chunks: possible numbers of tokens of a call, from small to large.
      slots: slots of each row, beyond which no call may write.
      is_whole: whether prompts are read to their ends, as far as all rows have as many calls.
    """

    def calls(count: int, chunk: int) -> int:
        return -(-count // chunk) if is_whole else 1

    fitting = [
        chunk
        for chunk in chunks
        if all(start + calls(count, chunk) * chunk <= slots for count, start in left)
    ]
    longest, start = (max(numbers) for numbers in zip(*left))
    chunk = next((chunk for chunk in fitting if chunk >= longest), fitting[-1])
    most = calls(longest, chunk)
    # All rows have as many calls; the last must not end beyond the slots of any row.
    fits = start + most * chunk <= slots
    return chunk, most if fits else calls(min(left)[0], chunk)


def chunk_sizes() -> tuple[int, int]:
    """Returns the tokens of a small and of a large call that reads prompts."""
    return (16, 64) if jax.default_backend() == "cpu" else (64, 512)
