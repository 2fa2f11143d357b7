"""Makes the points of a sweep; ``get_hyper(h)`` of a configuration is called with this module as ``h``.

    def get_hyper(h):
        batches = h.zipit([h.sweep("batch", [1, 8]), h.sweep("repeats", [20, 5])])
        return h.product([h.sweep("draft_length", [1, 4]), batches])

A sweep is a list of points, a point maps fields of the configuration to values. (The names are big_vision's.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

Point = dict[str, Any]


def sweep(field: str, values: Iterable[Any]) -> list[Point]:
    """Returns one point for each value of a field, such as "sampling.temperature".

    Raises:
      ValueError: there are no values.
    """
    points = [{field: value} for value in values]
    if not points:
        raise ValueError(f"the sweep over {field!r} has no values")
    return points


def product(sweeps: Sequence[list[Point]]) -> list[Point]:
    """Combines every point of one sweep with every point of the others; the last varies fastest."""
    return functools.reduce(lambda one, other: [_joined(a, b) for a in one for b in other], sweeps, [{}])


def zipit(sweeps: Sequence[list[Point]]) -> list[Point]:
    """Combines first points with first points, second with second; a sweep of one point goes with all.

    Raises:
      ValueError: lengths that do not match.
    """
    lengths = [len(points) for points in sweeps]
    longest = max(lengths, default=0)
    if any(length not in (1, longest) for length in lengths):
        raise ValueError(f"zipit takes sweeps of one length; got {', '.join(map(str, lengths))} points")
    rows = zip(*(points * longest if len(points) == 1 else points for points in sweeps))
    return [functools.reduce(_joined, row) for row in rows]


def _joined(one: Point, other: Point) -> Point:
    twice = sorted({*one} & {*other})
    if twice:
        raise ValueError(f"{twice[0]!r} is swept twice")
    return one | other
