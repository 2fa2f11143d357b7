"""Records which request each row of a batch decodes, and which tokens its slots hold."""

from collections.abc import Sequence

from specsamp.decoding.engine import count_known
from specsamp.decoding.loop import Loop
from specsamp.serving.scheduler import Entry
from specsamp.serving.sizes import Size

LEAST_COPIED = 4  # tokens; shorter prefixes are read again, which is faster


class SlotTable:
    """The rows of a batch, numbered over all data shards.

    The tokens of a text stay in the slots of its row after its end. A prompt that begins with the
    same tokens copies them, until another text is written over them.

    Attributes:
      entries: the request that each row decodes, or None.
      size: rows of each data shard, and slots of each row.
    """

    def __init__(self, size: Size, shards: int, loop: Loop):
        """Makes an empty table; models and drafter decide how much of a prefix can be copied."""
        self._shards, self._loop = shards, loop
        self.clear(size)

    def clear(self, size: Size) -> None:
        """Removes all requests and tokens."""
        self.size = size
        self.entries: list[Entry | None] = [None] * (size.rows * self._shards)
        # The last used row last.
        self._held: dict[int, tuple[tuple[int, ...], int]] = {}  # see `hold`

    @property
    def decoding(self) -> list[tuple[int, Entry]]:
        """Returns the rows that decode a request, with it."""
        return [(row, entry) for row, entry in enumerate(self.entries) if entry is not None]

    def rows(self, shard: int) -> range:
        """Returns the rows of a data shard."""
        return range(shard * self.size.rows, (shard + 1) * self.size.rows)

    def free(self, shard: int) -> list[int]:
        """Returns the rows of a data shard without a request, the least recently used first."""
        ages = {row: age for age, row in enumerate(self._held)}
        free = [row for row in self.rows(shard) if self.entries[row] is None]
        return sorted(free, key=lambda row: ages.get(row, -1))

    def hold(self, row: int, tokens: Sequence[int], end: int = 0) -> None:
        """Records the tokens in the slots of a row; none if the draft has changed meanwhile.

        Args:
          end: the length that the row had reached, see `count_known`.
        """
        entry = self.entries[row]
        self._held.pop(row, None)
        is_outdated = entry is not None and entry.is_outdated
        self._held[row] = () if is_outdated else tuple(tokens), end

    def forget(self) -> None:
        """Makes all present tokens useless for later prompts."""
        self._held.clear()

    def longest_prefix(self, shard: int, prompt: Sequence[int]) -> tuple[int, int]:
        """Returns the row with the longest prefix of a prompt, and the length of the prefix."""
        best = self.rows(shard)[0], 0
        for row in self.rows(shard):
            tokens, end = self._held.get(row, ((), 0))
            start = count_known(tokens, prompt, self._loop, end)
            if start >= max(LEAST_COPIED, best[1] + 1):
                best = row, start
        return best

    def resize(self, size: Size) -> list[int | None]:
        """Changes the size; returns the former row of each new row, or None.

        Requests keep a row. The rows that are left go to the last used texts.
        """
        entries, held = self.entries, self._held
        in_use = [row for row, _ in self.decoding]
        order = [*in_use, *(row for row in reversed(held) if row not in in_use)]
        sources: list[int | None] = []
        for shard in range(self._shards):
            kept = [row for row in order if row in self.rows(shard)][: size.rows]
            sources += [*kept, *[None] * (size.rows - len(kept))]
        self.clear(size)
        self.entries = [None if row is None else entries[row] for row in sources]
        for row in held:
            if row in sources:
                tokens, end = held[row]
                end = max(end, len(tokens))
                self._held[sources.index(row)] = tokens[: size.slots], end
        return sources
