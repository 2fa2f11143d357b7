"""Many prompts over a fixed number of rows: a row that ends hands over its text and takes the next prompt.

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
from specsamp.decoding.engine import Engine
from specsamp.decoding.method import Decoding, make_method
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import Prompt, Request, make_requests, with_samples
from specsamp.decoding.results import Completion
from specsamp.mesh.distributed import from_first
from specsamp.serving.batch import Batch, Usage
from specsamp.serving.log import CompletionLog
from specsamp.serving.schedule import ROUNDS_PER_LOOK, FirstCome, Schedule, Served

DEFAULT_ROWS = 8
TOGETHER = 4  # prompts of a data shard that are read in one call, where so many wait and rows are free
MAX_TEXTS = 1 << 22  # of a call: the host holds a request for each
LOST = 0.05  # of a row's rounds, at most: between a string that ends its text and the next look for it


class Clock:
    """A monotonic clock in seconds, which tests can replace."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


def generate_many(
    pair: Pair,
    prompts: Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 128,
    *,
    rows: int = DEFAULT_ROWS,
    refill: int = 1,
    rounds_per_slice: int | None = None,
    log: CompletionLog | str | os.PathLike | None = None,
    schedule: Schedule = FirstCome(),
    arrivals: Sequence[float] | None = None,
    clock: Clock = Clock(),
    seed: int = 0,
    stop: Sequence[int | str] | None = None,
    num_samples: int = 1,
    return_log_probs: bool = False,
    prompt_ids: Sequence[int] | None = None,
    **decoding: Unpack[Decoding],
) -> Queue:
    """Does what `generate` does, ``rows`` texts at a time: the same completions, in the order in which they end.

    A prompt has the same completion with any number of rows and in any order of prompts, unless the drafter looks at
    several rows at once (`Completion.row_independent`). ``decoding`` (method, or
    sampling, draft_sampling, draft_length, rule, drafter; and require_exact) and all else is as in `generate`.

    Args:
      rows: texts that are decoded together; rounded up to a multiple of the data shards.
      refill: rows of a data shard whose prompts are read in one call. The loop returns once so many have ended: more
        than 1 leaves rows idle for longer. Four rows that are free at once are read in one call anyway.
      rounds_per_slice: the loop returns at the latest after so many rounds; default never, or every few rounds where
        prompts have arrivals or strings end texts (the shorter these are, the fewer).
      log: a file of completions, or its path: what ends is added to it, and what it holds is not decoded again. With a
        path, all parameters are read once, so that a file of other parameters is refused.
      schedule: decides which text is decoded first, and which is preempted; for this call alone, as it may learn.
      arrivals: for each prompt, when it is there to be decoded, in seconds from the first `next` on; default at once.
      clock: of arrivals and `Queue.served`.

    Returns:
      An iterator of completions, whose `Queue.usage` says how busy the rows were.

    Raises:
      ValueError: before compilation, naming the value and the fix; or the log is of another call.
    """
    use_compilation_cache()
    rows, refill = validate.integer("rows", rows, 1), validate.integer("refill", refill, 1)
    if rounds_per_slice is not None:
        rounds_per_slice = validate.integer("rounds_per_slice", rounds_per_slice, 1)
    method = make_method(pair, **decoding)
    requests = make_requests(pair, method, prompts, max_new_tokens, seed=seed, stop=stop, prompt_ids=prompt_ids)
    num_samples = validate.integer("num_samples", num_samples, 1)
    validate.integer("prompts times num_samples", len(requests) * num_samples, 1, MAX_TEXTS)
    requests = with_samples(requests, num_samples)
    rows = min(rows, len(requests))
    spare = max(refill, TOGETHER) * pair.shards.count
    engine = Engine.create(pair, method, requests, batch=rows, spare=spare, keep_log_probs=return_log_probs)
    if arrivals is not None:
        arrivals = np.asarray(arrivals).tolist()
        if not isinstance(arrivals, list):
            raise ValueError(f"arrivals must be a list of seconds; got {arrivals!r}")
        if len(arrivals) != len(prompts):
            raise ValueError(f"{len(arrivals)} arrivals for {len(prompts)} prompts: give each prompt one")
        for request in requests:
            seconds = arrivals[request.prompt_index]
            request.arrived = validate.number(f"arrivals[{request.prompt_index}]", seconds, 0)
    if log is not None:
        log = log if isinstance(log, CompletionLog) else CompletionLog(log)
        log.open(engine, requests)
    looks = engine.rounds_per_look(requests)
    rounds = rounds_per_slice or (looks if arrivals is None else min(looks, ROUNDS_PER_LOOK))
    batch = Batch(engine, rows=rows, refill=refill, schedule=schedule, together=TOGETHER)
    adapts = rounds_per_slice is None and bool(requests[0].stops.texts)
    return Queue(engine, requests, batch, schedule, rounds=rounds, adapts=adapts, log=log, clock=clock)


class Queue(Iterator[Completion]):
    """Completions of requests, in the order in which they end; see `generate_many`.

    While the device works, the caller has the completions.

    Attributes:
      known: the number of completions that come from the log.
      served: when texts arrived and ended, by prompt and sample.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        batch: Batch,
        schedule: Schedule,
        *,
        rounds: int,
        adapts: bool,
        log: CompletionLog | None,
        clock: Clock,
    ):
        """Makes a queue that decodes nothing before the first `next`.

        Args:
          rounds: the most rounds of a slice.
          adapts: whether slices become shorter where texts are short.
        """
        self.served: dict[tuple[int, int], Served] = {}
        self._engine, self._batch, self._log, self._clock = engine, batch, log, clock
        self._rounds, self._adapts = rounds, adapts
        self._looks = any(request.stops.texts for request in requests)  # for strings that end texts
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
        self._ended = self._rounds_of_ended = 0  # texts, and their rounds
        self._completions = self._logged()

    @property
    def usage(self) -> Usage:
        """Returns the counts of the rows so far."""
        return self._batch.usage

    def __next__(self) -> Completion:
        return next(self._completions)

    def compile(self) -> None:
        """Compiles what the waiting prompts take, so that what follows can be timed."""
        if self._to_come:
            self._batch.compile([request.prompt for request in self._to_come], self._looks)

    def close(self) -> None:
        """Leaves what is still to come undone; the log has what was handed out."""
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
        batch, ended, begin = self._batch, [], self._clock.now()
        while True:
            if self._to_come:  # processes must agree on what has arrived
                now = from_first(lambda: self._clock.now() - begin)
                while self._to_come and self._to_come[0].arrived <= now:
                    batch.waiting.append(self._to_come.popleft())
            if batch.waiting:
                batch.fill()
            is_running = any(batch.running)
            if is_running:
                batch.run(self._rounds_of_slice())
            for completion in ended if self._log is not None else ():  # the device is at work
                self._log.add(completion)
            yield from ended
            ended = []
            if not is_running:
                if not self._to_come:
                    return
                self._clock.wait(max(begin + self._to_come[0].arrived - self._clock.now(), 0.0))
                continue
            state = batch.fetch(always=self._looks)
            if state is None:
                continue
            texts = [
                None if request is None else self._engine.text(state, place, request)
                for place, request in enumerate(batch.running)
            ]
            for request, text in batch.settle(texts):
                ended.append(Completion.of(request, text, self._engine.method))
                self._ended, self._rounds_of_ended = self._ended + 1, self._rounds_of_ended + text.stats.rounds
                times = {"arrived": request.arrived, "ended": self._clock.now() - begin}
                self.served[_index(request)] = Served(**times, emitted=request.emitted)

    def _rounds_of_slice(self) -> int:
        """Returns the most rounds of the next slice.

        A string that ends a text is found half a slice late, on average. Where texts are short, slices are: at most a
        twentieth of a row's rounds is lost.
        """
        if not self._adapts or not self._ended:
            return self._rounds
        return min(self._rounds, 1 + int(2 * LOST * self._rounds_of_ended / self._ended))


def _index(request: Request) -> tuple[int, int]:
    return request.prompt_index, request.sample_index
