"""Measures queue, schedules and endpoint of specsamp.serving; each question is a cell.

    python launch/study.py serving --ask=batches --problems=HumanEval.jsonl.gz --output=runs/python_pair_refill.json
    python launch/study.py serving --ask=arrivals,two_kinds --rows=4 --problems=HumanEval.jsonl.gz
    python launch/study.py serving --ask=endpoint --max_new_tokens=128

batches: rounds and time of fixed batches, whose rows wait for the slowest, beside the queue; what it costs to leave the
loop every few rounds, where all texts are equally long and nothing is refilled; how many texts differ from those of the
same prompt alone. Near-ties of float32 logits may fall either way in another batch.

arrivals: who waits how long under each schedule. All texts are decoded once, without a break: this gives their lengths,
which no schedule changes, the requests a second that the machine can do, and costs. Then the problems after the first
--past, from which lengths are predicted, arrive at random times, at several loads. Beside what the clock says stands
what the simulator makes of the costs. Latency is normalised: all the time that a text took, over its tokens.

two_kinds: the same, where three requests in four ask for an eighth of the budget and no text stops early.

endpoint: what clients of launch/serve.py find who ask again as soon as they are answered; they share the machine's cores
with the server.
"""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any

from launch.lib import clients
from launch.lib.study import Document, Option, Published, Study, here
from launch.studies.serving_queue import Requests, arrivals, batches
from specsamp import chain, load_pair, temperature, top_p
from specsamp.analysis.report import Table
from specsamp.checkpoints.pair import load_prompts
from specsamp.decoding.checks import encode
from specsamp.evaluation.tasks import load_task

TABLES = {"batches": "refill", "arrivals": "scheduling_humaneval", "two_kinds": "scheduling", "endpoint": "serve_load"}
SAMPLING = {"temperature": 0.8, "top_p": 0.95}
OPTIONS = {
    "ask": Option(tuple(TABLES), "Ask these questions, with commas between them.", choices=tuple(TABLES)),
    "task": Option("humaneval", "Decode the problems of this task, with its stop texts."),
    "problems": Option(None, "The problems: a file or a data set; by default the task's own."),
    "pair": Option("python", "The pair, by name or folder."),
    "count": Option(164, "Take the first so many problems.", least=1),
    "rows": Option(8, "Texts that are decoded together.", least=1),
    "max_new_tokens": Option(192, "The budget of each text.", least=2),
    "K": Option(3, "Tokens per draft; 0 decodes plainly.", least=0),
    "repeats": Option(3, "Measure times so often, in turn; loads at so many draws of the arrivals.", least=1),
    "alone": Option(24, "Compare so many texts with those of their prompts alone.", least=0),
    "past": Option(80, "Predict from the texts of the first so many problems; the others arrive.", least=1),
    "load": Option((0.5, 0.8, 1.1), "Measure at these shares of the capacity, with commas between them.", least=0.01),
    "draws": Option(50, "Simulate each load at so many draws of the arrivals.", least=1),
    "ageing": Option(1.0, "A second of waiting is worth so many tokens.", least=0.0),
    "clients": Option((1, 4, 8, 16), "Numbers of clients that ask at a time, with commas between them.", least=1),
    "requests": Option(64, "Requests of each number of clients, together.", least=1),
    "context": Option(512, "Tokens of a prompt and its text together, at the endpoint.", least=2),
}
SHARED = [name for name in OPTIONS if name not in ("ask", "problems")]  # by all cells of a file


def prepare(options: Any) -> Requests:
    """Reads pair and problems; the endpoint reads its own."""
    if set(options.ask) == {"endpoint"}:
        return Requests(options=options, pair=None, prompts=(), settings={})
    task = load_task(options.task, options.problems, insist=True)  # nothing is scored: no program runs
    pair = load_pair(options.pair)
    room = (pair.target.max_positions or math.inf) - options.max_new_tokens
    encoded = encode(pair, [one.prompt for one in task.problems])
    prompts = [prompt for prompt in encoded if len(prompt) <= room][: options.count]
    if {"arrivals", "two_kinds"} & set(options.ask) and len(prompts) < options.past + 2:
        raise ValueError(f"--past={options.past}: give less than {len(prompts) - 1}, as {len(prompts)} problems fit")
    sampling = chain(temperature(0.8), top_p(0.95))
    settings = {"sampling": sampling, "draft_length": options.K, "stop": list(task.stop)}
    return Requests(options=options, pair=pair, prompts=prompts, settings=settings)


def measure(requests: Requests, key, say) -> dict[str, Any]:
    """Answers one question."""
    options = requests.options
    facts = {name: getattr(options, name) for name in ("pair", "task", "K", "rows", "max_new_tokens", "ageing")}
    match key["ask"]:
        case "batches":
            return facts | {"problems": len(requests.prompts)} | batches(requests, say)
        case "endpoint":
            return endpoint(options, say)
    return facts | arrivals(requests, key["ask"] == "two_kinds", say)


def endpoint(options: Any, say) -> dict[str, Any]:
    """Puts load on a server that drafts, then on one that does not."""
    prompts, most, found = load_prompts(options.pair), max(options.clients), {}
    fields = {"model": options.pair, "max_tokens": options.max_new_tokens, **SAMPLING}
    server = [f"--config=configs/trained_pair.py:{options.pair}", f"--rows={options.rows}", "--warps=top_p"]
    server += [f"--context={options.context}", f"--max_waiting={most}"]
    for K in dict.fromkeys((options.K, 0)):
        say(f"K = {K}: the server compiles")
        with clients.serving(*server, f"--config.draft_length={K}") as url:
            clients.load(url, prompts, most, most, **fields)  # warms up
            found[str(K)] = []
            for count in sorted(set(options.clients)):
                say(f"K = {K}, {count} clients")
                found[str(K)].append(clients.load(url, prompts, count, options.requests, **fields))
    facts = {"pair": options.pair, "rows": options.rows, "max_tokens": options.max_new_tokens, "sampling": SAMPLING}
    return facts | {"K": found}


def answer(document: Document, ask: str) -> Document:
    """Returns what a question found; older files hold that of one question alone."""
    cells = document.get("cells", [{"key": {"ask": ask}, "result": document}])
    return next(cell["result"] for cell in cells if cell["key"]["ask"] == ask)


def refill(document: Document) -> Table:
    """Returns rounds and times of the queue and of fixed batches."""
    document = answer(document, "batches")
    found, slices, alone = (document[part] for part in ("fixed_batches", "slices", "alone"))
    rows = []
    for way, runs in found["runs"].items():
        seconds = statistics.median(run["seconds"] for run in runs)
        rows.append((way, f"{runs[0]['rounds']}", f"{seconds:.1f}", f"{1e3 * seconds / runs[0]['tokens']:.2f}"))
    lengths, occupancy = found["tokens_per_text"], found["occupancy"]
    busy = "" if occupancy is None else f"Rows were busy in {occupancy:.1%} of the rounds in which prompts waited; "
    note = (
        f"{document['problems']} texts of {lengths['least']} to {lengths['most']} tokens (median {lengths['median']:g}), "
        f"{document['rows']} rows, K = {document['K']}. {busy}{found['speedup']:.2f}x. Leaving the loop every "
        f"{slices['rounds_per_slice']} rounds, where all texts are equally long, took {slices['median'] - 1:+.1%} of the "
        f"time of one run (median of {len(slices['ratios'])} pairs). {alone['texts'] - alone['differ']} of "
        f"{alone['texts']} texts are those of their prompts alone."
    )
    header = ("", "rounds", "seconds", "ms per token")
    return Table(title="The queue beside fixed batches", header=header, rows=rows, note=note)


def scheduling(ask: str, document: Document) -> Table:
    """Returns latencies under schedules, by load."""
    document = answer(document, ask)
    rows = []
    for row in document["measured"]:
        ms = (f"{1e3 * row[field]:.1f}" for field in ("mean", "p90"))
        rows.append((f"{row['load']:g}", row["schedule"], *ms, f"{row['longest']:.1f}", f"{row['put_aside']:.0f}"))
    lengths, related = document["lengths"], document["correlation"]
    note = (
        f"{document['requests']['arriving']} requests arrive, of {lengths[0]} to {lengths[-1]} tokens (mean "
        f"{statistics.mean(lengths):.0f}), for {document['rows']} rows; load 1 is {document['capacity']:.2f} of them a "
        f"second. Predicted and true lengths: {'all equal' if related is None else f'correlation {related:.2f}'}."
    )
    kinds = "two kinds of requests" if document["two_kinds"] else "requests of one kind"
    header = ("load", "schedule", "ms per token", "p90", "longest, s", "put aside")
    return Table(title=f"Normalised latency, {kinds}", header=header, rows=rows, note=note, left=2)


def serve_load(document: Document) -> Table:
    """Returns what clients of the endpoint found, by their number, with drafts and without."""
    document = answer(document, "endpoint")
    rows = []
    for K, runs in document["K"].items():
        for run in runs:
            spans = (run["seconds_to_first_token"], run["seconds_to_end"])
            times = (f"{each['median']:.2f} ({each['p90']:.2f})" for each in spans)
            rows.append((K, f"{run['clients']}", f"{run['tokens_per_second']:.0f}", *times))
    header = ("K", "clients", "tokens per second", "first token, s", "whole answer, s")
    note = f"{document['rows']} rows; answers of at most {document['max_tokens']} tokens, streamed; 90th percentiles in brackets."
    return Table(title="The endpoint under load", header=header, rows=rows, note=note)


STUDY = Study(
    question="What do queue, schedules and endpoint gain, and who waits how long?",
    options=OPTIONS,
    prepare=prepare,
    cells=lambda requests: [{"ask": ask} for ask in requests.options.ask],
    identity=lambda requests: {name: getattr(requests.options, name) for name in SHARED} | here(),
    measure=measure,
    tables={
        "refill": Published(["python_pair_refill"], refill),
        "scheduling": Published(["python_pair_scheduling"], functools.partial(scheduling, "two_kinds")),
        "scheduling_humaneval": Published(
            ["python_pair_scheduling_humaneval"], functools.partial(scheduling, "arrivals")
        ),
        "serve_load": Published(["python_pair_serve_load"], serve_load),
    },
    shown=lambda requests: [TABLES[ask] for ask in requests.options.ask],
)
