"""Decodes texts for many callers: takes requests as they come, over the rows of one batch.

    service = Service(pair, Method(drafter=ModelDrafter(pair.draft, 4)), rows=8)
    service.compile()
    service.start()
    pieces = queue.SimpleQueue()
    request = SamplingRequest(prompts=["def f"], max_new_tokens=64)
    service.submit(request, deliver=pieces.put)

A text equals that of `generate` with the same seed. One thread does all the work on the batch, a
step of a few rounds at a time (`specsamp.serving.batch`); callers may be any threads.

Every process runs a service with its batch; process 0 accepts all requests. Before each step it
broadcasts new and cancelled requests, so that all batches make the same decisions. An error that
may have occurred in one process alone ends the service.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from absl import logging

from specsamp import validate
from specsamp.compilation_cache import use_compilation_cache
from specsamp.decoding.engine import context_of
from specsamp.decoding.method import EXAMPLE, Method, make_method
from specsamp.decoding.pair import Pair
from specsamp.decoding.results import Chunk, RowText
from specsamp.decoding.state import DecodeState, Finish
from specsamp.mesh import distributed
from specsamp.sampling.grammar import Follow, fault
from specsamp.serving.answer import Answer, Busy, Failed, News, Unmet
from specsamp.serving.batch import Batch
from specsamp.serving.intake import Intake
from specsamp.serving.learner import Learner, check_learner
from specsamp.serving.orders import FirstCome, Order
from specsamp.serving.sampling_request import SamplingRequest
from specsamp.serving.scheduler import Entry

IDLE_SECONDS = 5  # heartbeat interval of process 0


class Service:
    """Decodes the texts of many requests over the rows of one batch.

    Attributes:
      pair: the models.
      method: drafter and rule of all requests.
      context: the most tokens of a prompt and its text together.
      repeats: whether a seed gives the same text again, see `Intake`.
      capacity: the most unfinished texts.
      max_per_client: the most unfinished texts of a client.
      batch: the rows and their counts; the service's thread changes it.
      delivery: runs the steps.
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
        order: Order = FirstCome(),
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
          order: of the requests; it may learn, so that each service needs its own.
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
        validate.instance("method", method, Method, EXAMPLE)
        self.pair, self.method = pair, make_method(pair, method=method)
        check_learner(learner, method)
        validate.instance("order", order, Order, "ShortestFirst()")
        self.context = context_of(pair, method.drafter, "context", context)
        learns = learner is not None
        self._intake = Intake(
            pair, self.method, context=self.context, has_grammars=has_grammars, learns=learns
        )
        # On a mesh, programs of two threads could run in another order on each device.
        in_background = in_background and pair.shards.mesh is None and not self._is_shared
        engine = self._intake.engine(rows)
        self.batch = Batch(
            engine, rows=rows, rounds=rounds, in_background=in_background, order=order
        )
        self.batch.sizes.programs.notify = self._wake
        self.repeats = self._intake.repeats
        self.delivery = Delivery(self.batch, self.method, learner)
        self.capacity = self.batch.usage.rows + max_waiting
        most = self.capacity if max_per_client is None else max_per_client
        self.max_per_client = validate.integer("max_per_client", most, 1)
        self._numbers = itertools.count()  # shared by all processes
        self._changed = threading.Condition()  # guards the next two
        self._inbox: list[Entry] = []
        self._closed: str | None = None  # the reason
        self.failed: str | None = None
        self._thread = threading.Thread(target=self._work, name="specsamp service", daemon=True)

    def compile(self) -> None:
        """Compiles the smallest size and all rows; others are compiled during decoding, and on a
        mesh when they are first needed.
        """
        self.batch.compile()

    def start(self) -> None:
        """Begins to take requests, and to compile the sizes of the first ones."""
        self.batch.sizes.begin_first()
        self._thread.start()

    def close(self, reason: str = "the service was closed") -> int:
        """Ends all texts with this reason for their callers; returns their number."""
        with self._changed:
            self._closed, left = self._closed or reason, self.unfinished
            self._changed.notify()
        if self._thread.ident is None:  # it was never started
            self._drop(self._closed, and_waiting=True)
        return left

    def join(self) -> None:
        """Waits, after `close`, for the end of the step that runs."""
        if self._thread.is_alive():
            self._thread.join()
        self.batch.sizes.programs.close()

    @property
    def unfinished(self) -> int:
        """Returns the number of running and queued texts."""
        return len(self._entries())

    def _entries(self) -> list[Entry]:
        return [*self._inbox, *self.delivery.entries]

    def submit(self, request: SamplingRequest, deliver: Callable[[Chunk | Failed], None]) -> Answer:
        """Queues a request.

        Args:
          deliver: called with each chunk, the last of each text with its finish, or with a
            `Failed`. The service's thread calls it, or `close` before `start`, so it must return at
            once.

        Raises:
          ValueError: naming the value and the fix.
          Busy: the queue is full.
          Failed: the service is closed.
        """
        if jax.process_index() > 0:
            raise ValueError("process 0 accepts all requests: send this one there")
        count = len(request.prompts) * request.num_samples
        most = min(self.capacity, self.max_per_client)  # more would be busy for ever
        if count > most:
            raise ValueError(
                f"the request needs {count} completions; the limit is {most}: request fewer"
            )
        self._check_room(count, request.client)  # before prompts are encoded, which takes time
        number = next(self._numbers) if self._is_shared else None
        answer = Answer(request, deliver, number=number)
        answer.requests = self._intake.make(request, answer)
        for each in answer.requests:
            self.batch.scheduler.order.check(each)
        with self._changed:
            self._check_room(count, request.client)
            self._inbox += answer.entries()
            self._changed.notify()
        return answer

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

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _work(self) -> None:
        try:
            while self._wait():
                try:
                    self._step()
                except Exception as error:  # the batch and its running texts are lost
                    if self._is_shared:
                        raise
                    logging.exception(
                        "a step failed: running texts are lost, queued texts start again"
                    )
                    is_lost = bool(self.batch.scheduler.active)
                    self._drop(f"decoding failed: {_in_short(error)}", and_waiting=not is_lost)
        except BaseException as error:
            logging.exception("the service failed")
            self.failed = f"the service failed: {_in_short(error)}"
            self.close(self.failed)
        self._drop(self._closed, and_waiting=True)

    def _wait(self) -> bool:
        """Waits for requests, and queues new ones; returns False after `close`."""
        news = distributed.from_first(self._news)
        if jax.process_index() > 0:
            self._closed = news.closed
            for answer in news.answers:
                entries = answer.complete(self.pair.tokenizer).entries()
                self.batch.scheduler.waiting += entries
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
            taken = dict.fromkeys(entry.answer for entry in self._inbox)
            self.batch.scheduler.waiting += self._inbox
            self._inbox.clear()
            left = {entry.answer.number for entry in self._entries() if entry.answer.has_left}
            copies = [answer.copy() for answer in taken] if self._is_shared else []
            return News(copies, left - {None}, self._closed)

    def _step(self) -> None:
        """Decodes a few rounds, or waits while programs are compiled."""
        if self.delivery.step():
            return
        with self._changed:
            if self.unfinished and not self._inbox:
                self._changed.wait(1)

    def _drop(self, reason: str, and_waiting: bool) -> None:
        """Ends all running texts, and with ``and_waiting`` all queued ones, with this reason for
        their callers.
        """
        with self._changed:
            entries = self.delivery.drop(and_waiting)
            if and_waiting:
                entries += self._inbox
                self._inbox.clear()
        self.batch.free()
        for entry in entries:
            entry.answer.send(Failed(reason))


class Delivery:
    """Runs the steps of a batch, and sends the texts to their callers.

    Attributes:
      learner: updates the draft from finished texts; None: off, or it has failed.
    """

    def __init__(self, batch: Batch, method: Method, learner: Learner | None):
        self._batch, self._method, self.learner = batch, method, learner
        # Finished texts, each with the steps that score it.
        self._to_score: list[tuple[Entry, Iterator[bool]]] = []

    @property
    def entries(self) -> list[Entry]:
        """Returns the unfinished requests."""
        scheduler, ended = self._batch.scheduler, [entry for entry, _ in self._to_score]
        return [*scheduler.waiting, *scheduler.active, *ended]

    def step(self) -> bool:
        """Fills the rows, decodes a few rounds, and delivers the tokens of streams and of finished
        texts; returns False if nothing could be done.
        """
        batch, scheduler = self._batch, self._batch.scheduler
        for entry in [entry for entry in scheduler.waiting if entry.answer.is_over]:
            scheduler.finish(entry)
        is_scoring = self._score_next()
        scheduler.sort()
        with self._failing("the prompt was not read", batch.prefill.stop):
            batch.fill()
        entries = [entry for _, entry in batch.table.decoding]
        if not entries:
            return is_scoring
        batch.run()
        always = any(entry.answer.asked.is_streamed or entry.answer.is_over for entry in entries)
        found = [(entry, text) for entry, text in batch.collect(self._text, always) if text]
        now = time.monotonic()
        for entry in entries:
            if entry.rounds and entry.answer.first is None:
                entry.answer.first = now
        for entry, text in found:
            self._deliver(entry, text)
        for entry, text in found:  # after the deliveries
            if self.learner is not None and text.finish != Finish.RUNNING:
                self._learn((*entry.request.prompt, *text.tokens))
        return True

    def drop(self, and_waiting: bool) -> list[Entry]:
        """Removes the running requests, and with ``and_waiting`` the queued ones; returns them."""
        kept = [] if and_waiting else list(self._batch.scheduler.waiting)
        entries = [entry for entry in self.entries if entry not in kept]
        self._to_score.clear()
        for entry in entries:
            self._batch.scheduler.finish(entry)
        return entries

    def _deliver(self, entry: Entry, text: RowText) -> None:
        is_running = text.finish == Finish.RUNNING
        if is_running and not entry.answer.asked.is_streamed:
            return
        chunk = Chunk.of(entry.request, text, self._method, shown=entry.shown)
        if chunk is None:
            return
        entry.shown = len(text.tokens)
        if entry.answer.asked.is_scored and not is_running:
            self._to_score.append((entry, self._score(entry, chunk)))
        else:
            entry.answer.send(chunk)

    def _learn(self, tokens: Sequence[int]) -> None:
        """Updates the draft from a text. A learner that raises is removed; no text is lost."""
        try:
            self._batch.learn(self.learner, tokens)
        except Exception:
            logging.exception("the learner failed: the draft is no longer updated")
            self.learner = None

    def _score_next(self) -> bool:
        """Scores a chunk of the first finished text; returns False if there is none, or if its
        programs are not compiled yet.
        """
        self._to_score = [each for each in self._to_score if not each[0].answer.is_over]
        if not self._to_score:
            return False
        entry, steps = self._to_score[0]
        is_ready = None
        with self._failing("the text was not scored", lambda: [entry]):
            is_ready = next(steps, None)
        if is_ready is None:
            del self._to_score[0]
        return is_ready is not False

    def _score(self, entry: Entry, chunk: Chunk) -> Iterator[bool]:
        """Scores a finished text and delivers its last chunk; yields before each step whether it
        can be made.
        """
        tokens = [*entry.request.prompt, *chunk.tokens]
        while (steps := self._batch.score(tokens)) is None:
            yield False
        for scores in steps:
            if scores is None:
                yield True
        entry.answer.scores[entry.request] = scores
        entry.answer.send(chunk)

    def _text(self, state: DecodeState, row: int, entry: Entry) -> RowText | None:
        """Returns the text of a row; None if it was cancelled or has failed."""
        if entry.answer.is_over:
            return None
        with self._failing("decoding failed", lambda: [entry]):
            text = self._batch.runner.engine.text(state, row, entry.request)
            if text.finish != Finish.INVALID:
                return text
            warp = entry.request.sampling.warps[0]
            reason = fault(warp) if isinstance(warp, Follow) else None
            if reason is None:
                raise FloatingPointError(
                    "the target's logits are NaN or infinite, or a warp has excluded every token"
                )
            entry.answer.send(Unmet(f"a text cannot follow its grammar: {reason}"))
        return None

    @contextlib.contextmanager
    def _failing(self, failure: str, entries: Callable[[], list[Entry]]) -> Iterator[None]:
        """Sends an error to the callers of these requests alone.

        Among several processes, an error may have occurred in this one alone, and is raised.
        """
        try:
            yield
        except Exception as error:
            failed = entries()
            is_alike = jax.process_count() == 1 or isinstance(error, FloatingPointError)
            if not failed or not is_alike:
                raise
            logging.exception(failure)
            for entry in failed:
                entry.answer.send(Failed(f"{failure}: {_in_short(error)}"))


def _in_short(error: Any) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
