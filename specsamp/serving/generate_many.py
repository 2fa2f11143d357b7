"""Decodes many prompts over a fixed number of rows: a row that ends takes the next prompt.

for completion in generate_many(pair, prompts, rows=8):
    print(completion.prompt_index, completion.text)
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Unpack

from specsamp import validate
from specsamp.compilation_cache import use_compilation_cache
from specsamp.decoding.engine import Engine
from specsamp.decoding.method import Decoding, Method, make_method
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import Prompt, Request, make_requests, with_samples
from specsamp.decoding.results import Completion, RowText
from specsamp.decoding.state import DecodeState, Finish
from specsamp.serving.batch import Batch
from specsamp.serving.completion_log import CompletionLog
from specsamp.serving.intake import Intake
from specsamp.serving.learner import Learner, check_learner
from specsamp.serving.orders import FirstCome, Order
from specsamp.serving.sampling_request import SamplingRequest
from specsamp.serving.scheduler import Entry

DEFAULT_ROWS = 8
# Prompts of a data shard that are read in one call, if as many rows are free.
TOGETHER = 4
MAX_TEXTS = 1 << 22  # the most completions of a call: each has a request on the host


def generate_many(
    pair: Pair,
    prompts: Sequence[Prompt] | Sequence[SamplingRequest],
    max_new_tokens: int | Sequence[int] = 128,
    *,
    rows: int = DEFAULT_ROWS,
    log: CompletionLog | str | os.PathLike | None = None,
    learner: Learner | None = None,
    order: Order = FirstCome(),
    seed: int = 0,
    stop: Sequence[int | str] | None = None,
    num_samples: int = 1,
    return_log_probs: bool | str = False,
    prompt_ids: Sequence[int] | None = None,
    **decoding: Unpack[Decoding],
) -> Queue:
    """Returns the completions of `generate`, decoded ``rows`` at a time, in the order in which they
    end.

    A prompt has the same completion with any number of rows and in any order of prompts, unless the
    drafter uses several rows at once (`Completion.row_independent`). All other arguments are as
    in `generate`.

    Args:
      prompts: as in `generate`; or requests with sampling, seeds and ends of their own, whose texts
        are those of `Service`. Prompts are numbered over all requests then.
      rows: texts that are decoded together; rounded up to a multiple of the data shards.
      log: a file of completions, or its path: completions are added to it, and are not decoded
        again by the next run. With a path, all parameters are read once, so that a file of other
        parameters is refused.
      learner: is called with each finished text and may return new parameters of the draft model,
        as `specsamp.training.online.DraftLearner` does. Texts keep their distribution, but a seed
        gives another text. Do not decode again with this seed and prompt ids: the draft depends on
        their noise. An error of the learner ends the queue after the completions before it were
        logged and returned.

      order: of the requests, such as `specsamp.serving.orders.ShortestFirst`. It may learn, so that
        each call needs its own.

    Returns:
      An iterator of completions, whose `Queue.usage` has the counts of busy rows.

    Raises:
      ValueError: before compilation, naming the value and the fix; or the log is of another call.
    """
    use_compilation_cache()
    rows = validate.integer("rows", rows, 1)
    method = make_method(pair, **decoding)
    validate.instance("order", order, Order, "ShortestFirst()")
    if (
        validate.is_list(prompts)
        and len(prompts)
        and all(isinstance(one, SamplingRequest) for one in prompts)
    ):
        of_prompts = max_new_tokens, log, seed, stop, num_samples, prompt_ids
        if of_prompts != (128, None, 0, None, 1, None):
            raise ValueError(
                "sampling requests have budgets, seeds, stops and samples of their own: leave out "
                "max_new_tokens, log, seed, stop, num_samples and prompt_ids"
            )
        asked = list(prompts)
        check_learner(learner, method)
        method, requests = _make_all(pair, method, asked, learner is not None)
    else:
        asked = []
        requests = make_requests(
            pair, method, prompts, max_new_tokens, seed=seed, stop=stop, prompt_ids=prompt_ids
        )
        num_samples = validate.integer("num_samples", num_samples, 1)
        validate.integer("prompts times num_samples", len(requests) * num_samples, 1, MAX_TEXTS)
        check_learner(learner, method, [request.prompt_id for request in requests])
        requests = with_samples(requests, num_samples)
    for request in requests:
        order.check(request)
    rows = min(rows, len(requests))
    spare = TOGETHER * pair.shards.count
    engine = Engine.create(
        pair, method, requests, batch=rows, spare=spare, keep_log_probs=return_log_probs
    )
    if log is not None:
        if any(one.sampling.asks_host for one in requests):
            raise ValueError("a log cannot distinguish grammars: leave out log, or the grammar")
        log = log if isinstance(log, CompletionLog) else CompletionLog(log)
        log.open(engine, requests)
    if any(request.draft_length is not None for request in requests):
        engine = dataclasses.replace(engine, own_lengths=True)
    batch = Batch(engine, rows=rows, together=TOGETHER, order=order)
    return Queue(engine, requests, batch, log, learner, asked)


def _make_all(
    pair: Pair, method: Method, asked: Sequence[SamplingRequest], learns: bool
) -> tuple[Method, list[Request]]:
    """Returns the method and the requests of a service, with prompts numbered over all requests."""
    has_grammars = any(one.grammar is not None for one in asked)
    intake = Intake(pair, method, context=None, has_grammars=has_grammars, learns=learns)
    requests = []
    count = 0
    for one in asked:
        if one.is_streamed or one.is_scored:
            raise ValueError("generate_many neither streams nor scores: leave both out")
        for request in intake.make(one, one):
            request.prompt_index += count
            requests.append(request)
        count += len(one.prompts)
    return intake.method, requests


class Queue(Iterator[Completion]):
    """Completions of requests, in the order in which they end; see `generate_many`.

    The completions of a step are returned while the device computes the next.

    Attributes:
      batch: the rows.
      known: the number of completions of the log.
      usage: the counts of busy rows.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        batch: Batch,
        log: CompletionLog | None = None,
        learner: Learner | None = None,
        asked: Sequence[SamplingRequest] = (),
    ):
        """Makes a queue that decodes nothing before the first `next`.

        ``asked`` has the sampling requests of the requests; grammars live as long as these.
        """
        self._asked = asked
        self.batch, self.usage = batch, batch.usage
        known = {} if log is None else dict(log.completions)
        self.known = len(known)
        batch.scheduler.waiting += [
            Entry(one) for one in requests if (one.prompt_index, one.sample_index) not in known
        ]
        owners = [one for one in asked for _ in one.prompts]
        for entry in batch.scheduler.waiting if owners else ():
            owner = owners[entry.request.prompt_index]
            entry.client = owner.client
            entry.priority = owner.priority
        if owners:
            batch.scheduler.sort()
        # Without the queue, so that a queue that is dropped frees its rows and its log at once.
        self._completions = _decode(engine, batch, log, learner, list(known.values()))
        self._log = log

    def __next__(self) -> Completion:
        return next(self._completions)

    def compile(self) -> None:
        """Compiles all programs for the waiting prompts, so that decoding can be timed."""
        if self.batch.scheduler.waiting:
            self.batch.compile()

    def close(self) -> None:
        """Ends the queue before all prompts are decoded; the log keeps its completions."""
        self._completions.close()
        _free(self.batch, self._log)  # also if nothing was decoded


def _free(batch: Batch, log: CompletionLog | None) -> None:
    """Frees the memory of the rows, and unlocks the log."""
    batch.free()
    if log is not None:
        log.close()


def _decode(
    engine: Engine,
    batch: Batch,
    log: CompletionLog | None,
    learner: Learner | None,
    ended: list[Completion],
) -> Iterator[Completion]:
    """Yields the completions of the log, then decodes the missing ones step by step."""
    read = []

    def text_in(state: DecodeState, row: int, entry: Entry) -> RowText:
        return engine.text(state, row, entry.request)

    try:
        yield from ended
        ended = []
        while True:
            if batch.scheduler.waiting:
                if batch.scheduler.order.preempts:
                    batch.scheduler.sort()
                batch.fill()
            is_running = any(batch.table.entries)
            if is_running:
                batch.run()
            for completion in ended if log is not None else ():  # the device is at work
                log.add(completion)
            yield from ended
            for tokens in read:
                batch.learn(learner, tokens)
            ended, read = [], []
            if not is_running:
                return
            for entry, text in batch.collect(text_in):
                if text.finish == Finish.RUNNING:
                    continue
                completion = Completion.of(entry.request, text, engine.method)
                if learner is not None:
                    independent = engine.method.rule.draft_independent
                    completion = dataclasses.replace(completion, row_independent=independent)
                    read.append((*entry.request.prompt, *text.tokens))
                ended.append(completion)
    finally:
        _free(batch, log)
