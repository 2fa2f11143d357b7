"""Defines the parts of an evaluation: problems, completions, and scores with intervals of their
means.

A task is a function that reads its problems and a function that scores completions;
`specsamp.evaluation.tasks` lists them.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specsamp.decoding.text import Stops

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A prompt with the reference that scores its completions.

    Attributes:
      id: its name in its file.
      category: problems of a category are reported together; may be empty.
      further_turns: the user's later messages, if the problem is a conversation.
      reference: the text to compare with, or the tests that follow a program.
    """

    id: str
    prompt: str
    category: str = ""
    further_turns: tuple[str, ...] = ()
    reference: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """A completion: its text, and whether it ended with an end-of-text token."""

    text: str
    ended: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationTask:
    """Problems in a fixed order, and the scoring of their completions.

    Attributes:
      name: one of `specsamp.evaluation.tasks.TASKS`.
      stop: texts that end a completion, and are not part of it.
      continues: whether a completion continues the prompt's text; the answers of a chat model would
        score 0.
      score: returns each measure's value for a problem, estimated from its attempts. Tasks without
        scores measure time and acceptance only.
    """

    name: str
    problems: Sequence[Problem]
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 512
    continues: bool = False
    score: Callable[[Problem, Sequence[Attempt]], dict[str, float]] = lambda *_: {}


def cut(text: str, stop: Sequence[str]) -> str:
    """Returns a text up to its first stop text."""
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
        """Returns the smallest true mean that 80% of such samples would distinguish from 0, for
        values in [-1, 1].

        P equal values have no spread in the sample, but do not exclude a mean of 3 / P.
        """
        return max((1.96 + 0.84) * self.error, 3 / self.problems)


def mean_interval(values_P: Sequence[float], *, seed: int = 0) -> ScoreInterval:
    """Returns the mean over at least one problem, with an interval from resampled problems."""
    values_P = np.asarray(values_P, np.float64)
    P = len(values_P)
    means_R = (
        np.random.default_rng(seed).multinomial(P, np.full(P, 1 / P), RESAMPLES) @ values_P / P
    )
    low, high = np.quantile(means_R, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return ScoreInterval(
        mean=float(values_P.mean()),
        low=float(low),
        high=float(high),
        error=float(means_R.std()),
        problems=P,
    )


def summarise(scores: Sequence[Mapping[str, float]]) -> dict[str, ScoreInterval]:
    """Returns the mean of each measure over problems."""
    return {
        name: mean_interval([score[name] for score in scores])
        for name in (scores[0] if scores else ())
    }


def compare_scores(
    scores: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]]
) -> dict[str, ScoreInterval]:
    """Returns the mean difference of each measure between two lists of scores of the same
    problems.
    """
    pairs = list(zip(scores, others, strict=True))
    return summarise(
        [{name: score[name] - other[name] for name in score} for score, other in pairs]
    )


def first_of_each(problems: Sequence[Problem], most: int | None) -> list[Problem]:
    """Returns the first problems of each category, at most ``most``; None: all."""
    counts = collections.Counter()
    kept = []
    for problem in problems:
        counts[problem.category] += 1
        if most is None or counts[problem.category] <= most:
            kept.append(problem)
    return kept
