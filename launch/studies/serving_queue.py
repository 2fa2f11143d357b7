"""Works for serving.py: the queue beside fixed batches, and requests that arrive under schedules."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specsamp import FirstCome, Pair, ShortestFirst, generate, generate_many
from specsamp.analysis.workload import take_turns
from specsamp.decoding.results import Completion
from specsamp.serving.queue import Queue
from specsamp.serving.schedule import ROUNDS_PER_LOOK, Schedule, Served, Ticket, summary
from specsamp.serving.simulate import Arrival, Costs, Oracle, informed, poisson, schedules, simulate

SLICE = 16  # rounds, where the cost of leaving the loop is measured
SIMULATED_LOADS = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)


class Run(NamedTuple):
    """Texts in the order of their prompts, and what they took."""

    texts: list[Completion]
    rounds: int
    seconds: float
    work: Queue | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requests:
    """Prompts, and the arguments that all calls share."""

    options: Any
    pair: Pair
    prompts: Sequence[Sequence[int]]
    settings: Mapping[str, Any]

    def queued(self, prompts: Sequence, budgets: Any = None, **more: Any) -> Run:
        """Decodes prompts by the queue, compiled before."""
        budgets = self.options.max_new_tokens if budgets is None else budgets
        work = generate_many(self.pair, prompts, budgets, rows=self.options.rows, **{**self.settings, **more})
        work.compile()
        begin = time.perf_counter()
        texts = sorted(work, key=lambda one: one.prompt_index)
        return Run(texts, work.usage.rounds, time.perf_counter() - begin, work)

    def in_batches(self, prompts: Sequence, rows: int) -> Run:
        """Decodes prompts in fixed batches."""
        texts, rounds, begin = [], 0, time.perf_counter()
        for first in range(0, len(prompts), rows):
            part = prompts[first : first + rows]
            ids = list(range(first, first + len(part)))
            batch = generate(self.pair, part, self.options.max_new_tokens, prompt_ids=ids, **self.settings)
            rounds += max(one.stats.rounds + -(-one.dropped // (self.options.K + 1)) for one in batch)
            texts += batch
        return Run(texts, rounds, time.perf_counter() - begin)


def batches(requests: Requests, say: Callable[[str], None]) -> dict[str, Any]:
    """Compares the queue with fixed batches, slices with one run of the loop, and texts with those of a prompt alone."""
    options, prompts = requests.options, requests.prompts
    ways = {
        "queue": lambda turn: requests.queued(prompts),
        "batches": lambda turn: requests.in_batches(prompts, options.rows),
    }
    runs = {way: each[1:] for way, each in take_turns(ways, options.repeats + 1, say).items()}  # the first compiles
    lengths = sorted(len(one.tokens) for one in runs["queue"][-1].texts)
    occupancy, pairs = runs["queue"][-1].work.usage.occupancy, list(zip(runs["batches"], runs["queue"]))
    return {
        "fixed_batches": {
            "tokens_per_text": {"median": statistics.median(lengths), "least": lengths[0], "most": lengths[-1]},
            "runs": {
                way: [{"seconds": run.seconds, "rounds": run.rounds, "tokens": sum(lengths)} for run in each]
                for way, each in runs.items()
            },
            "occupancy": None if math.isnan(occupancy) else occupancy,
            "rounds_saved": statistics.median(1 - queue.rounds / fixed.rounds for fixed, queue in pairs),
            "speedup": statistics.median(fixed.seconds / queue.seconds for fixed, queue in pairs),
        },
        "slices": slices(requests, say),
        "alone": alone(requests, say),
    }


def slices(requests: Requests, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns what leaving the loop every few rounds costs, where all texts have one length and nothing waits."""
    prompts = [prompt[:64] for prompt in requests.prompts[: requests.options.rows]]
    ways, ratios = {"one run": None, "slices": SLICE}, []
    for repeat in range(6 * requests.options.repeats + 1):  # the first compiles
        say(f"slices, {repeat} of {6 * requests.options.repeats}")
        seconds = {}
        for way in ways if repeat % 2 else reversed(ways):  # whoever goes first finds another machine
            seconds[way] = requests.queued(prompts, stop=[], draft_length=0, rounds_per_slice=ways[way]).seconds
        ratios.append(seconds["slices"] / seconds["one run"])
    return {"rounds_per_slice": SLICE, "ratios": sorted(ratios[1:]), "median": statistics.median(ratios[1:])}


def alone(requests: Requests, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns how many texts are those of their prompts alone, and where the others begin to differ."""
    say("texts of prompts alone")
    prompts = requests.prompts[: requests.options.alone]
    together = [one.tokens for one in requests.queued(prompts).texts] if prompts else []
    apart = [one.tokens for one in requests.in_batches(prompts, rows=1).texts]
    differ = sorted(len(os.path.commonprefix(both)) for both in zip(together, apart) if both[0] != both[1])
    tokens = sum(map(len, together))
    return {"texts": len(together), "tokens": tokens, "differ": len(differ), "first_difference": differ}


def arrivals(requests: Requests, two_kinds: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns what each schedule makes of requests at random times, by load: on the clock, and by the simulator."""
    options = requests.options
    if two_kinds:
        requests = dataclasses.replace(requests, settings={**requests.settings, "stop": []})
    texts, costs, capacity = calibrate(requests, two_kinds, say)
    past, texts = texts[: options.past], texts[options.past :]
    lengths, predictor = [one.length for one in texts], informed(past)
    predicted = [predictor.remaining(Ticket(row=0, prompt=one.prompt, budget=one.budget)) for one in texts]
    related = float(np.corrcoef(predicted, lengths)[0, 1]) if np.std(predicted) and np.std(lengths) else None

    def measured(coming: Sequence[Arrival], schedule: Schedule) -> tuple[list[Served], dict[str, int]]:
        prompts, budgets = [one.prompt for one in coming], [one.budget for one in coming]
        ids, times = range(len(past), len(past) + len(texts)), [one.seconds for one in coming]
        asked = dict(prompt_ids=list(ids), arrivals=times, rounds_per_slice=ROUNDS_PER_LOOK)
        work = requests.queued(prompts, budgets, schedule=schedule, **asked).work
        return [*work.served.values()], {"put_aside": work.usage.put_aside}

    def simulated(coming: Sequence[Arrival], schedule: Schedule) -> tuple[list[Served], dict[str, int]]:
        return simulate(coming, schedule, costs, rows=options.rows), {}

    def latencies(loads: Sequence[float], draws: int, serve: Callable) -> list[dict[str, Any]]:
        """Returns the latencies of each load and schedule, all draws of the arrivals together; schedules take turns."""
        found = []
        for load in loads:
            answers: dict[str, list] = {}
            for draw in range(draws):
                say(f"{serve.__name__}, load {load:g}, {draw + 1} of {draws}")
                for name, schedule in schedules(past, texts, options.ageing).items():
                    answers.setdefault(name, []).append(serve(poisson(texts, load * capacity, draw), schedule))
            for name, answer in answers.items():
                served, counts = zip(*answer)
                means = {count: statistics.mean(one[count] for one in counts) for count in counts[0]}
                found.append({"load": load, "schedule": name} | means | summary(itertools.chain(*served)))
        return found

    return {
        "two_kinds": two_kinds,
        "requests": {"past": len(past), "arriving": len(texts)},
        "lengths": sorted(lengths),
        "correlation": related,  # of predicted and true lengths; None: all are equal
        "capacity": capacity,
        "costs": costs,
        "measured": latencies(options.load, options.repeats, measured),
        "simulated": latencies(sorted({*SIMULATED_LOADS, *options.load}), options.draws, simulated),
    }


def calibrate(requests: Requests, two_kinds: bool, say: Callable[[str], None]) -> tuple[list[Arrival], Costs, float]:
    """Returns the texts, what the simulator needs, and the requests a second that can be done.

    Three ways to decode all prompts differ in rounds, tokens read and texts put aside: three equations of three costs.
    """
    prompts, repeats, most = requests.prompts, requests.options.repeats, requests.options.max_new_tokens
    texts, equations = [], []
    is_long = np.random.default_rng(0).random(len(prompts)) < (0.25 if two_kinds else 1.0)
    is_long[-1] = True  # caches are as large for all
    budgets = [most if long else max(most // 8, 1) for long in is_long]
    ways = {"all": budgets, "short": [1] * (len(prompts) - 1) + [most], "put aside": budgets}
    for way, asked in ways.items():
        times = []
        for turn in range(repeats):
            say(f"costs, {way}, {turn + 1} of {repeats}")
            # Looks every few rounds find the longest text to be put aside for another, whatever it is worth.
            restless = ShortestFirst(predictor=Oracle([one.length for one in texts]), worth=-math.inf)
            schedule = restless if way == "put aside" else FirstCome()
            run = requests.queued(prompts, asked, schedule=schedule, rounds_per_slice=ROUNDS_PER_LOOK)
            times.append(run.seconds)
        counts = (run.rounds, sum(map(len, prompts)), run.work.usage.put_aside)
        equations.append([*counts, statistics.median(times)])
        if way == "all":
            busy = run.work.usage.busy
            texts = [
                Arrival(prompt=prompt, length=len(one.tokens), budget=budget, dropped=one.dropped)
                for prompt, budget, one in zip(prompts, budgets, run.texts, strict=True)
            ]
    equations = np.array(equations)
    per_round, per_token, per_swap = np.linalg.solve(equations[:, :3], equations[:, 3]).tolist()
    costs = Costs(
        seconds_per_round=per_round,
        seconds_per_prefill_token=max(per_token, 0.0),
        seconds_per_swap=max(per_swap, 0.0),
        emitted_per_round=sum(one.length for one in texts) / busy,
    )
    return texts, costs, len(prompts) / equations[0, 3]
