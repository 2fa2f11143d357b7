"""Computes the distribution of a program's output over all of its paths, and of texts, by chaining rounds."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence

from specsamp.evaluation.enumeration.draws import replaced_draws
from specsamp.evaluation.enumeration.noise import PATHS, Outside, Paths

Law = Mapping[Hashable, float]  # the probability of each outcome
MAX_PATHS = 200_000


def distribution(run: Callable[[], Hashable], max_paths: int = MAX_PATHS) -> Law:
    """Returns the distribution of the result of ``run``; the result of a path that raises is a `Raised`.

    Raises:
      Outside: a number is drawn or used in a way that cannot be enumerated (names the call), or a path is endless.
    """
    law, paths = collections.defaultdict(float), Paths()
    PATHS.append(paths)
    try:
        with replaced_draws():
            for _ in range(max_paths):
                paths.begin()
                try:
                    outcome = run()
                except Exception as error:
                    outcome = Raised(f"{type(error).__name__}: {str(error)[:80]}")
                law[outcome] += paths.probability
                if not paths.advance():
                    break
            else:
                raise Outside(f"more than {max_paths} paths")
    finally:
        PATHS.pop()
    if abs(sum(law.values()) - 1) > 1e-12:
        raise Outside(f"the paths' probabilities sum to {sum(law.values())!r}")
    return dict(law)


@dataclasses.dataclass(frozen=True)
class Raised:
    """The result of a path that raises: the text of its exception."""

    error: str


def joint(emit: Callable[[int], Sequence[int]], count: int) -> Law:
    """Returns the joint distribution of the first ``count`` tokens after token 0, by chaining rounds.

    ``emit`` takes the last token, the only context of the models here, and returns the tokens of a round or of a text.
    """
    rounds = functools.cache(lambda last: distribution(lambda: tuple(map(int, emit(last)))))
    law, open_ = collections.defaultdict(float), {(): 1.0}
    while open_:
        reached = collections.defaultdict(float)
        for prefix, probability in open_.items():
            for tokens, share in rounds(prefix[-1] if prefix else 0).items():
                if tokens == ():
                    raise Outside("a round emits no token")
                whole = isinstance(tokens, Raised) or len(prefix + tokens) >= count
                text = tokens if isinstance(tokens, Raised) else (prefix + tokens)[:count]
                (law if whole else reached)[text] += probability * share
        open_ = reached
    return dict(law)


def law_distance(a: Law, b: Law) -> float:
    """Returns half the sum of the absolute differences."""
    return sum(abs(a.get(outcome, 0.0) - b.get(outcome, 0.0)) for outcome in {**a, **b}) / 2
