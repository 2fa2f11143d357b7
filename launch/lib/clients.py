"""Puts load on the endpoint: a server process, and clients that ask again as soon as they are answered."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from launch.lib.config import CHECKOUT

READY = re.compile(r"ready: (\S+)/v1 ")


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """Runs launch/serve.py in a process of its own, and gives its address once it is ready."""
    process = subprocess.Popen(
        [sys.executable, str(CHECKOUT / "launch/serve.py"), "--port=0", "--plain", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONUNBUFFERED": "1"},
    )
    try:
        for line in process.stdout:
            if found := READY.search(line):
                yield found[1]
                return
        raise ValueError("the server did not begin; it said why above")
    finally:
        process.terminate()  # it ends its connections, and says nothing
        process.wait()


def load(url: str, prompts: Sequence[str], clients: int, requests: int, **fields: Any) -> dict[str, Any]:
    """Returns what so many clients find, who take turns with the requests; fields are those of a completion."""
    before, begin = _health(url), time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        asked = [pool.submit(_ask, url, prompt=prompts[i % len(prompts)], seed=i, **fields) for i in range(requests)]
        found = [one.result() for one in asked]
    seconds, after = time.perf_counter() - begin, _health(url)
    rounds = after["rounds"] - before["rounds"]
    busy = after["busy_rounds_of_rows"] - before["busy_rounds_of_rows"]
    tokens, accepted, drafted, first, end = zip(*found)
    return {
        "clients": clients,
        "requests": requests,
        "seconds": seconds,
        "tokens": sum(tokens),
        "tokens_per_second": sum(tokens) / seconds,
        "accepted": sum(accepted),
        "drafted": sum(drafted),
        "seconds_to_first_token": {"median": float(np.median(first)), "p90": float(np.quantile(first, 0.9))},
        "seconds_to_end": {"median": float(np.median(end)), "p90": float(np.quantile(end, 0.9))},
        "rounds": rounds,
        "rows_busy": busy / (after["rows"] * rounds),
    }


def _ask(url: str, **fields: Any) -> tuple[int, int, int, float, float]:
    """Returns tokens, those accepted and drafted, and the seconds to the first event and to the end of a streamed answer."""
    body = json.dumps({**fields, "stream": True, "stream_options": {"include_usage": True}}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    begin, events = time.perf_counter(), []
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                events.append((time.perf_counter() - begin, line))
    usage = json.loads(events[-1][1].removeprefix(b"data: "))["usage"]
    details = usage["completion_tokens_details"]
    accepted = details["accepted_prediction_tokens"]
    drafted = accepted + details["rejected_prediction_tokens"]
    return usage["completion_tokens"], accepted, drafted, events[0][0], time.perf_counter() - begin


def _health(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
        return json.load(answer)
