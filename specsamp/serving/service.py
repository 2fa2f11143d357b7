"""Decodes texts for many callers: takes requests as they come, over the rows of one batch.

    service = Service(pair, Method(drafter=ModelDrafter(pair.draft, 4)), rows=8)
    service.compile()
    service.start()
    pieces = queue.SimpleQueue()
    service.ask(["def f"], 64, sampling=chain(temperature(0.8)), deliver=pieces.put)

A text equals that of `generate` with the same seed. One thread does all the work on the batch, a
slice of a few rounds at a time (`specsamp.serving.batch`); callers may be any threads.

Every process runs a service with its batch; process 0 accepts all requests. Before each slice it
broadcasts new and cancelled requests, so that all batches make the same decisions. An error that
may have occurred in one process alone ends the service.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from specsamp import validate
from specsamp.compilation_cache import use_compilation_cache
from specsamp.decoding.drafter import hooks_of
from specsamp.decoding.engine import Engine, context_of, round_slots
from specsamp.decoding.method import EXAMPLE, Method, make_method
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import (
    Prompt,
    encode,
    make_requests,
    make_stops,
    with_samples,
)
from specsamp.decoding.results import Chunk, RowText
from specsamp.decoding.state import DecodeState, Finish
from specsamp.decoding.text import Stops
from specsamp.mesh import distributed
from specsamp.sampling.grammar import Follow, fault, no_grammar, release
from specsamp.sampling.grammar import grammar as make_grammar
from specsamp.sampling.penalties import Yielding
from specsamp.sampling.warp import Warp, chain
from specsamp.serving.answer import Answer, Busy, Failed, News, TooLong, Unmet
from specsamp.serving.batch import Batch
from specsamp.serving.learner import Learner, check_learner
from specsamp.serving.prefill import chunk_sizes
from specsamp.serving.request_warps import exclude_early
from specsamp.serving.scheduler import Entry
from specsamp.serving.scores import Scores

MAX_STOPS = 32  # stop strings of a request; tasks of lm-eval send up to 6
MAX_STOP_IDS = 16  # stop tokens of a request
IDLE_SECONDS = 5  # heartbeat interval of process 0


class Service:
    """Decodes the texts of many requests over the rows of one batch.

    Attributes:
      pair: the models.
      batch: the rows and their counts; the service's thread changes it.
      method: drafter and rule of all requests.
      context: the most tokens of a prompt and its text together.
      learner: updates the draft from finished texts; None: off, or it has failed.
      repeats: whether a seed gives the same text again. It does not if the draft is updated or
        depends on other texts, unless the rule ignores drafts; the seeds of requests are not used
        then.
      capacity: the most unfinished texts.
      max_per_client: the most unfinished texts of a client.
      failed: the error that ended the thread, or None.
    """

    def __init__(
        self,
        pair: Pair,
        method: Method,
        *,
        rows: int = 8,
        context: int | None = None,
        max_waiting: int = 64,
        max_per_client: int | None = None,
        rounds_per_slice: int = 4,
        in_background: bool = True,
        learner: Learner | None = None,
        has_grammars: bool = False,
    ):
        """Makes a service, which `start` begins.

        Args:
          method: drafter and rule; requests have the same kinds of warps, with other numbers.
          rows: texts that are decoded together; rounded up to a multiple of the data shards.
          context: default 4096, or as many as the models have positions for.
          max_waiting: the most queued texts; more are refused.
          max_per_client: the most unfinished texts of a client; default ``capacity``.
          rounds_per_slice: the most rounds between two deliveries to streams, and two searches for
            free rows.
          in_background: whether programs of further sizes are compiled during decoding; never on a
            mesh.
          learner: see `specsamp.serving.generate_many`.
          has_grammars: whether requests may have grammars; programs are not kept in the
            compilation cache then.

        Raises:
          ValueError: naming the value and the fix.
        """
        self._is_shared = jax.process_count() > 1
        if self._is_shared and learner is not None:
            raise ValueError(
                "a draft is updated in one process: leave out learner, or --distributed and "
                "--coordinator"
            )
        if has_grammars and pair.shards.mesh is not None:
            raise ValueError("grammars are served on one device: leave out --grammars, or the mesh")
        use_compilation_cache()
        rows = validate.integer("rows", rows, 1)
        max_waiting = validate.integer("max_waiting", max_waiting, 0)
        rounds = validate.integer("rounds_per_slice", rounds_per_slice, 1)
        self.pair, self.method = (
            pair,
            make_method(pair, method=validate.instance("method", method, Method, EXAMPLE)),
        )
        check_learner(learner, method)
        self.has_grammars = has_grammars
        is_alone = learner is None and hooks_of(method.drafter).row_independent
        self.learner, self.repeats = learner, is_alone or method.rule.draft_independent
        self.context = context_of(pair, method.drafter, "context", context)
        self._stop_ids = sorted(make_stops(pair, None).ids)
        self._most_stop_ids = len(self._stop_ids) + MAX_STOPS + MAX_STOP_IDS
        self._engine = self._make_engine(rows)
        # On a mesh, programs of two threads could run in another order on each device.
        in_background = in_background and pair.shards.mesh is None
        self.batch = Batch(self._engine, rows=rows, rounds=rounds, in_background=in_background)
        self.batch.sizes.programs.notify = self._wake
        self.capacity = self.batch.usage.rows + max_waiting
        most = self.capacity if max_per_client is None else max_per_client
        self.max_per_client = validate.integer("max_per_client", most, 1)
        self._to_score: list[tuple[Entry, Chunk]] = []  # finished texts
        self._scoring: dict[Entry, Iterator[Scores | None]] = {}  # the first finished text
        self._numbers = itertools.count()  # shared by all processes
        self._changed = threading.Condition()  # guards the next two
        self._inbox: list[Entry] = []
        self._closed: str | None = None  # the reason
        self.failed: str | None = None
        self._thread = threading.Thread(target=self._work, name="specsamp service", daemon=True)

    def _make_engine(self, rows: int) -> Engine:
        loop = self.method.loop(self.pair, keep_log_probs=True, keep_rounds=True)
        method = self._method(self.method.sampling, make_stops(self.pair, None))
        engine = Engine.create(
            self.pair,
            method,
            make_requests(self.pair, method, [[0]], 1, stop=self._stop_ids),
            batch=rows,
            spare=self.pair.shards.count,
            slots=round_slots(
                max(self.context + max(loop.headroom, chunk_sizes()[0]), loop.window)
            ),
            stop_ids=self._most_stop_ids,
            keep_log_probs=True,
            keep_rounds=True,
        )
        return dataclasses.replace(engine, own_lengths=hooks_of(self.method.drafter).depth is None)

    def _method(self, sampling: Warp, stops: Stops, follow: Follow | None = None) -> Method:
        """Returns the method with this sampling, after warps that follow a grammar, and exclude
        stop tokens from the start.
        """
        first = [follow or no_grammar()] if self.has_grammars else []
        early = exclude_early(stops, self._most_stop_ids)
        warp = chain(*first, Yielding(early) if self.has_grammars else early, sampling)
        return dataclasses.replace(self.method, sampling=warp)

    def compile(self) -> None:
        """Compiles the smallest size; larger sizes are compiled on first use."""
        self.batch.compile()

    def start(self) -> None:
        """Begins to take requests."""
        self._thread.start()

    def close(self, reason: str = "the service was closed") -> int:
        """Ends all texts with this reason for their callers; returns their number."""
        with self._changed:
            self._closed, left = self._closed or reason, self.unfinished
            self._changed.notify()
        return left

    def join(self) -> None:
        """Waits, after `close`, for the end of the slice that runs."""
        if self._thread.is_alive():
            self._thread.join()
        self.batch.sizes.programs.close()

    @property
    def unfinished(self) -> int:
        """Returns the number of running and queued texts."""
        return len(self._entries())

    def _entries(self) -> list[Entry]:
        """Returns the unfinished requests."""
        scheduler, ended = self.batch.scheduler, [entry for entry, _ in self._to_score]
        return [*self._inbox, *scheduler.waiting, *scheduler.active, *ended]

    def ask(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int | None,
        *,
        deliver: Callable[[Chunk | Failed], None],
        sampling: Warp | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        min_tokens: int = 0,
        draft_length: int | None = None,
        num_samples: int = 1,
        is_streamed: bool = False,
        client: str = "",
        is_scored: bool = False,
        grammar: tuple[str, Any] | None = None,
    ) -> Answer:
        """Queues a request; all other arguments are as in `generate`.

        Args:
          max_new_tokens: per text; None: up to the end of the context.
          deliver: called with each chunk, the last of each text with its finish, or with a
            `Failed`. The service's thread calls it, so it must return at once.
          sampling: of the same kinds as the service's method, which is the default.
          stop, stop_ids: at most 32 strings and 16 tokens, in addition to the pair's stop tokens.
          ignore_eos: whether the pair's stop tokens end nothing.
          min_tokens: the least tokens of a text: stop tokens are excluded from them, and no string
            ends in them. The end of a grammar ends the text anyway.
          draft_length: tokens to draft in a round, at most the drafter's K; a text is that of
            `generate` with this length.
          is_streamed: whether chunks are delivered while a text grows.
          client: name of the caller; clients get free rows in turn.
          is_scored: whether to score prompts and texts (`specsamp.serving.scores`); texts are not
            streamed then.
          grammar: kind and source of the grammar of all texts, see
            `specsamp.sampling.grammar.grammar`.

        Raises:
          ValueError: naming the value and the fix.
          Busy: the queue is full.
          Failed: the service is closed.
        """
        if jax.process_index() > 0:
            raise ValueError("process 0 accepts all requests: send this one there")
        num_samples = validate.integer("num_samples", num_samples, 1)
        draft_length = self._check_limits(prompts, stop, stop_ids, draft_length)
        count = len(prompts) * num_samples
        if count > self.capacity:
            raise ValueError(
                f"the request needs {count} completions; the limit is {self.capacity}: request "
                "fewer"
            )
        self._check_room(count, client)  # before prompts are encoded, which takes time
        if not self.repeats:
            # A draft that was updated with a text, or looks in it, depends on its random numbers.
            # If they verified proposals of this draft again, texts would not follow the target;
            # and callers repeat seeds.
            seed = secrets.randbits(64)
        prompts = encode(self.pair, prompts)
        budgets = [
            self._budget(index, len(tokens), max_new_tokens) for index, tokens in enumerate(prompts)
        ]
        stop = [*(() if ignore_eos else self._stop_ids), *stop_ids, *stop]
        stops = make_stops(self.pair, stop, validate.integer("min_tokens", min_tokens, 0))
        number = next(self._numbers) if self._is_shared else None
        answer = Answer([], deliver, is_streamed, client, is_scored, number=number)
        follow = None if grammar is None else self._start_grammar(answer, stops, *grammar)
        method = self._method(self.method.sampling if sampling is None else sampling, stops, follow)
        requests = make_requests(self.pair, method, prompts, budgets, seed=seed, stop=stops)
        answer.requests = requests = with_samples(requests, num_samples)
        if jax.tree.map(np.shape, requests[0].sampling) != jax.tree.map(
            np.shape, self._engine.idle.sampling
        ):
            raise ValueError(
                f"sampling must be of the kinds of warps in {self.method.sampling!r}; got "
                f"{sampling!r}"
            )
        for request in requests:
            request.draft_length = draft_length
        with self._changed:
            self._check_room(count, client)
            self._inbox += [Entry(request, client, answer) for request in requests]
            self._changed.notify()
        return answer

    def _start_grammar(self, answer: Answer, stops: Stops, kind: str, source: Any) -> Follow:
        """Returns the warp of a grammar, which is kept as long as the answer."""
        if not self.has_grammars:
            raise ValueError("grammars are not served here: start the server with --grammars")
        follow = make_grammar(self.pair.tokenizer, kind, source, ends=sorted(stops.ids))
        weakref.finalize(answer, release, follow)
        return follow

    def _check_limits(
        self, prompts: Any, stop: Any, stop_ids: Any, draft_length: int | None
    ) -> int | None:
        """Raises ValueError for wrong types and long lists; returns the draft length."""
        for name, value in (("prompts", prompts), ("stop", stop), ("stop_token_ids", stop_ids)):
            if not validate.is_list(value):
                raise ValueError(f"{name} must be a list; got {value!r}")
        if len(stop) > MAX_STOPS:
            raise ValueError(f"{len(stop)} stop texts: at most {MAX_STOPS}")
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"{len(stop_ids)} stop_token_ids: at most {MAX_STOP_IDS}")
        if draft_length is not None:
            if not self._engine.own_lengths:
                raise ValueError(
                    f"draft_length = {draft_length!r}, but this server drafts trees: leave it out"
                )
            draft_length = validate.integer(
                "draft_length", draft_length, 0, self.method.drafter.K + 1
            )
        return draft_length

    def _check_room(self, count: int, client: str) -> None:
        """Raises Failed after `close`, and Busy if the queue has no room for ``count`` texts."""
        if self._closed is not None:
            raise Failed(self._closed)
        if self.unfinished + count > self.capacity:
            raise Busy(
                f"{self.unfinished} completions are in progress; the limit is {self.capacity}: try "
                "again later"
            )
        unfinished = sum(entry.client == client for entry in self._entries())
        if unfinished + count > self.max_per_client:
            raise Busy(
                f"you have {unfinished} completions in progress; the limit per client is "
                f"{self.max_per_client}: try again later"
            )

    def _budget(self, index: int, length: int, max_new_tokens: int | None) -> int:
        """Returns the budget of a prompt with ``length`` tokens; None: the rest of the context."""
        room = self.context - length
        budget = (
            room if max_new_tokens is None else validate.integer("max_tokens", max_new_tokens, 1)
        )
        if room < 1:
            raise TooLong(
                f"prompt {index} has {length} tokens, of {self.context} for prompt and text: "
                "shorten it"
            )
        return min(budget, room)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _work(self) -> None:
        try:
            while self._wait():
                try:
                    self._slice()
                except Exception as error:  # the batch and its running texts are lost
                    if self._is_shared:
                        raise
                    logging.exception(
                        "a slice failed: running texts are lost, queued texts start again"
                    )
                    is_lost = bool(self.batch.scheduler.active)
                    self._drop(f"decoding failed: {_in_short(error)}", and_waiting=not is_lost)
                    self.batch.free()
        except BaseException as error:
            logging.exception("the service failed")
            self.failed = f"the service failed: {_in_short(error)}"
            self.close(self.failed)
        self._drop(self._closed, and_waiting=True)
        self.batch.free()

    def _wait(self) -> bool:
        """Waits for requests, and queues new ones; returns False after `close`."""
        news = distributed.from_first(self._news)
        if jax.process_index() > 0:
            self._closed = news.closed
            for answer in news.answers:
                for request in answer.requests:
                    request.tokenizer = self.pair.tokenizer
                    self.batch.scheduler.waiting.append(Entry(request, answer.client, answer))
        for entry in self._entries():
            if entry.answer.number in news.left:
                entry.answer.is_over = True
        return news.closed is None

    def _news(self) -> News:
        """Waits for requests and queues them, in process 0; returns the message that the other
        processes replay.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.unfinished or self._closed, IDLE_SECONDS if self._is_shared else None
            )
            taken = (
                list(dict.fromkeys(entry.answer for entry in self._inbox))
                if self._is_shared
                else []
            )
            self.batch.scheduler.waiting += self._inbox
            self._inbox.clear()
            left = {entry.answer.number for entry in self._entries() if entry.answer.has_left}
            return News([answer.copy() for answer in taken], left - {None}, self._closed)

    def _slice(self) -> None:
        """Fills the rows, decodes a few rounds, and delivers the tokens of streams and of finished
        texts.
        """
        batch, scheduler = self.batch, self.batch.scheduler
        for entry in [entry for entry in scheduler.waiting if entry.answer.is_over]:
            scheduler.finish(entry)
        self._score_next()
        scheduler.sort()
        self._fill()
        entries = [entry for _, entry in batch.table.decoding]
        if not entries:
            with self._changed:  # their programs are being compiled
                is_held_up = scheduler.waiting or (self._to_score and not self._scoring)
                if is_held_up and not self._inbox:
                    self._changed.wait(1)
            return
        batch.run()
        answers = [entry.answer for entry in entries]
        found = batch.collect(
            self._text, always=any(answer.is_streamed or answer.is_over for answer in answers)
        )
        now = time.monotonic()
        for entry in entries:
            if entry.rounds and entry.answer.first is None:
                entry.answer.first = now
        for entry, text in found:
            if text is not None and (entry.answer.is_streamed or text.finish != Finish.RUNNING):
                chunk = Chunk.of(entry.request, text, self.method)
                if chunk is not None and chunk.finish is not None and entry.answer.is_scored:
                    self._to_score.append((entry, chunk))
                elif chunk is not None:
                    entry.answer.send(chunk)
        for entry, text in found:  # after the deliveries
            if self.learner is not None and text is not None and text.finish != Finish.RUNNING:
                self._learn((*entry.request.prompt, *text.tokens))

    def _learn(self, tokens: Sequence[int]) -> None:
        """Updates the draft from a text. A learner that raises is removed; no text is lost."""
        try:
            self.batch.learn(self.learner, tokens)
        except Exception:
            logging.exception("the learner failed: the draft is no longer updated")
            self.learner = None

    def _score_next(self) -> None:
        """Scores a chunk of the first finished text."""
        self._to_score = [
            (entry, chunk) for entry, chunk in self._to_score if not entry.answer.is_over
        ]
        if not self._to_score:
            self._scoring = {}
            return
        entry, chunk = self._to_score[0]
        tokens = [*entry.request.prompt, *chunk.tokens]
        try:
            steps = self._scoring.get(entry) or self.batch.score(tokens)
            self._scoring = {entry: steps} if steps is not None else {}
            scores = next(steps) if steps is not None else None
        except Exception as error:
            if self._is_shared:
                raise
            logging.exception("a text was not scored")
            entry.answer.send(Failed(f"the text was not scored: {_in_short(error)}"))
            return
        if scores is not None:
            del self._to_score[0]
            entry.answer.scores[entry.request] = scores
            entry.answer.send(chunk)

    def _fill(self) -> None:
        """Gives free rows to queued requests; if reading raises, its prompts fail alone."""
        try:
            self.batch.fill()
        except Exception as error:
            unread = self.batch.prefill.stop()
            if not unread or self._is_shared:
                raise
            logging.exception("a prompt was not read")
            for entry in unread:
                entry.answer.send(Failed(f"the prompt was not read: {_in_short(error)}"))

    def _text(self, state: DecodeState, row: int, entry: Entry) -> RowText | None:
        """Returns the text of a row; None if it was cancelled or has failed."""
        if entry.answer.is_over:
            return None
        try:
            text = self._engine.text(state, row, entry.request)
            if text.finish == Finish.INVALID:
                reason = fault(entry.request.sampling.warps[0]) if self.has_grammars else None
                if reason is not None:
                    entry.answer.send(Unmet(f"a text cannot follow its grammar: {reason}"))
                    return None
                raise FloatingPointError(
                    "the target's logits are NaN or infinite, or a warp has excluded every token"
                )
            return text
        except Exception as error:
            # The error may have occurred in this process alone.
            if self._is_shared and not isinstance(error, FloatingPointError):
                raise
            logging.error("a text failed: %r", error)
            entry.answer.send(Failed(f"decoding failed: {_in_short(error)}"))
            return None

    def _drop(self, reason: str, and_waiting: bool) -> None:
        """Ends all running texts, and with ``and_waiting`` all queued ones, with this reason for
        their callers.
        """
        scheduler = self.batch.scheduler
        with self._changed:
            entries = [*scheduler.active, *(entry for entry, _ in self._to_score)]
            self._to_score.clear()
            if and_waiting:
                entries += [*scheduler.waiting, *self._inbox]
                self._inbox.clear()
            for entry in entries:
                scheduler.finish(entry)
        for entry in entries:
            entry.answer.send(Failed(reason))


def _in_short(error: Any) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
