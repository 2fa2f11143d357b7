"""Defines what an evaluation is made of: problems, texts that stop a completion, and scores whose means have intervals.

A task is one function that reads its problems and one that scores completions; `specsamp.evaluation.tasks` lists them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specsamp.decoding.stops import Stops

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A prompt, and what its completions are scored by.

    Attributes:
      id: its name in its file.
      category: problems of one are reported together; may be empty.
      further_turns: what a user says after the answer, where the problem is a conversation.
      reference: the text to compare with, or the tests that follow a program.
    """

    id: str
    prompt: str
    category: str = ""
    further_turns: tuple[str, ...] = ()
    reference: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """A completion: its text, and whether it ended by itself rather than by the budget or a stop text."""

    text: str
    ended: bool = False


def no_score(problem: Problem, attempts: Sequence[Attempt]) -> dict[str, float]:
    """Returns no measures: of such tasks only time and acceptance are measured, by category."""
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationTask:
    """Problems in an order, and how their completions are scored.

    Attributes:
      name: one of `specsamp.evaluation.tasks.TASKS`.
      stop: texts that end a completion, and are no part of it.
      continues: a completion goes on with the prompt's own text; a chat model's, which begins anew, would score 0.
      score: returns a problem's value of each measure, estimated from its attempts.
    """

    name: str
    problems: Sequence[Problem]
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 512
    continues: bool = False
    score: Callable[[Problem, Sequence[Attempt]], dict[str, float]] = no_score


def cut(text: str, stop: Sequence[str]) -> str:
    """Returns a text up to the first of the stop texts that it holds."""
    return text[: Stops(texts=tuple(stop)).first(text)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreInterval:
    """A mean over problems with its bootstrap interval.

    Attributes:
      mean, low, high: the mean, and the ends of the interval of 95%.
      error: the standard error of the mean.
      problems: the number of values.
    """

    mean: float
    low: float
    high: float
    error: float
    problems: int

    @property
    def detectable(self) -> float:
        """Returns the size of a true mean that four of five such samples would tell from 0, for values within [-1, 1].

        Values that are all equal have no spread, but do not show that there is none: P of them leave 3 / P open.
        """
        return max((1.96 + 0.84) * self.error, 3 / self.problems)


def mean_interval(values_P: Sequence[float], *, seed: int = 0) -> ScoreInterval:
    """Returns the mean over problems, with an interval from resampled problems.

    Raises:
      ValueError: there are no values.
    """
    values_P = np.asarray(values_P, np.float64)
    if not len(values_P):
        raise ValueError("there are no scores to take the mean of")
    P = len(values_P)
    means_R = np.random.default_rng(seed).multinomial(P, np.full(P, 1 / P), RESAMPLES) @ values_P / P
    low, high = np.quantile(means_R, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return ScoreInterval(
        mean=float(values_P.mean()),
        low=float(low),
        high=float(high),
        error=float(means_R.std()),
        problems=P,
    )


def summarise(scores: Sequence[Mapping[str, float]]) -> dict[str, ScoreInterval]:
    """Returns the mean of each measure over problems, from the scores of each."""
    return {name: mean_interval([score[name] for score in scores]) for name in (scores[0] if scores else ())}


def compare(scores: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]]) -> dict[str, ScoreInterval]:
    """Returns the mean difference of each measure between two lists of scores of the same problems."""
    pairs = list(zip(scores, others, strict=True))
    return summarise([{name: score[name] - other[name] for name in score} for score, other in pairs])
