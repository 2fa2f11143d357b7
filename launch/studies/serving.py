"""Measures the endpoint of specsamp.serving under load.

    python launch/study.py serving --output=runs/python_pair_serve_load.json

Latencies of clients of launch/serve.py, with its defaults, on the server's machine; each sends a request as soon as it is
answered. Beside them one text at a time by `generate`, and how long the first answer takes from the start of a server for
which nothing is compiled yet.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from launch.lib.config import CHECKOUT
from launch.lib.study import Document, Key, Option, Published, Say, Study, answers
from specsamp import chain, generate, load_pair, temperature, top_p
from specsamp.analysis.report import Table
from specsamp.checkpoints.trained_pair import load_prompts
from specsamp.models import few_rows

PAIR, K, CLIENTS = "python", 3, (1, 4, 8, 16)
SETTLING = 45.0  # seconds of the same load before it counts: the server compiles what it needs beside its texts


def measure(options: Any, key: Key, say: Say) -> dict[str, Any]:
    """Puts load on a server that drafts, then on one that does not."""
    fields = {"model": PAIR, "max_tokens": options.max_new_tokens, "temperature": 0.8, "top_p": 0.95}
    found: dict[int, list] = {K: [], 0: []}
    alone: dict[int, dict] = {}
    for length, runs in found.items():
        say(f"K = {length}: the server compiles")
        command = [sys.executable, "-um", "launch.serve", "--port=0", "--plain"]
        command += [f"--config=configs/trained_pair.py:{PAIR}", f"--config.draft_length={length}"]
        begin, nothing = time.perf_counter(), tempfile.TemporaryDirectory()
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": nothing.name}
        with (
            nothing,
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT, env=environment) as server,
        ):
            try:
                ready = next(filter(None, (re.search(r"ready: (\S+)/v1 ", line) for line in server.stdout)), None)
                if ready is None:
                    raise ValueError("the server did not begin; it said why above")
                threading.Thread(target=server.stdout.read, daemon=True).start()  # a line for each request
                load(ready[1], 1, 1, fields)
                alone[length] = {"seconds_to_first_answer": time.perf_counter() - begin}
                for clients in CLIENTS:
                    say(f"K = {length}, {clients} clients")
                    settled = time.perf_counter() + SETTLING
                    while time.perf_counter() < settled:
                        load(ready[1], clients, 2 * clients, fields)
                    runs.append(load(ready[1], clients, options.requests, fields))
            finally:
                server.terminate()  # it ends its connections, and says nothing
        say(f"K = {length}, generate")
        alone[length]["tokens_per_second"] = by_generate(length, options)
    return {"K": found, "alone": alone}


def by_generate(length: int, options: Any) -> float:
    """Returns the tokens a second of the same prompts, one at a time."""
    few_rows.build()  # as the server does
    pair, prompts = load_pair(PAIR), load_prompts(PAIR)
    settings = {"sampling": chain(temperature(0.8), top_p(0.95)), "draft_length": length}
    for _ in range(2):  # the first time compiles
        begin, tokens = time.perf_counter(), 0
        for number in range(options.requests // 4):
            (text,) = generate(pair, [prompts[number % len(prompts)]], options.max_new_tokens, seed=number, **settings)
            tokens += len(text.tokens)
    return tokens / (time.perf_counter() - begin)


def load(url: str, clients: int, requests: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns tokens per second and latencies of a number of clients, which share the requests."""

    def ask(number: int) -> tuple[int, float, float]:
        """Returns tokens, and the seconds to the first event and to the end of a streamed answer."""
        prompt = prompts[number % len(prompts)]
        asked = {**fields, "prompt": prompt, "seed": number, "stream": True, "stream_options": {"include_usage": True}}
        body, begin = json.dumps(asked).encode(), time.perf_counter()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            events = [(time.perf_counter() - begin, line) for line in answer if line.startswith(b"data: {")]
        usage = json.loads(events[-1][1].removeprefix(b"data: "))["usage"]
        return usage["completion_tokens"], events[0][0], time.perf_counter() - begin

    prompts, begin = load_prompts(PAIR), time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        tokens, first, end = zip(*pool.map(ask, range(requests)))
    spans = {"seconds_to_first_token": first, "seconds_to_end": end}
    quantiles = {name: {"median": np.median(each), "p90": np.quantile(each, 0.9)} for name, each in spans.items()}
    return {"clients": clients, "tokens_per_second": sum(tokens) / (time.perf_counter() - begin), **quantiles}


def serve_load(document: Document) -> Table:
    """Returns what clients of the endpoint see, by their number, with drafts and without."""
    rows, (found,) = [], [result for _, result in answers(document)]
    for length, runs in found["K"].items():
        rows.append((length, "generate", f"{found['alone'][length]['tokens_per_second']:.0f}", "", ""))
        for run in runs:
            spans = (run["seconds_to_first_token"], run["seconds_to_end"])
            times = (f"{each['median']:.2f} ({each['p90']:.2f})" for each in spans)
            rows.append((length, f"{run['clients']}", f"{run['tokens_per_second']:.0f}", *times))
    header = ("K", "clients", "tokens per second", "first token, s", "whole answer, s")
    first = ", ".join(f"{each['seconds_to_first_answer']:.0f} s with K = {K}" for K, each in found["alone"].items())
    note = "Answers are streamed; 90th percentiles in brackets. "
    note += f"First answer after the start, nothing compiled: {first}."
    return Table(title="The endpoint under load", header=header, rows=rows, note=note)


STUDY = Study(
    question="How long do clients of the endpoint wait?",
    options={
        "max_new_tokens": Option(128, "The budget of each text.", least=2),
        "requests": Option(64, "Requests of each number of clients, together.", least=1),
    },
    measure=measure,
    tables={"serve_load": Published(["python_pair_serve_load"], serve_load)},
    shown=lambda options: ["serve_load"],
)
