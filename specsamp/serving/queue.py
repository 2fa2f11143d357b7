"""Many prompts over a fixed number of rows: a row that ends hands over its text and takes the next prompt.

    for completion in generate_many(pair, prompts, rows=8):
        print(completion.prompt_index, completion.text)

The loop stays on the device until rows have ended. Their texts are fetched, the next prompts are read and written over
their rows, and the other rows go on as if nothing had happened (`specsamp.decoding.batch_rows`). While the device
works, the caller has the completions. A program is compiled for the loop, and one for each bucket of prompts.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.decoding import checks
from specsamp.decoding.batch_rows import NOWHERE
from specsamp.decoding.checks import Prompt
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.generate import use_compilation_cache
from specsamp.decoding.job import Job, bucket, to_host
from specsamp.decoding.pair import Pair
from specsamp.decoding.results import Completion
from specsamp.decoding.state import DecodeState, Finish, Request
from specsamp.sampling.rejection import TokenRule
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp
from specsamp.serving.log import CompletionLog

DEFAULT_ROWS = 8


def generate_many(
    pair: Pair,
    prompts: Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 128,
    *,
    rows: int = DEFAULT_ROWS,
    refill: int = 1,
    rounds_per_slice: int | None = None,
    log: CompletionLog | str | os.PathLike | None = None,
    sampling: Warp | None = None,
    draft_sampling: Warp | None = None,
    draft_length: int | None = None,
    rule: Rule = TokenRule(),
    drafter: Drafter | None = None,
    seed: int = 0,
    stop: Sequence[int | str] | None = None,
    num_samples: int = 1,
    return_log_probs: bool = False,
    prompt_ids: Sequence[int] | None = None,
) -> Queue:
    """Does what `generate` does, ``rows`` texts at a time: the same completions, in the order in which they end.

    A completion is the one that its prompt has alone, whatever the number of rows, the order of the prompts and their
    lengths, unless the drafter looks at several rows at once (`Completion.row_independent`). Arguments that are not
    named here are those of `generate`.

    Args:
      rows: texts that are decoded together; rounded up to a multiple of the data shards.
      refill: rows of a data shard whose prompts are read in one call. The loop returns once so many have ended: more
        than 1 reads prompts faster, where rows are many, and leaves rows idle for longer.
      rounds_per_slice: the loop returns at the latest after so many rounds; default never, or every few rounds where
        strings end texts.
      log: a file of completions, or its path: what ends is added to it, and what it holds is not decoded again. With a
        path, all parameters are read once to tell them from others.

    Returns:
      An iterator of completions, whose `Queue.usage` says how busy the rows were.

    Raises:
      ValueError: before compilation, naming the value and the fix; or the log is of another call.
    """
    use_compilation_cache()
    rows, refill = checks.integer("rows", rows, 1), checks.integer("refill", refill, 1)
    if rounds_per_slice is not None:
        rounds_per_slice = checks.integer("rounds_per_slice", rounds_per_slice, 1)
    method = checks.make_method(
        pair,
        draft_length=draft_length,
        drafter=drafter,
        rule=rule,
        sampling=sampling,
        draft_sampling=draft_sampling,
    )
    job = Job.create(
        pair,
        prompts,
        max_new_tokens,
        method,
        seed=seed,
        stop=stop,
        num_samples=num_samples,
        return_log_probs=return_log_probs,
        prompt_ids=prompt_ids,
        batch=min(rows, _rows_asked(prompts, num_samples)) + refill * pair.shards.count,
    )
    if log is not None:
        log = log if isinstance(log, CompletionLog) else CompletionLog(log)
        log.open(job, seed)
    return Queue(job, rows=rows, refill=refill, rounds=rounds_per_slice, log=log)


def _rows_asked(prompts: Sequence[Prompt], num_samples: int) -> int:
    """Returns how many texts there are; what is no list of prompts is refused later."""
    is_list = hasattr(prompts, "__len__") and isinstance(num_samples, int)
    return len(prompts) * num_samples if is_list else 1


@dataclasses.dataclass
class Usage:
    """How busy the rows of a batch were; a row is busy in a round in which it emits something that is kept.

    Attributes:
      rows: of the batch.
      slices: runs of the loop.
      rounds: of the loop.
      busy: the sum over rounds of the rows that were busy.
      rounds_in_demand, busy_in_demand: the same, of slices at whose end prompts were waiting.
    """

    rows: int
    slices: int = 0
    rounds: int = 0
    busy: int = 0
    rounds_in_demand: int = 0
    busy_in_demand: int = 0

    @property
    def occupancy(self) -> float:
        """Returns the share of rows that were busy while prompts were waiting; nan if none ever waited."""
        return self.busy_in_demand / (self.rows * self.rounds_in_demand) if self.rounds_in_demand else float("nan")

    def add(self, rounds_B: np.ndarray, lost: int, in_demand: bool) -> None:
        """Counts a slice in which the rows emitted for ``rounds_B`` rounds, ``lost`` of which are not kept."""
        rounds, busy = int(rounds_B.max()), int(rounds_B.sum()) - int(lost)
        self.slices, self.rounds, self.busy = self.slices + 1, self.rounds + rounds, self.busy + busy
        if in_demand:
            self.rounds_in_demand, self.busy_in_demand = self.rounds_in_demand + rounds, self.busy_in_demand + busy


class Queue(Iterator[Completion]):
    """Completions of a job, in the order in which they end; see `generate_many`.

    Attributes:
      usage: of the rows so far.
      known: the completions that come from the log.
    """

    def __init__(self, job: Job, *, rows: int, refill: int, rounds: int | None, log: CompletionLog | None):
        shards = job.pair.shards.count
        rows = -(-min(rows, job.rows) // shards) * shards
        self.usage = Usage(rows=rows)
        self._job, self._log = job, log
        self._refill = min(refill, rows // shards)
        self._rounds = rounds or job.rounds_per_look
        self._done = {} if log is None else dict(log.completions)
        self.known = len(self._done)
        self._waiting = collections.deque(row for row in range(job.rows) if self._index(row) not in self._done)
        self._rows: list[int | None] = [None] * rows  # the row of the job that each row of the batch decodes
        self._completions = self._logged()

    def __next__(self) -> Completion:
        return next(self._completions)

    def compile(self) -> None:
        """Compiles what the waiting prompts take, so that what follows can be timed."""
        buckets = {bucket(len(prompt)): prompt for prompt in map(self._prompt, self._waiting)}
        if not buckets:
            return
        state, newcomers = self._idle(), self._refill * self._job.pair.shards.count
        for prompt in buckets.values():
            rows = self._job.read([prompt] * newcomers, self._request([None] * newcomers))
            state = self._job.loop.insert(state, rows, [NOWHERE] * newcomers)
        if self._job.stops.texts:
            state = self._job.end(state, [None] * len(self._rows))
        jax.block_until_ready(self._job.run(state, 0).lengths_B)

    def close(self) -> None:
        """Leaves what is still to come undone; the log has what was handed out."""
        self._completions.close()
        if self._log is not None:
            self._log.close()

    def _logged(self) -> Iterator[Completion]:
        try:
            yield from self._done.values()
            yield from self._run()
        finally:
            if self._log is not None:
                self._log.close()

    def _run(self) -> Iterator[Completion]:
        if not self._waiting:
            return
        state, ended = self._idle(), []
        rounds_B = np.zeros(len(self._rows), int)  # that each row has been busy for
        while True:
            state, places = self._fill(state)
            rounds_B[places] = 0
            running = sum(row is not None for row in self._rows)
            if running:
                enough = running - self._refill * self._job.pair.shards.count + 1
                state = self._job.run(state, self._rounds, max(enough, 1))
            for completion in ended if self._log is not None else ():  # the device is at work
                self._log.add(completion)
            yield from ended
            if not running:
                return
            before_B, rounds_B = rounds_B, to_host(state.stats.rounds_B).astype(int)
            texts = self._job.texts(state, self._rows)
            # A string that ended a text may have been found some rounds later.
            lost = [0 if text is None else rounds - text.stats.rounds for text, rounds in zip(texts, rounds_B)]
            self.usage.add(rounds_B - before_B, sum(lost), bool(self._waiting))
            if self._job.stops.texts:
                state = self._job.end(state, texts)
            ended = []
            for place, text in enumerate(texts):
                if text is not None and text.finish != Finish.RUNNING:
                    ended.append(self._job.completion(self._rows[place], text))
                    self._rows[place] = None

    def _idle(self) -> DecodeState:
        """Returns a state whose rows have all ended: one short prompt is read, and copied."""
        shards, rows = self._job.pair.shards.count, len(self._rows)
        return self._job.read([[0]] * shards, self._request([None] * rows), rows // shards)

    def _fill(self, state: DecodeState) -> tuple[DecodeState, list[int]]:
        """Reads waiting prompts into free rows, as many per data shard at a time; returns which rows are new."""
        shards = self._job.pair.shards.count
        per_shard, filled = len(self._rows) // shards, []
        while self._waiting and None in self._rows:
            rows, at = [], []  # the job's rows of one call, and their places within each shard
            for shard in range(shards):
                free = [n for n in range(per_shard) if self._rows[shard * per_shard + n] is None]
                for n in (free + [NOWHERE] * self._refill)[: self._refill]:
                    row = self._waiting.popleft() if n != NOWHERE and self._waiting else None
                    rows.append(row)
                    at.append(NOWHERE if row is None else n)
                    if row is not None:
                        self._rows[shard * per_shard + n] = row
                        filled.append(shard * per_shard + n)
            newcomers = self._job.read(list(map(self._prompt, rows)), self._request(rows))
            state = self._job.loop.insert(state, newcomers, at)
        return state, filled

    def _request(self, rows: Sequence[int | None]) -> Request:
        """Returns what is asked of some rows of the job; of None, nothing."""
        taken = np.array([row or 0 for row in rows])
        request = jax.tree.map(lambda leaf: leaf[taken], self._job.request)
        is_asked = np.array([row is not None for row in rows])
        return dataclasses.replace(request, limits_B=jnp.where(is_asked, request.limits_B, 0))

    def _prompt(self, row: int | None) -> Sequence[int]:
        return [0] if row is None else self._job.prompts[row // self._job.num_samples]

    def _index(self, row: int) -> tuple[int, int]:
        return row // self._job.num_samples, row % self._job.num_samples
