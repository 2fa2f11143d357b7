"""Measures the first two minutes of an endpoint: its speed, and the longest pauses of its streams.

    python launch/study.py serving --output=runs/serving.json

For each number of clients, launch/serve.py begins with its defaults and an empty compilation cache.
Clients run on the same machine; each sends its next request as soon as it is answered. Programs
that a load needs are compiled in the first minute, while requests are served.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from launch.lib.config import CHECKOUT
from launch.lib.study import Document, Published, Say, Study
from specsamp.analysis.report import Table
from specsamp.checkpoints.trained_pair import load_prompts

PAIR = "python"
MINUTE = 60.0  # seconds
FIELDS = {
    "model": PAIR,
    "max_tokens": 128,
    "temperature": 0.8,
    "top_p": 0.95,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@dataclasses.dataclass(frozen=True)
class Stream:
    """A streamed answer.

    Attributes:
      sent: when the request was sent, in seconds.
      times: when each part of the text came.
      tokens: number of tokens in each part, in proportion to its characters.
    """

    sent: float
    times: np.ndarray
    tokens: np.ndarray

    @property
    def pauses(self) -> np.ndarray:
        """Returns the seconds between neighbouring parts."""
        return np.diff(self.times)


def prepare(options: Any) -> None:
    """Checks the numbers of clients."""
    for number in options.clients:
        if not number.isdecimal() or int(number) < 1:
            raise ValueError(f"--clients={number}: give numbers from 1 on, such as 1,8,32")


def measure(options: Any, say: Say) -> dict[str, Any]:
    """Starts a server for each number of clients, and puts load on it for two minutes."""
    loads = []
    for clients in map(int, options.clients):
        say(f"{clients} clients: the server starts")
        begin = time.perf_counter()
        with running_server() as url:
            ready = time.perf_counter()
            say(f"{clients} clients: two minutes of requests")
            streams = requests_until(url, clients, ready + 2 * MINUTE)
        minutes = [of_minute(streams, ready + number * MINUTE) for number in range(2)]
        loads.append({"clients": clients, "seconds_to_start": ready - begin, "minutes": minutes})
    return {"pair": PAIR, "loads": loads}


@contextlib.contextmanager
def running_server() -> Iterator[str]:
    """Starts an endpoint for which nothing is compiled; yields its address."""
    command = [sys.executable, "-um", "launch.serve", "--port=0", "--plain"]
    command += [f"--config=configs/trained_pair.py:{PAIR}"]
    with tempfile.TemporaryDirectory() as empty:
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": empty}
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT, env=environment
        )
        with server:
            try:
                matches = (re.search(r"ready: (\S+)/v1 ", line) for line in server.stdout)
                ready = next(filter(None, matches), None)
                if ready is None:
                    raise ValueError("the server did not start; its reason is above")
                # A full pipe would stop the server, which writes a line for each request.
                threading.Thread(target=server.stdout.read, daemon=True).start()
                yield ready[1]
            finally:
                server.terminate()


def requests_until(url: str, clients: int, end: float) -> list[Stream]:
    """Returns the answers to a number of clients that send requests until a moment."""
    prompts = load_prompts(PAIR)

    def client(number: int) -> list[Stream]:
        streams = []
        while time.perf_counter() < end:
            seed = number + len(streams) * clients
            streams.append(streamed(url, prompts[seed % len(prompts)], seed))
        return streams

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        return [stream for streams in pool.map(client, range(clients)) for stream in streams]


def streamed(url: str, prompt: str, seed: int) -> Stream:
    """Sends a request, and reads its answer."""
    body = json.dumps(FIELDS | {"prompt": prompt, "seed": seed}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    sent = time.perf_counter()
    times, characters, total = [], [], 0
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if event.get("usage"):
                total = event["usage"]["completion_tokens"]
            text = "".join(choice["text"] for choice in event["choices"])
            if text:
                times.append(time.perf_counter())
                characters.append(len(text))
    share = np.array(characters) / max(sum(characters), 1)
    return Stream(sent, np.array(times), total * share)


def of_minute(streams: Sequence[Stream], start: float) -> dict[str, float]:
    """Returns the tokens per second of a minute, and its longest waits in seconds."""

    def within(times: np.ndarray) -> np.ndarray:
        return (times >= start) & (times < start + MINUTE)

    tokens = sum(stream.tokens[within(stream.times)].sum() for stream in streams)
    pauses = [stream.pauses[within(stream.times[1:])] for stream in streams]
    first = [
        stream.times[0] - stream.sent
        for stream in streams
        if len(stream.times) and within(stream.times[:1])[0]
    ]
    return {
        "tokens_per_second": tokens / MINUTE,
        "longest_pause": max(np.concatenate(pauses), default=0.0),
        "longest_first": max(first, default=0.0),
    }


def first_minutes(document: Document) -> Table:
    """Returns both minutes of each load."""
    rows = []
    for load in document["loads"]:
        first, second = load["minutes"]
        share = first["tokens_per_second"] / second["tokens_per_second"]
        rows.append(
            (
                f"{load['clients']}",
                f"{first['tokens_per_second']:.0f}",
                f"{second['tokens_per_second']:.0f}",
                f"{share:.2f}",
                *(f"{minute['longest_pause']:.1f}" for minute in (first, second)),
                *(f"{minute['longest_first']:.1f}" for minute in (first, second)),
            )
        )
    return Table(
        title="The first two minutes of an endpoint",
        header=(
            "clients",
            "tokens/s, minute 1",
            "minute 2",
            "1 / 2",
            "longest pause, s, minute 1",
            "minute 2",
            "longest wait for a text to begin, s, minute 1",
            "minute 2",
        ),
        rows=rows,
    )


STUDY = Study(
    question="How fast is an endpoint in its first two minutes, while it still compiles?",
    measure=measure,
    prepare=prepare,
    options={"clients": (["1", "8", "32"], "Numbers of clients, each with a server of its own.")},
    tables={"first_minutes": Published(["serving"], first_minutes)},
)
