"""Measures queue and endpoint of specsamp.serving; each question is a cell.

    python launch/study.py serving --ask=batches --problems=HumanEval.jsonl.gz --output=runs/python_pair_refill.json
    python launch/study.py serving --ask=endpoint --max_new_tokens=128

batches: rounds and time of fixed batches, which wait for their slowest row, and of the queue.
endpoint: latencies of clients of launch/serve.py, with its defaults, on the server's machine; each sends a request as
soon as it is answered. Beside them one text at a time by `generate`, and how long the first answer takes from the start
of a server for which nothing is compiled yet.
"""

import json
import os
import re
import statistics
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
from launch.lib.study import Document, Option, Published, Say, Study
from specsamp import chain, generate, generate_many, load_pair, temperature, top_p
from specsamp.analysis.report import Table
from specsamp.analysis.workload import take_turns
from specsamp.checkpoints.trained_pair import load_prompts
from specsamp.decoding.request import encode
from specsamp.evaluation.tasks import load_task
from specsamp.models import few_rows

TABLES = {"batches": "refill", "endpoint": "serve_load"}
PAIR, K, ROWS, CLIENTS = "python", 3, 8, (1, 4, 8, 16)
SETTLING = 45.0  # seconds of the same load before it counts: the server compiles what it needs beside its texts


def prepare(options: Any) -> None:
    """Reads the pair and the problems; an endpoint reads its own pair."""
    if set(options.ask) != {"endpoint"}:
        task = load_task("humaneval", options.problems, insist=True)  # nothing is scored: no program runs
        options.pair = load_pair(PAIR)
        encoded, room = encode(options.pair, [each.prompt for each in task.problems]), options.pair.target.max_positions
        options.prompts = [prompt for prompt in encoded if len(prompt) + options.max_new_tokens <= room]
        sampling = chain(temperature(0.8), top_p(0.95))
        options.settings = {"sampling": sampling, "draft_length": K, "stop": list(task.stop)}


def queued(options: Any) -> dict[str, Any]:
    """Decodes all prompts by the queue, compiled before."""
    work = generate_many(options.pair, options.prompts, options.max_new_tokens, rows=ROWS, **options.settings)
    work.compile()
    begin = time.perf_counter()
    tokens = sum(len(text.tokens) for text in work)
    return {"seconds": time.perf_counter() - begin, "tokens": tokens, "rounds": work.usage.rounds}


def fixed(options: Any) -> dict[str, Any]:
    """Decodes all prompts in fixed batches."""
    begin, rounds, tokens = time.perf_counter(), 0, 0
    for first in range(0, len(options.prompts), ROWS):
        prompts = options.prompts[first : first + ROWS]
        ids = list(range(first, first + len(prompts)))
        texts = generate(options.pair, prompts, options.max_new_tokens, prompt_ids=ids, **options.settings)
        rounds += max(text.stats.rounds + -(-text.dropped // (K + 1)) for text in texts)
        tokens += sum(len(text.tokens) for text in texts)
    return {"seconds": time.perf_counter() - begin, "tokens": tokens, "rounds": rounds}


def batches(options: Any, say: Say) -> dict[str, Any]:
    """Compares the queue with fixed batches."""
    ways = {
        "queue": lambda turn: queued(options),
        "batches": lambda turn: fixed(options),
    }
    runs = take_turns(ways, options.repeats + 1, say)
    return {"fixed_batches": {"runs": {way: each[1:] for way, each in runs.items()}}}  # the first compiles


def endpoint(options: Any, say: Say) -> dict[str, Any]:
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


def answer(document: Document, ask: str) -> Document:
    """Returns the answer to a question; older files hold that of one question alone."""
    cells = document.get("cells", [{"key": {"ask": ask}, "result": document}])
    return next(cell["result"] for cell in cells if cell["key"]["ask"] == ask)


def refill(document: Document) -> Table:
    """Returns rounds and times of the queue and of fixed batches."""
    rows = []
    for way, runs in answer(document, "batches")["fixed_batches"]["runs"].items():
        seconds = statistics.median(run["seconds"] for run in runs)
        rows.append((way, f"{runs[0]['rounds']}", f"{seconds:.1f}", f"{1e3 * seconds / runs[0]['tokens']:.2f}"))
    header = ("", "rounds", "seconds", "ms per token")
    return Table(title="The queue beside fixed batches", header=header, rows=rows)


def serve_load(document: Document) -> Table:
    """Returns what clients of the endpoint see, by their number, with drafts and without."""
    rows, found = [], answer(document, "endpoint")
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


ASKED = {"batches": batches, "endpoint": endpoint}
OPTIONS = {
    "ask": Option(tuple(TABLES), "Ask these questions, with commas between them.", choices=tuple(TABLES)),
    "problems": Option(None, "Decode HumanEval's problems from this file or data set; by default those of the hub."),
    "max_new_tokens": Option(192, "The budget of each text.", least=2),
    "repeats": Option(3, "Measure times so often, in turn.", least=1),
    "requests": Option(64, "Requests of each number of clients, together.", least=1),
}
STUDY = Study(
    question="What does the queue gain, and how long do clients of the endpoint wait?",
    options=OPTIONS,
    prepare=prepare,
    cells=lambda options: [{"ask": ask} for ask in options.ask],
    identity=lambda options: {name: getattr(options, name) for name in [*OPTIONS][2:]},
    measure=lambda options, key, say: ASKED[key["ask"]](options, say),
    tables={
        "refill": Published(["python_pair_refill"], refill),
        "serve_load": Published(["python_pair_serve_load"], serve_load),
    },
    shown=lambda options: [TABLES[ask] for ask in options.ask],
)
