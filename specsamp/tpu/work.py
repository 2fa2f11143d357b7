"""Counts what a program does, as far as it decides its milliseconds, and how far its collectives travel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one device in one run of a program."""

    streaming_ms: float  # of its traffic, at the full rate of the HBM
    collectives: float = 0.0  # one after another
    collective_hops: float = 0.0  # collectives, each times the hops that it crosses
    wire_ms: float = 0.0  # of the bytes that collectives carry, at the full rate of the links
    layer_sequences: float = 0.0  # layers of its calls, each times the sequences of the device
    cycles_ms: float = 0.0  # of its computation, as the compiler estimates it
    calls: int = 1  # of a model


def calls_of_round(whole: Work, draft_step: Work, draft_length: int) -> tuple[Work, ...]:
    """Splits the work of a round into its calls: what a collective of the draft hides under is the draft's own.

    Args:
      whole: of the round, all K + 1 calls.
      draft_step: of one call of the draft; the target's call is what K of them leave.
    """
    names = [field.name for field in dataclasses.fields(Work)]
    left = {name: getattr(whole, name) - draft_length * getattr(draft_step, name) for name in names}
    return (Work(**{name: max(value, 0) for name, value in left.items()}), *[draft_step] * draft_length)


def hops(chips: Sequence[int]) -> int:
    """Returns the hops between the two chips that are farthest apart: 5 for (2, 2, 4). No axis wraps around."""
    return sum(size - 1 for size in chips)


def wire_ms(carried: float, chips: Sequence[int], link_bytes_per_second: float) -> float:
    """Returns the milliseconds that bytes take which every chip sends to all others.

    Args:
      carried: bytes of a replica; those of an all-reduce count twice.
      chips: of one replica along each axis; each axis has links in both directions.
      link_bytes_per_second: of one link, one way.
    """
    count, axes = math.prod(chips), sum(size > 1 for size in chips)
    return carried * (count - 1) / count / (2 * axes * link_bytes_per_second) * 1e3 if axes else 0.0


def replica_axes(sizes: Sequence[int], chips: int) -> tuple[int, ...]:
    """Returns the chips of one replica along each axis of a slice; the first axes are filled first."""
    taken, left = [], chips
    for size in sizes:
        taken.append(min(size, left))
        left //= taken[-1]
    return tuple(taken)
