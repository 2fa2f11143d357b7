"""Compares first come, first served with the shortest text first, by the load of a service.

    python launch/study.py orders --output=runs/orders.json

Requests arrive at random moments, in each order at the same ones. A load of 1 is the mean speed of
the service with all rows busy. Lengths are predicted from finished texts, or known: no text ends
before its budget. In the first kind of requests three in four have an eighth of the budget of the
others; in the second all budgets are alike, so that no order can gain.
"""

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
        for load, (name, make) in itertools.product(LOADS, ORDERS.items()):
            say(f"{kind}, load {load}, {name}")
            service.batch.scheduler.order = make()
            preempted = service.batch.admission.preempted
            gaps = np.random.default_rng(1).exponential(tokens / count / (load * speed), count)
            seconds = serve(service, requests, np.cumsum(gaps))
            each = 1e3 * seconds / [request.max_new_tokens for request in requests]
            runs.append(
                {
                    "kind": kind,
                    "load": load,
                    "order": name,
                    "ms_per_token": {"mean": each.mean(), "p90": np.quantile(each, 0.9)},
                    "longest_seconds": seconds.max(),
                    "preempted": service.batch.admission.preempted - preempted,
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
    """Returns the times of each order, by load."""
    rows = [
        (
            run["kind"],
            f"{run['load']:g}",
            run["order"],
            f"{run['ms_per_token']['mean']:.1f}",
            f"{run['ms_per_token']['p90']:.1f}",
            f"{run['longest_seconds']:.1f}",
            f"{run['preempted']}",
        )
        for run in document["runs"]
    ]
    return Table(
        title="Orders of requests",
        header=("requests", "load", "order", "ms per token", "p90", "longest, s", "preempted"),
        rows=rows,
    )


STUDY = Study(
    question="When does a service gain by decoding the shortest text first?",
    measure=measure,
    options={"requests": (120, "Number of requests in each run.")},
    tables={"orders": Published(["python_pair_orders"], orders)},
)
