"""Schedules and clocks for tests of the queue."""

from specsamp.serving.schedule import Schedule


class Restless(Schedule):
    """Puts aside who is furthest, for whoever has waited longest."""

    preempts = True

    def choose(self, waiting):
        return waiting[0]

    def displace(self, newcomer, running):
        furthest = max(running, key=lambda ticket: ticket.emitted)
        return furthest if furthest.emitted else None


class FakeClock:
    """Goes on by a second whenever somebody looks."""

    def __init__(self):
        self.seconds = 100.0

    def now(self):
        self.seconds += 1
        return self.seconds

    def wait(self, seconds):
        assert seconds >= 0
        self.seconds += seconds
