"""Orders in which requests are decoded: first come, first served, or the shortest text first.

First come, first served lets a short text wait behind long ones. `ShortestFirst` is the scheduling
of ALISE (Zhao and Wang, 2024, arXiv 2410.23537): the length of a text is predicted, the text with
the fewest tokens left goes first, and longer texts are preempted for it. An order changes when a
text is decoded, never its tokens.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from specsamp import validate

if TYPE_CHECKING:
    from specsamp.decoding.request import Request
    from specsamp.serving.scheduler import Entry


class Order(abc.ABC):
    """Ranks requests by their entries alone, so that several processes decide alike.

    Attributes:
      preempts: whether ranks differ, so that requests may be preempted for others.
    """

    preempts: bool = False

    @abc.abstractmethod
    def rank(self, entry: Entry) -> float:
        """Returns the place of a request; smaller ones are decoded first."""

    def check(self, request: Request) -> None:
        """Raises ValueError if a request cannot be ranked."""

    def is_displaced(self, entry: Entry, newcomer: Entry) -> bool:
        """Returns whether a decoding request is preempted for a waiting one."""
        return False

    def finish(self, entry: Entry) -> None:
        """Records the length of a text that has ended."""


class FirstCome(Order):
    """First come, first served: all have the same rank, and keep their places."""

    def rank(self, entry: Entry) -> float:
        return 0.0


@dataclasses.dataclass(eq=False, kw_only=True)
class ShortestFirst(Order):
    """The text with the fewest predicted tokens left goes first.

    A request of a smaller priority number goes before all others.

    Attributes:
      predictor: returns the number of tokens of a request's text; None: learns from finished texts
        of near prompts, see `Nearest`.
      aging: tokens that a second of waiting is worth: a text with L tokens left is passed only by
        texts of its client and priority that come within L / aging seconds. 0: long texts may wait
        for ever.
      worth: the fewest tokens by which a text must be shorter than another to preempt it.
    """

    predictor: Callable[[Request], float] | None = None
    aging: float = 1.0
    worth: float = 16.0
    preempts = True

    def __post_init__(self):
        if self.predictor is not None and not callable(self.predictor):
            raise ValueError(f"predictor must be a function of a request; got {self.predictor!r}")
        validate.number("aging", self.aging, 0)
        validate.number("worth", self.worth, 0)
        self._nearest = Nearest()

    def check(self, request: Request) -> None:
        if self.predictor is not None:
            validate.number("the predictor's number of tokens", self.predictor(request), 0)

    def rank(self, entry: Entry) -> float:
        predict = self._nearest.predict if self.predictor is None else self.predictor
        left = predict(entry.request) - entry.emitted
        if left <= 0:  # it is longer than predicted
            left = entry.request.max_new_tokens - entry.emitted
        return left + self.aging * entry.arrived

    def is_displaced(self, entry: Entry, newcomer: Entry) -> bool:
        if entry.priority != newcomer.priority:
            return entry.priority > newcomer.priority
        return self.rank(entry) > self.rank(newcomer) + self.worth

    def finish(self, entry: Entry) -> None:
        if self.predictor is None:
            self._nearest.learn(entry.request, entry.emitted)


def parse_order(text: str | None) -> Order:
    """Returns the order of a flag: ``first_come``, the default, ``shortest_first``, or
    ``shortest_first:AGING``; raises ValueError for other texts.
    """
    name, _, aging = (text or "first_come").partition(":")
    if text in (None, "first_come"):
        return FirstCome()
    try:
        return {"shortest_first": ShortestFirst}[name](aging=float(aging or 1))
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"--order={text}: write first_come, shortest_first or shortest_first:AGING, with a "
            "number of tokens per second"
        ) from error


class Nearest:
    """Predicts the mean length of the finished texts whose prompts are nearest.

    Nearness is the cosine of hashed counts of tokens and of pairs of tokens. Before any text has
    ended, the budget is predicted.
    """

    NEIGHBOURS = 8
    CAPACITY = 4096  # texts, the last ones
    WIDTH = 512  # of the hash

    def __init__(self):
        self._counts_NW = np.zeros((self.CAPACITY, self.WIDTH), np.float32)
        self._lengths_N = np.zeros(self.CAPACITY)
        self._learned = 0
        # For each prompt its prediction, and how many texts had been learned.
        self._known: dict[tuple[int, ...], tuple[float, int]] = {}

    def predict(self, request: Request) -> float:
        """Returns a number of tokens; it is renewed when twice as many texts have ended."""
        predicted, learned = self._known.get(request.prompt, (0.0, 0))
        if self._learned < max(2 * learned, 1):
            return min(predicted, request.max_new_tokens) if learned else request.max_new_tokens
        count = min(self._learned, self.CAPACITY)
        near_N = self._counts_NW[:count] @ self._counts(request.prompt)
        nearest = np.argsort(-near_N, kind="stable")[: self.NEIGHBOURS]
        predicted = float(self._lengths_N[nearest].mean())
        if len(self._known) >= self.CAPACITY:
            self._known.clear()
        self._known[request.prompt] = predicted, self._learned
        return min(predicted, request.max_new_tokens)

    def learn(self, request: Request, tokens: int) -> None:
        """Records the number of tokens of a text that has ended."""
        at = self._learned % self.CAPACITY
        self._counts_NW[at], self._lengths_N[at] = self._counts(request.prompt), tokens
        self._learned += 1
        self._known.pop(request.prompt, None)

    def _counts(self, prompt: tuple[int, ...]) -> np.ndarray:
        tokens = np.asarray(prompt, np.uint64)
        pairs = tokens[:-1] * np.uint64(1_000_003) + tokens[1:] * np.uint64(2_654_435_761)
        hashed = np.concatenate([tokens, pairs]) % np.uint64(self.WIDTH)
        counts_W = np.sqrt(np.bincount(hashed.astype(np.int64), minlength=self.WIDTH))
        return counts_W / np.linalg.norm(counts_W)
