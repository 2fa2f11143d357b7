"""Simulates a queue from costs: loads and machines beyond the one at hand, with the same schedules.

    costs = Costs(seconds_per_round=0.012, emitted_per_round=2.4)
    served = simulate(poisson(requests, rate=3.0), ShortestFirst(), costs, rows=8)
    summary(served)["mean"]     # seconds per token

Time goes by in slices of rounds, as in `specsamp.serving.queue`. A round costs the same however many of its rows are
busy, as it does on a device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from specsamp.serving.schedule import (
    ROUNDS_PER_LOOK,
    FirstCome,
    Nearest,
    Predictor,
    Schedule,
    Served,
    ShortestFirst,
    Ticket,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a machine in seconds: of a round of the batch, of a token of a prompt, of putting a text aside and back."""

    seconds_per_round: float
    seconds_per_prefill_token: float = 0.0
    seconds_per_swap: float = 0.0
    emitted_per_round: float = 1.0  # tokens that a busy row gains


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """A text of ``length`` tokens that is asked for after ``seconds``.

    ``dropped`` tokens are decoded beyond a stop text before the queue sees it, as `Completion.dropped` counts them.
    """

    prompt: Sequence[int]
    length: int
    budget: int
    seconds: float = 0.0
    dropped: int = 0


@dataclasses.dataclass(frozen=True)
class Oracle(Predictor):
    """Knows the length of each row: the best that a predictor could do."""

    lengths: Sequence[int]

    def remaining(self, ticket: Ticket) -> float:
        return self.lengths[ticket.row] - ticket.emitted


def informed(past: Sequence[Arrival]) -> Nearest:
    """Returns a predictor that has seen these texts."""
    predictor = Nearest()
    for row, one in enumerate(past):
        predictor.finish(Ticket(row=row, prompt=one.prompt, budget=one.budget, emitted=one.length))
    return predictor


def schedules(past: Sequence[Arrival], texts: Sequence[Arrival], ageing: float = 1.0) -> dict[str, Schedule]:
    """Returns new schedules by name, for ``texts`` that come after the past; the oracle knows lengths."""
    return {
        "first come": FirstCome(),
        "shortest predicted": ShortestFirst(predictor=informed(past), ageing=ageing),
        "oracle": ShortestFirst(predictor=Oracle([one.length for one in texts]), ageing=ageing),
    }


def poisson(arrivals: Sequence[Arrival], rate: float, seed: int = 0) -> list[Arrival]:
    """Returns the arrivals at random times, ``rate`` a second on average."""
    seconds = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(arrivals)))
    return [dataclasses.replace(one, seconds=float(at)) for one, at in zip(arrivals, seconds)]


def simulate(
    arrivals: Sequence[Arrival],
    schedule: Schedule,
    costs: Costs,
    *,
    rows: int,
    rounds_per_slice: int = ROUNDS_PER_LOOK,
) -> list[Served]:
    """Returns when each text ends, in the order of ``arrivals``."""
    tickets = [
        Ticket(row=row, prompt=one.prompt, budget=one.budget, arrived=one.seconds) for row, one in enumerate(arrivals)
    ]
    decoded_R = [one.length + one.dropped for one in arrivals]
    to_come = sorted(tickets, key=lambda ticket: ticket.arrived)
    waiting: list[Ticket] = []
    running: list[Ticket] = []
    served: dict[int, Served] = {}
    now = 0.0
    while to_come or waiting or running:
        if not waiting and not running:
            now = max(now, to_come[0].arrived)
        while to_come and to_come[0].arrived <= now:
            waiting.append(to_come.pop(0))
        if waiting and len(running) == rows and schedule.preempts:  # one at a time, as where one row is refilled
            last = schedule.displace(schedule.choose(waiting), running)
            if last is not None:
                running.remove(last)
                waiting.append(last)
                now += costs.seconds_per_swap
        while waiting and len(running) < rows:
            ticket = schedule.choose(waiting)
            waiting.remove(ticket)
            running.append(ticket)
            now += 0.0 if ticket.emitted else costs.seconds_per_prefill_token * len(ticket.prompt)
        left = min(decoded_R[ticket.row] - ticket.emitted for ticket in running)
        rounds = min(rounds_per_slice, math.ceil(left / costs.emitted_per_round))
        now += rounds * costs.seconds_per_round
        for ticket in list(running):
            ticket.emitted += rounds * costs.emitted_per_round
            if ticket.emitted >= decoded_R[ticket.row]:
                running.remove(ticket)
                ticket.emitted = arrivals[ticket.row].length
                schedule.finish(ticket)
                served[ticket.row] = Served(arrived=ticket.arrived, ended=now, emitted=ticket.emitted)
    return [served[row] for row in range(len(arrivals))]
