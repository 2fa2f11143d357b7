"""Chooses which waiting text takes a free row of a batch, and which running text is preempted for it.

First come, first served lets a short text wait behind long texts. `ShortestFirst` is the scheduling of ALISE (Zhao and
Wang, 2024, arXiv:2410.23537): a text's length is predicted from finished texts with similar prompts, and the text with
the fewest tokens to come goes first. Running texts are preempted for it. Waiting time counts, so that no text waits for
ever. A schedule decides when a text is decoded, and never changes its tokens.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import numpy as np

from specsamp import validate
from specsamp.decoding.request import Request

ROUNDS_PER_LOOK = 8  # between two looks for prompts that have arrived


class Schedule(abc.ABC):
    """Decides which request is decoded first, from the arguments alone, so that several processes decide alike.

    Attributes:
      preempts: whether `displace` is called.
    """

    preempts: bool = False

    @abc.abstractmethod
    def choose(self, waiting: Sequence[Request]) -> Request:
        """Returns the request that takes a free row; ``waiting`` is in the order in which requests began to wait."""

    def displace(self, newcomer: Request, running: Sequence[Request]) -> Request | None:
        """Returns the request of ``running`` that is preempted for ``newcomer``, or None."""
        return None

    def finish(self, request: Request) -> None:
        """Takes note of a request that has ended."""


class FirstCome(Schedule):
    """First come, first served."""

    def choose(self, waiting: Sequence[Request]) -> Request:
        return waiting[0]


@dataclasses.dataclass(eq=False, kw_only=True)
class Nearest:
    """Predicts the mean length of the finished texts whose prompts are nearest; the budget before any has finished.

    The distance of two prompts is the cosine of their hashed counts of tokens and pairs of tokens; texts with about the
    same budget come first. Only neighbours longer than the request is now count; without any, it will spend its budget.

    Attributes:
      neighbours: finished texts per prediction.
      capacity: finished texts that are kept, the last ones.
      width: of the hash.
    """

    neighbours: int = 8
    capacity: int = 4096
    width: int = 512

    def __post_init__(self):
        self._counts_NW = np.zeros((self.capacity, self.width), np.float32)
        self._lengths_N, self._sizes_N = np.zeros(self.capacity), np.zeros(self.capacity, int)
        self._finished = 0
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, np.ndarray]] = {}

    def remaining(self, request: Request) -> float:
        """Returns how many tokens of a request are still to come."""
        lengths = self._nearest(tuple(request.prompt), request.max_new_tokens.bit_length())
        longer = lengths[lengths > request.emitted]
        expected = longer.mean() if len(longer) else request.max_new_tokens
        return min(float(expected), request.max_new_tokens) - request.emitted

    def finish(self, request: Request) -> None:
        """Takes note of a request that has ended."""
        at = self._finished % self.capacity
        self._counts_NW[at], self._lengths_N[at] = self._counts(tuple(request.prompt)), request.emitted
        self._sizes_N[at] = request.max_new_tokens.bit_length()
        self._finished += 1

    def _nearest(self, prompt: tuple[int, ...], size: int) -> np.ndarray:
        """Returns the lengths of the nearest texts; the search is repeated when twice as many texts have finished."""
        finished, lengths = self._known.get((prompt, size), (0, np.zeros(0)))
        if self._finished >= max(2 * finished, 1):
            count = min(self._finished, self.capacity)
            near_N = self._counts_NW[:count] @ self._counts(prompt) + (self._sizes_N[:count] == size)
            lengths = self._lengths_N[np.argsort(-near_N, kind="stable")[: self.neighbours]]
            self._known[prompt, size] = self._finished, lengths
        return lengths

    def _counts(self, prompt: tuple[int, ...]) -> np.ndarray:
        tokens = np.asarray(prompt, np.uint64)
        pairs = tokens[:-1] * np.uint64(1_000_003) + tokens[1:] * np.uint64(2_654_435_761)
        hashed = np.concatenate([tokens, pairs]) % np.uint64(self.width)
        counts_W = np.sqrt(np.bincount(hashed.astype(np.int64), minlength=self.width))
        return counts_W / np.linalg.norm(counts_W)


@dataclasses.dataclass(eq=False, kw_only=True)
class ShortestFirst(Schedule):
    """The text with the fewest predicted tokens to come goes first, and running texts are preempted for it.

    A second of waiting is worth ``ageing`` tokens: no text that arrives more than L / ageing seconds later passes a text
    with L tokens to come.

    Attributes:
      predictor: of lengths.
      ageing: in tokens a second; 0 lets long texts starve under a heavy load.
      worth: the fewest tokens by which a text must be shorter than a running text to preempt it.
    """

    predictor: Nearest = dataclasses.field(default_factory=Nearest)
    ageing: float = 1.0
    worth: float = 16.0
    preempts: bool = True

    def __post_init__(self):
        if not hasattr(self.predictor, "remaining"):
            raise ValueError(f"predictor must have the methods of Nearest; got {self.predictor!r}")
        validate.number("ageing", self.ageing, 0)
        validate.number("worth", self.worth, 0)
        validate.switch("preempts", self.preempts)

    def choose(self, waiting: Sequence[Request]) -> Request:
        return min(waiting, key=self._standing)

    def displace(self, newcomer: Request, running: Sequence[Request]) -> Request | None:
        last = max(running, key=self._standing)
        return last if self._standing(last) > self._standing(newcomer) + self.worth else None

    def finish(self, request: Request) -> None:
        self.predictor.finish(request)

    def _standing(self, request: Request) -> float:
        return self.predictor.remaining(request) + self.ageing * request.arrived
