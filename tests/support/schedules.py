"""Prompts, schedules and clocks for tests of the queue."""

import dataclasses
from collections.abc import Sequence

from specsamp.serving.schedule import Nearest, Schedule

PROMPTS = [[1, 2], [3], [4, 5, 6], [7], [8, 9], [10], [11, 1]]
BUDGETS = [5, 21, 9, 30, 1, 13, 17]


def by_row(completions):
    return {(row.prompt_index, row.sample_index): row for row in completions}


class Restless(Schedule):
    """Puts aside who is furthest, for whoever has waited longest."""

    preempts = True

    def choose(self, waiting):
        return waiting[0]

    def displace(self, newcomer, running):
        furthest = max(running, key=lambda request: request.emitted)
        return furthest if furthest.emitted else None


@dataclasses.dataclass(eq=False)
class Oracle(Nearest):
    """Returns the true lengths, by prompt."""

    lengths: Sequence[int]

    def remaining(self, request):
        return self.lengths[request.prompt_index] - request.emitted


class FakeClock:
    """Stands for the module ``time``, and goes on by a second whenever it is read."""

    def __init__(self, monkeypatch):
        self.seconds = 100.0
        monkeypatch.setattr("specsamp.serving.generate_many.time", self)

    def monotonic(self):
        self.seconds += 1
        return self.seconds

    def sleep(self, seconds):
        assert seconds >= 0
        self.seconds += seconds
