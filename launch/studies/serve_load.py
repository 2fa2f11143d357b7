"""Measures the endpoint under load: a server process, and clients that ask again as soon as they are answered.

    python launch/studies/serve_load.py --output=runs/python_pair_serve_load.json

For each number of clients: tokens a second of all together, time to the first token, time of a whole answer, and the share
of the rows' rounds that were busy; with drafts and without. The clients share the machine's cores with the server.
"""

import asyncio
import contextlib
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import numpy as np
from absl import flags

from launch.lib import entry
from specsamp.analysis.report import Table
from specsamp.checkpoints.pair import load_prompts

_PAIR = flags.DEFINE_string("pair", "python", "The pair, by name or folder.")
_CLIENTS = flags.DEFINE_list("clients", ["1", "4", "8", "16"], "Numbers of clients that ask at a time.")
_REQUESTS = flags.DEFINE_integer("requests", 64, "Requests of each number of clients, together.", lower_bound=1)
_ROWS = flags.DEFINE_integer("rows", 8, "Texts that are decoded together.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("max_tokens", 128, "The budget of each text.", lower_bound=1)
_CONTEXT = flags.DEFINE_integer("context", 512, "Tokens of a prompt and its text together.", lower_bound=2)
_K = flags.DEFINE_integer("K", 3, "Tokens per draft.", lower_bound=1)
_OUTPUT = entry.define_output()

SAMPLING = {"temperature": 0.8, "top_p": 0.95}
READY = re.compile(r"ready: (\S+)/v1 ")


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    try:
        import openai
    except ImportError as error:
        raise ValueError(f"the clients take a library ({error}): pip install openai") from error
    counts = sorted({int(count) for count in _CLIENTS.value if count.isdigit() and int(count)})
    if not counts:
        raise ValueError(f"--clients must be numbers from 1 on; got {','.join(_CLIENTS.value)}")
    prompts = load_prompts(_PAIR.value)
    document = {"pair": _PAIR.value, "rows": _ROWS.value, "max_tokens": _TOKENS.value, "sampling": SAMPLING, "K": {}}
    with entry.progress(console, "measuring") as say:
        for K in (_K.value, 0):
            say(f"K = {K}: the server compiles")
            with serving(K, max(counts)) as url, contextlib.ExitStack() as stack:
                client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0)
                runner = stack.enter_context(asyncio.Runner())
                runner.run(load(client, url, prompts, max(counts), max(counts)))  # warms up
                found = document["K"][str(K)] = []
                for count in counts:
                    say(f"K = {K}, {count} clients")
                    found.append(runner.run(load(client, url, prompts, count, _REQUESTS.value)))
                runner.run(client.close())
    entry.show([table(document)], console)
    entry.write_result(_OUTPUT.value, document, console)


@contextlib.contextmanager
def serving(K: int, clients: int) -> Iterator[str]:
    """Runs a server in a process of its own, and gives its address once it is ready."""
    script = pathlib.Path(__file__).parents[1] / "serve.py"
    config = [f"--config=configs/trained_pair.py:{_PAIR.value}", f"--config.draft_length={K}"]
    options = [f"--rows={_ROWS.value}", f"--context={_CONTEXT.value}", f"--max_waiting={clients}", "--warps=top_p"]
    process = subprocess.Popen(
        [sys.executable, str(script), "--port=0", "--plain", *config, *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(script.parents[1]), "PYTHONUNBUFFERED": "1"},
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


async def load(client, url: str, prompts: list[str], clients: int, requests: int) -> dict:
    """Returns what so many clients find, who take turns with the requests."""
    numbers = itertools.count()
    before, begin, found = health(url), time.perf_counter(), []

    async def ask_on() -> None:
        while (number := next(numbers)) < requests:
            found.append(await ask(client, prompts[number % len(prompts)], seed=number))

    await asyncio.gather(*(ask_on() for _ in range(clients)))
    seconds, after = time.perf_counter() - begin, health(url)
    rounds = after["rounds"] - before["rounds"]
    busy = after["busy_rounds_of_rows"] - before["busy_rounds_of_rows"]
    return {
        "clients": clients,
        "requests": requests,
        "seconds": seconds,
        "tokens": sum(one["tokens"] for one in found),
        "tokens_per_second": sum(one["tokens"] for one in found) / seconds,
        "accepted": sum(one["accepted"] for one in found),
        "drafted": sum(one["drafted"] for one in found),
        "seconds_to_first_token": quantiles([one["first"] for one in found]),
        "seconds_to_end": quantiles([one["end"] for one in found]),
        "rounds": rounds,
        "rows_busy": busy / (after["rows"] * rounds),
    }


async def ask(client, prompt: str, seed: int) -> dict:
    """Returns times and counts of a streamed answer."""
    begin, first = time.perf_counter(), None
    answer = await client.completions.create(
        model=_PAIR.value,
        prompt=prompt,
        max_tokens=_TOKENS.value,
        seed=seed,
        stream=True,
        stream_options={"include_usage": True},
        **SAMPLING,
    )
    async for chunk in answer:
        first = first or time.perf_counter() - begin
    details = chunk.usage.completion_tokens_details
    accepted = details.accepted_prediction_tokens
    return {
        "first": first,
        "end": time.perf_counter() - begin,
        "tokens": chunk.usage.completion_tokens,
        "accepted": accepted,
        "drafted": accepted + details.rejected_prediction_tokens,
    }


def health(url: str) -> dict:
    with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
        return json.load(answer)


def quantiles(seconds: list[float]) -> dict[str, float]:
    return {"median": float(np.median(seconds)), "p90": float(np.quantile(seconds, 0.9))}


def table(document: dict) -> Table:
    rows = [
        (
            K,
            str(run["clients"]),
            f"{run['tokens_per_second']:.0f}",
            *(
                f"{run[name][q]:.2f}"
                for name in ("seconds_to_first_token", "seconds_to_end")
                for q in ("median", "p90")
            ),
            f"{run['rows_busy']:.0%}",
        )
        for K, runs in document["K"].items()
        for run in runs
    ]
    times = ("first token, s", "p90", "whole answer, s", "p90")
    return Table(title="Under load", header=("K", "clients", "tokens/s", *times, "rows busy"), rows=rows)


if __name__ == "__main__":
    entry.run(main)
