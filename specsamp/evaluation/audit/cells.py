"""Cells that continuations of two tokens are counted in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

PAIRS = 16  # pairs that may have a cell
EXPECTED = 25  # smallest expected count of a cell
REST = 0  # index of the cell that holds what no other does


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continuations:
    """The target's distribution after one prompt, as far as it is read.

    Attributes:
      prompt_id: index of the prompt.
      firsts_F: the most probable first tokens.
      probs_F: float64, their probabilities.
      joint_CV: float64, the probabilities of pairs of the first C of them and any second token.
    """

    prompt_id: int
    firsts_F: np.ndarray
    probs_F: np.ndarray
    joint_CV: np.ndarray

    def cells(self, samples: int) -> Cells:
        """Returns the finest partition in which ``samples`` samples are expected `EXPECTED` times in each cell."""
        smallest = EXPECTED / samples
        most_probable = np.argsort(-self.joint_CV, axis=None)[:PAIRS]
        index = {}
        cells = []
        for c, x2 in zip(*np.unravel_index(most_probable, self.joint_CV.shape)):
            cells.append(((int(self.firsts_F[c]), int(x2)), float(self.joint_CV[c, x2])))
        for x1, probability in zip(self.firsts_F.tolist(), self.probs_F.tolist()):
            cells.append(((x1, None), probability - sum(p for (first, _), p in cells if first == x1)))
        cells.sort(key=lambda cell: -cell[1])
        while cells and (cells[-1][1] < smallest or 1 - sum(p for _, p in cells) < smallest):
            index[cells.pop()[0]] = REST
        index |= {key: number for number, (key, _) in enumerate(cells, start=1)}
        probs = np.array([1 - sum(p for _, p in cells), *(p for _, p in cells)])
        return Cells(prompt_id=self.prompt_id, index=index, probs_C=probs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cells:
    """A partition of the continuations of one prompt.

    Attributes:
      prompt_id: index of the prompt.
      index: the cell of each pair ``(x1, x2)``; ``(x1, None)`` is x1 with a second token that is not listed.
      probs_C: float64, the probability of each cell; that of `REST` comes first.
    """

    prompt_id: int
    index: dict[tuple[int, int | None], int]
    probs_C: np.ndarray

    @property
    def degrees(self) -> int:
        """Returns the degrees of freedom of `statistic`."""
        return len(self.probs_C) - 1

    def count(self, samples: Sequence[tuple[int, int]]) -> np.ndarray:
        """Returns how many samples fell into each cell, [C]."""
        cells = [self.index.get((x1, x2), self.index.get((x1, None), REST)) for x1, x2 in samples]
        return np.bincount(cells, minlength=len(self.probs_C))

    def statistic(self, counts_C: np.ndarray) -> float:
        """Returns Pearson's statistic of the counts."""
        return float(self.terms(counts_C).sum())

    def terms(self, counts_C: np.ndarray) -> np.ndarray:
        """Returns the share of each cell in Pearson's statistic, [C]."""
        expected_C = self.probs_C * counts_C.sum()
        return (counts_C - expected_C) ** 2 / expected_C

    def name(self, cell: int) -> str:
        """Returns what a reader calls the cell."""
        if cell == REST:
            return "the rest"
        x1, x2 = next(key for key, number in self.index.items() if number == cell)
        return f"{x1} and another token" if x2 is None else f"{x1} {x2}"
