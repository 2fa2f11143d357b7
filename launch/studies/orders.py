"""Compares first come, first served with the shortest text first, by the load of a service.

    python launch/study.py orders --output=runs/orders.json

Requests arrive at random moments, in each order at the same ones. A load of 1 is the mean speed of
the service with all rows busy. Lengths are predicted from finished texts, or known: no text ends
before its budget. In the first kind of requests three in four have an eighth of the budget of the
others; in the second all budgets are alike, so that no order can gain.
"""

import collections
import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from launch.lib.study import Document, Published, Say, Study
from specsamp import (
    Chunk,
    FirstCome,
    SamplingRequest,
    ShortestFirst,
    chain,
    temperature,
    top_p,
    validate,
)
from specsamp.analysis.report import Table
from specsamp.checkpoints.trained_pair import load_pair, load_prompts
from specsamp.decoding.method import make_method
from specsamp.serving.service import Service
from specsamp.serving.sizes import Chunks, Resize

PAIR, K, ROWS = "python", 3, 4
CONTEXT, PROMPT = 256, 32  # tokens
KINDS = {"short and long": (24, 24, 24, 192), "alike": (64,)}
LOADS = (0.5, 0.8, 1.1)
ORDERS = {
    "first come": FirstCome,
    "shortest predicted": ShortestFirst,
    "shortest known": lambda: ShortestFirst(predictor=lambda request: request.max_new_tokens),
}


def measure(options: Any, say: Say) -> dict[str, Any]:
    """Serves the same requests in each order, at each load."""
    count = validate.integer("--requests", options.requests, 1)
    validate.integer("--trials", options.trials, 1)
    service = make_service(count)
    say("compiling")
    compile_all(service)
    service.start()
    say("preempting for the first time")
    service.batch.scheduler.order = ORDERS["shortest known"]()
    serve(service, make_requests(KINDS["short and long"], 16), np.arange(16) / 20)
    runs = []
    for kind, budgets in KINDS.items():
        requests = make_requests(budgets, count)
        tokens = sum(request.max_new_tokens for request in requests)
        say(f"{kind}: all requests at once")
        service.batch.scheduler.order = FirstCome()
        start = time.monotonic()
        serve(service, requests, [0.0] * count)
        speed = tokens / (time.monotonic() - start)
        for load, trial, (name, make) in itertools.product(
            LOADS, range(options.trials), ORDERS.items()
        ):
            say(f"{kind}, load {load}, trial {trial + 1}, {name}")
            service.batch.scheduler.order = make()
            preempted = service.batch.usage.preempted
            gaps = np.random.default_rng(trial).exponential(tokens / count / (load * speed), count)
            seconds = serve(service, requests, np.cumsum(gaps))
            each = 1e3 * seconds / [request.max_new_tokens for request in requests]
            runs.append(
                {
                    "kind": kind,
                    "load": load,
                    "order": name,
                    "ms_per_token": {"mean": each.mean(), "p90": np.quantile(each, 0.9)},
                    "longest_seconds": seconds.max(),
                    "preempted": service.batch.usage.preempted - preempted,
                }
            )
    service.close()
    service.join()
    return {"pair": PAIR, "K": K, "rows": ROWS, "requests": count, "runs": runs}


def make_service(count: int) -> Service:
    """Returns a service of the shipped pair, with a queue for all requests."""
    pair = load_pair(PAIR)
    sampling = chain(temperature(0.8), top_p(0.95))
    method = make_method(pair, draft_length=K, sampling=sampling)
    return Service(pair, method, rows=ROWS, context=CONTEXT, max_waiting=count, in_background=False)


def compile_all(service: Service) -> None:
    """Compiles all sizes, and all changes between them."""
    service.compile()
    sizes = service.batch.sizes
    changes = [Resize(*pair) for pair in itertools.permutations(sizes.all, 2)]
    for program in (*sizes.all, *map(Chunks, sizes.slots), *changes):
        sizes.programs.make(program)


def make_requests(budgets: Sequence[int], count: int) -> list[SamplingRequest]:
    """Returns requests of held-out prompts, which have the budgets in turn."""
    tokenizer = load_pair(PAIR).tokenizer
    prompts = itertools.cycle([tokenizer.encode(text)[-PROMPT:] for text in load_prompts(PAIR)])
    return [
        SamplingRequest(prompts=[prompt], max_new_tokens=budget, seed=seed, ignore_eos=True)
        for seed, prompt, budget in zip(range(count), prompts, itertools.cycle(budgets))
    ]


def serve(
    service: Service, requests: Sequence[SamplingRequest], arrivals: Sequence[float]
) -> np.ndarray:
    """Submits requests at their moments; returns the seconds from each arrival to its last token.

    Raises:
      RuntimeError: a request failed.
    """
    ends: dict[int, Any] = {}
    all_ended = threading.Event()

    def deliver(number: int, chunk: Any) -> None:
        ends[number] = time.monotonic() if isinstance(chunk, Chunk) else chunk
        if len(ends) == len(requests):
            all_ended.set()

    start = time.monotonic()
    for number, (request, moment) in enumerate(zip(requests, arrivals)):
        time.sleep(max(start + moment - time.monotonic(), 0))
        service.submit(request, lambda chunk, number=number: deliver(number, chunk))
    all_ended.wait()
    failures = [end for end in ends.values() if not isinstance(end, float)]
    if failures:
        raise RuntimeError(f"a request failed: {failures[0]}")
    return np.array([ends[number] for number in range(len(requests))]) - start - arrivals


def orders(document: Document) -> Table:
    """Returns medians over the trials of each order, by load, with the least and the most."""
    trials = collections.defaultdict(list)
    for run in document["runs"]:
        trials[run["kind"], run["load"], run["order"]].append(run)
    rows = []
    for (kind, load, order), runs in trials.items():
        means = [run["ms_per_token"]["mean"] for run in runs]
        tails = [run["ms_per_token"]["p90"] for run in runs]
        longest = [run["longest_seconds"] for run in runs]
        firsts = [run["ms_per_token"]["mean"] for run in trials[kind, load, "first come"]]
        shares = [mean / first for mean, first in zip(means, firsts)]
        rows.append(
            {
                "requests": kind,
                "load": f"{load:g}",
                "order": order,
                "ms per token": f"{np.median(means):.0f} ({min(means):.0f} to {max(means):.0f})",
                "of first come": f"{np.median(shares):.2f}",
                "p90": f"{np.median(tails):.0f}",
                "longest, s": f"{np.median(longest):.1f}",
                "preempted": f"{np.median([run['preempted'] for run in runs]):.0f}",
            }
        )
    return Table.of("Orders of requests", rows)


STUDY = Study(
    question="When does a service gain by decoding the shortest text first?",
    measure=measure,
    options={
        "requests": (80, "Number of requests in each trial."),
        "trials": (5, "Number of trials of each order, each with other moments of arrival."),
    },
    tables={"orders": Published(["python_pair_orders"], orders)},
)
