"""Decodes many prompts over a fixed number of rows: a row that ends takes the next prompt.

for completion in generate_many(pair, prompts, rows=8):
    print(completion.prompt_index, completion.text)
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Iterator, Sequence
from typing import Unpack

import numpy as np

from specsamp import validate
from specsamp.compilation_cache import use_compilation_cache
from specsamp.decoding.engine import MANY_ROUNDS, Engine
from specsamp.decoding.method import Decoding, make_method
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import Prompt, Request, make_requests, with_samples
from specsamp.decoding.results import Completion
from specsamp.decoding.state import Finish
from specsamp.mesh.distributed import from_first
from specsamp.serving.batch import Batch
from specsamp.serving.log import CompletionLog
from specsamp.serving.schedule import ROUNDS_PER_LOOK, FirstCome, Schedule

DEFAULT_ROWS = 8
TOGETHER = 4  # prompts of a data shard that are read in one call, where so many wait and rows are free
MAX_TEXTS = 1 << 22  # of a call: the host holds a request for each


def generate_many(
    pair: Pair,
    prompts: Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 128,
    *,
    rows: int = DEFAULT_ROWS,
    rounds_per_slice: int | None = None,
    log: CompletionLog | str | os.PathLike | None = None,
    schedule: Schedule = FirstCome(),
    arrivals: Sequence[float] | None = None,
    seed: int = 0,
    stop: Sequence[int | str] | None = None,
    num_samples: int = 1,
    return_log_probs: bool = False,
    prompt_ids: Sequence[int] | None = None,
    **decoding: Unpack[Decoding],
) -> Queue:
    """Does what `generate` does, ``rows`` texts at a time: the same completions, in the order in which they end.

    A prompt has the same completion with any number of rows and in any order of prompts, unless the drafter looks at
    several rows at once (`Completion.row_independent`). All other arguments are as in `generate`.

    Args:
      rows: texts that are decoded together; rounded up to a multiple of the data shards.
      rounds_per_slice: the most rounds between two returns of the loop. By default it returns when rows have ended, and
        every few rounds where prompts have arrivals or strings end texts.
      log: a file of completions, or its path: completions are added to it, and are not decoded again by the next run.
        With a path, all parameters are read once, so that a file of other parameters is refused.
      schedule: decides which text is decoded first, and which is preempted. It may learn, so each call needs another.
      arrivals: when each prompt arrives, in seconds after the first `next`; default at once.

    Returns:
      An iterator of completions, whose `Queue.usage` says how busy the rows were.

    Raises:
      ValueError: before compilation, naming the value and the fix; or the log is of another call.
    """
    use_compilation_cache()
    rows = validate.integer("rows", rows, 1)
    if rounds_per_slice is not None:
        rounds_per_slice = validate.integer("rounds_per_slice", rounds_per_slice, 1)
    method = make_method(pair, **decoding)
    requests = make_requests(pair, method, prompts, max_new_tokens, seed=seed, stop=stop, prompt_ids=prompt_ids)
    num_samples = validate.integer("num_samples", num_samples, 1)
    validate.integer("prompts times num_samples", len(requests) * num_samples, 1, MAX_TEXTS)
    requests = with_samples(requests, num_samples)
    rows = min(rows, len(requests))
    spare = TOGETHER * pair.shards.count
    engine = Engine.create(pair, method, requests, batch=rows, spare=spare, keep_log_probs=return_log_probs)
    if arrivals is not None:
        arrivals = np.asarray(arrivals).tolist()
        if not isinstance(arrivals, list) or len(arrivals) != len(prompts):
            raise ValueError(f"arrivals must be {len(prompts)} seconds, a number per prompt; got {arrivals!r:.60}")
        for request in requests:
            seconds = arrivals[request.prompt_index]
            request.arrived = validate.number(f"arrivals[{request.prompt_index}]", seconds, 0)
    if log is not None:
        log = log if isinstance(log, CompletionLog) else CompletionLog(log)
        log.open(engine, requests)
    rounds = rounds_per_slice or (MANY_ROUNDS if arrivals is None else ROUNDS_PER_LOOK)
    batch = Batch(engine, rows=rows, schedule=schedule, together=TOGETHER)
    return Queue(engine, requests, batch, schedule, rounds, log)


class Queue(Iterator[Completion]):
    """Completions of requests, in the order in which they end; see `generate_many`.

    The caller gets the completions of a slice while the device works on the next.

    Attributes:
      known: the number of completions that come from the log.
      usage: how busy the rows were so far.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        batch: Batch,
        schedule: Schedule,
        rounds: int,
        log: CompletionLog | None,
    ):
        """Makes a queue that decodes nothing before the first `next`, in slices of at most ``rounds`` rounds."""
        self._engine, self._batch, self._log, self.usage = engine, batch, log, batch.usage
        self._rounds = rounds
        self._done = {} if log is None else dict(log.completions)
        self.known = len(self._done)
        to_come = []
        for request in requests:
            done = self._done.get(_index(request))
            if done is None:
                to_come.append(request)
            else:
                request.emitted = len(done.tokens)
                schedule.finish(request)
        self._to_come = collections.deque(sorted(to_come, key=lambda request: request.arrived))
        self._completions = self._logged()

    def __next__(self) -> Completion:
        return next(self._completions)

    def compile(self) -> None:
        """Compiles all programs for the waiting prompts, so that decoding can be timed."""
        if self._to_come:
            self._batch.compile([request.prompt for request in self._to_come])

    def close(self) -> None:
        """Ends the queue before all prompts are decoded; the log has the completions so far."""
        self._completions.close()
        self._free()

    def _free(self) -> None:
        self._batch.free()
        if self._log is not None:
            self._log.close()

    def _logged(self) -> Iterator[Completion]:
        try:
            yield from self._done.values()
            yield from self._run()
        finally:
            self._free()

    def _run(self) -> Iterator[Completion]:
        batch, ended, begin = self._batch, [], time.monotonic()
        while True:
            if self._to_come:  # processes must agree on which prompts have arrived
                now = from_first(lambda: time.monotonic() - begin)
                while self._to_come and self._to_come[0].arrived <= now:
                    batch.waiting.append(self._to_come.popleft())
            if batch.waiting:
                batch.fill()
            is_running = any(batch.running)
            if is_running:
                batch.run(self._rounds)
            for completion in ended if self._log is not None else ():  # the device is at work
                self._log.add(completion)
            yield from ended
            ended = []
            if not is_running:
                if not self._to_come:
                    return
                time.sleep(max(begin + self._to_come[0].arrived - time.monotonic(), 0.0))
                continue
            for request, text in batch.collect(self._engine.text):
                if text.finish != Finish.RUNNING:
                    ended.append(Completion.of(request, text, self._engine.method))


def _index(request: Request) -> tuple[int, int]:
    return request.prompt_index, request.sample_index
