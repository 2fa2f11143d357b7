"""Runs the programs of a batch; the only file of serving that holds arrays on a device.

The memory of a batch is that of its rows, of the rows whose prompts are being read, and of both
sizes during a change of size.
"""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from specsamp.decoding.batch_rows import NOWHERE
from specsamp.decoding.data_shards import DataShards
from specsamp.decoding.engine import Engine, to_host, without_caches
from specsamp.decoding.request import Request
from specsamp.decoding.state import DecodeState
from specsamp.serving.scores import Scores, score
from specsamp.serving.sizes import Chunks, Resize, ScoreChunks, Size

Program = Size | Resize | Chunks | ScoreChunks


class Runner:
    """The rows of a batch, and the rows whose prompts are being read, on the device.

    Rows are numbered over all data shards; None stands for no row. No row leaves its data shard.

    Attributes:
      engine: for the present number of slots.
      size: the present size.
    """

    def __init__(self, engine: Engine, size: Size, *, widths: Sequence[int], chunks: Sequence[int]):
        """Makes a runner without a state, which `begin` makes.

        Args:
          widths: possible numbers of prompts that are read in one call, per data shard.
          chunks: possible numbers of tokens of such a call.
        """
        self.engine = engine
        self.size = size
        self._shards = engine.pair.shards
        self._widths = widths
        self._chunks = chunks
        self._engines = {engine.slots: engine}
        self._draft_params: Any = None  # other than the pair's
        self._state: DecodeState | None = None
        self._prompts: DecodeState | None = None

    def begin(self) -> None:
        """Makes ended rows if there is no state."""
        if self._state is None:
            self.engine = self.with_slots(self.size.slots)
            self._state = self.engine.blank(self.size.rows * self._shards.count)

    def free(self, size: Size) -> None:
        """Frees the memory of all rows; `begin` makes rows of this size."""
        self._state = self._prompts = None
        self.size = size

    def with_slots(self, slots: int) -> Engine:
        """Returns the engine for a number of slots."""
        engines = self._engines  # `use_draft` may replace them during compilation
        if slots not in engines:
            engine = self.engine.with_slots(slots)
            if self._draft_params is not None:
                engine = engine.with_draft(self._draft_params)
            engines[slots] = engine
        return engines[slots]

    def use_draft(self, params: Any) -> None:
        """Replaces the parameters of the draft; rows keep the caches of former parameters.

        That is exact, since a token is verified with the probabilities it was drawn with.
        """
        self._draft_params, self.engine = params, self.engine.with_draft(params)
        self._engines = {self.engine.slots: self.engine}

    # Decoding.

    def run(self, max_rounds: int, min_running: int) -> None:
        """Starts a run of the loop; see `Engine.run`."""
        self._state = self.engine.run(self._state, max_rounds, min_running)

    def counts(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Waits for the end of a run.

        Returns:
          For each row its rounds, its `Finish`, its length, and the number of tokens that its
          caches hold.
        """
        state = self._state
        counts = to_host((state.stats.rounds_B, state.finish_B, state.lengths_B))
        rounds_B, finish_B, lengths_B = (array.tolist() for array in counts)
        return rounds_B, finish_B, lengths_B, self.engine.num_held(state).tolist()

    def on_host(self) -> DecodeState:
        """Returns the texts of all rows, without caches."""
        return to_host(without_caches(self._state))

    def end(self, is_ended: Sequence[bool]) -> None:
        """Ends rows where ``is_ended`` is true, as a stop token would."""
        self._state = self.engine.end(self._state, is_ended)

    def clear(self, row: int) -> None:
        """Writes an empty row, which has ended, over a row."""
        blank = self.engine.blank(self._shards.count)
        self._state = self.engine.insert(self._state, blank, self._only(row))

    # Rows that leave and return.

    def set_aside(self, row: int) -> DecodeState:
        """Returns a copy of a row in host memory."""
        at = [max(place, 0) for place in self._only(row)]
        return to_host_memory(self.engine.extract(self._state, at), self._shards)

    def bring_back(self, kept: DecodeState, request: Request, row: int) -> None:
        """Writes a row of the same data shard that was set aside over a row."""
        at = self._only(row)
        requests = [None if place == NOWHERE else request for place in at]
        rows = to_device_memory(kept, self._shards)
        rows = dataclasses.replace(rows, request=self.engine.arrays(requests))
        self._state = self.engine.insert(self._state, rows, at)

    def resize(self, sources: Sequence[int | None], size: Size) -> None:
        """Changes the size; each new row is a copy of its source, or has ended."""
        self._state = self.engine.resize(self._state, self._in_shards(sources), size.slots)
        self.size, self.engine = size, self.with_slots(size.slots)

    # Prompts.

    def begin_prompts(self, sources: Sequence[int], starts: Sequence[int]) -> None:
        """Makes rows for prompts, with copies of ``starts`` tokens from the rows ``sources``."""
        engine, count = self.engine, len(starts)
        self._prompts = engine.blank(count)
        if not any(starts):
            return
        rows = engine.extract(self._state, self._in_shards(sources))
        rows = dataclasses.replace(rows, request=self._prompts.request)
        width = count // self._shards.count
        at = [n % width if start else NOWHERE for n, start in enumerate(starts)]
        self._prompts = engine.insert(self._prompts, rows, at)

    def read(
        self,
        requests: Sequence[Request | None],
        starts: Sequence[int],
        ends: Sequence[int],
        chunk: int,
    ) -> None:
        """Reads tokens of prompts; see `Engine.extend`."""
        state = dataclasses.replace(self._prompts, request=None)
        self._prompts = self.engine.extend(requests, state, starts, ends, chunk)

    def insert_prompts(self, rows: Sequence[int | None]) -> None:
        """Writes each prompt over its row, unless that is None."""
        self._state = self.engine.insert(self._state, self._prompts, self._in_shards(rows))

    def free_prompts(self) -> None:
        """Frees the memory of the prompts' rows."""
        self._prompts = None

    # Places.

    def _in_shards(self, rows: Sequence[int | None]) -> list[int]:
        """Returns the places of rows within their data shards."""
        return [NOWHERE if row is None else row % self.size.rows for row in rows]

    def _only(self, row: int) -> list[int]:
        """Returns, for each data shard, the place of a row within it, or `NOWHERE`."""
        shard, place = divmod(row, self.size.rows)
        return [place if each == shard else NOWHERE for each in range(self._shards.count)]

    # Programs.

    def score(self, tokens: Sequence[int], program: ScoreChunks) -> Iterator[Scores | None]:
        """Returns the steps that score a text."""
        return score(self.with_slots(program.slots), tokens, program.size)

    def compile(self, program: Program) -> None:
        """Runs programs once, on rows that have ended."""
        if isinstance(program, ScoreChunks):
            next(self.score([0, 0], program))
            return
        runner, count = copy.copy(self), self._shards.count
        is_resize = isinstance(program, Resize)
        runner.free(program.old if is_resize else Size(program.rows, program.slots))
        runner.begin()
        if is_resize:
            runner.resize([None] * (program.new.rows * count), program.new)
        for rows in (width * count for width in self._widths):
            if isinstance(program, Size):
                runner.begin_prompts([0] * rows, [1] * rows)
                runner.insert_prompts([None] * rows)
            for chunk in self._chunks if isinstance(program, Chunks) else ():
                runner.begin_prompts([0] * rows, [0] * rows)
                runner.read([None] * rows, [0] * rows, [1] * rows, chunk)
                jax.block_until_ready(runner._prompts.lengths_B)
        if isinstance(program, Size):
            runner.end([])
            runner.run(0, 1)
        jax.block_until_ready(runner._state.lengths_B)


def to_host_memory(rows: DecodeState, shards: DataShards) -> DecodeState:
    """Moves rows to host memory; each device copies its part to its own host."""
    if shards.mesh is None:
        return jax.device_get(rows)
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host")), rows
    )


def to_device_memory(rows: DecodeState, shards: DataShards) -> DecodeState:
    """Moves rows back to the devices that they came from."""
    if shards.mesh is None:
        return jax.tree.map(jax.numpy.asarray, rows)
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind(None)), rows
    )
