"""Measures who waits how long under first come first served and under shortest first, with requests at random times.

    python launch/studies/scheduling.py --problems=HumanEval.jsonl.gz --output=runs/python_pair_scheduling.json

The requests are the problems of a task with its stop texts. All are decoded once, without a break: this gives the length of
each text (which no schedule changes), the requests a second that the machine can do, and the costs of a round, of
prefill and of putting a text aside. The first problems are the past, from which lengths are predicted; the others arrive
at random times, at several loads, shares of what the machine can do. Beside what the clock says is what the simulator
makes of the costs, at more loads. Latencies are normalised: all the time that a text took, over its tokens.

With --two_kinds three requests in four ask for an eighth of the budget, as lines among functions, and no text stops
early: lengths differ much, and budgets tell them.
"""

import math
import statistics
import time

import numpy as np
from absl import flags

from launch.lib import entry
from specsamp import FirstCome, Pair, ShortestFirst, chain, generate_many, load_pair, storage, temperature, top_p
from specsamp.analysis.figures import COLOURS, to_png
from specsamp.analysis.report import Table
from specsamp.decoding.checks import encode
from specsamp.evaluation.tasks import load_task
from specsamp.serving.schedule import ROUNDS_PER_LOOK, Nearest, Ticket, summary
from specsamp.serving.simulate import Arrival, Costs, Oracle, poisson, simulate

_TASK = flags.DEFINE_string("task", "humaneval", "Decode the problems of this task.")
_PROBLEMS = flags.DEFINE_string("problems", None, "The problems: a file or a data set; by default the task's own.")
_PAIR = flags.DEFINE_string("pair", "python", "The pair, by name or folder.")
_PAST = flags.DEFINE_integer("past", 80, "Predict from the texts of the first so many problems.", lower_bound=1)
_COUNT = flags.DEFINE_integer("count", 84, "Let so many problems arrive.", lower_bound=2)
_ROWS = flags.DEFINE_integer("rows", 4, "Texts that are decoded together.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("max_new_tokens", 192, "The budget of each text.", lower_bound=2)
_TWO_KINDS = flags.DEFINE_bool("two_kinds", False, "Let three requests in four ask for an eighth of the budget.")
_K = flags.DEFINE_integer("K", 3, "Tokens per draft; 0 decodes plainly.", lower_bound=0)
_LOADS = flags.DEFINE_multi_float("load", [0.5, 0.8, 1.1], "Measure at this share of the capacity; may be repeated.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Measure each load at so many draws of the arrivals.", lower_bound=1)
_DRAWS = flags.DEFINE_integer("draws", 50, "Simulate each load at so many draws of the arrivals.", lower_bound=1)
_AGEING = flags.DEFINE_float("ageing", 1.0, "A second of waiting is worth so many tokens.", lower_bound=0.0)
_FIGURE = flags.DEFINE_string("figure", None, "Draw mean latency by load into this PNG file.")
_OUTPUT = entry.define_output()

SAMPLING = chain(temperature(0.8), top_p(0.95))
SIMULATED_LOADS = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    entry.check_output(_FIGURE.value, "figure")
    task = load_task(_TASK.value, _PROBLEMS.value, insist=True)  # nothing is scored: no program runs
    pair = load_pair(_PAIR.value)
    prompts = [prompt for prompt in encode(pair, [one.prompt for one in task.problems]) if fits(pair, prompt)]
    prompts = prompts[: _PAST.value + _COUNT.value]
    if len(prompts) < _PAST.value + 2:
        raise ValueError(f"{len(prompts)} problems fit the pair: give a --past below {len(prompts) - 1}")
    stop = [] if _TWO_KINDS.value else list(task.stop)
    with entry.progress(console, "measuring") as say:
        texts, costs, capacity = calibrate(pair, prompts, stop, say)
        past, texts = texts[: _PAST.value], texts[_PAST.value :]
        document = {
            "pair": _PAIR.value,
            "task": _TASK.value,
            "K": _K.value,
            "rows": _ROWS.value,
            "max_new_tokens": _TOKENS.value,
            "two_kinds": _TWO_KINDS.value,
            "ageing": _AGEING.value,
            "requests": {"past": len(past), "arriving": len(texts)},
            "lengths": sorted(one.length for one in texts),
            "correlation": correlation(past, texts),
            "capacity": capacity,
            "costs": {
                "seconds_per_round": costs.seconds_per_round[_ROWS.value],
                "seconds_per_prefill_token": costs.seconds_per_prefill_token,
                "seconds_per_swap": costs.seconds_per_swap,
                "emitted_per_round": costs.emitted_per_round,
            },
            "measured": [
                {"load": load} | row
                for load in _LOADS.value
                for row in measured(pair, past, texts, load * capacity, stop, say)
            ],
            "simulated": [
                {"load": load, "schedule": name} | simulated(past, texts, name, load * capacity, costs)
                for load in sorted({*SIMULATED_LOADS, *_LOADS.value})
                for name in SCHEDULES
            ],
        }
    entry.show(tables(document), console)
    entry.write_result(_OUTPUT.value, document, console)
    if _FIGURE.value:
        storage.write(_FIGURE.value, draw(document))


def fits(pair: Pair, prompt: list[int]) -> bool:
    return len(prompt) + _TOKENS.value <= (pair.target.max_positions or 1 << 30)


def queue(pair: Pair, prompts: list, stop: list[str], budgets: int | list[int], first: int = 0, **options):
    """Returns the queue of some prompts, whose texts are the same in each call; they begin with problem ``first``."""
    ids = list(range(first, first + len(prompts)))
    asked = dict(sampling=SAMPLING, draft_length=_K.value, stop=stop, rows=_ROWS.value, prompt_ids=ids)
    asked["rounds_per_slice"] = ROUNDS_PER_LOOK
    work = generate_many(pair, prompts, budgets, **asked, **options)
    work.compile()
    return work


def calibrate(pair: Pair, prompts: list, stop: list[str], say) -> tuple[list[Arrival], Costs, float]:
    """Returns the texts, what the simulator needs, and the requests a second that can be done.

    Three ways to decode all prompts differ in rounds, tokens read and texts put aside: three equations of three costs.
    """
    is_long = np.random.default_rng(0).random(len(prompts)) < 0.25
    is_long[-1] = True  # caches are as large for all
    budgets = [_TOKENS.value if long or not _TWO_KINDS.value else max(_TOKENS.value // 8, 1) for long in is_long]
    short = [1] * (len(prompts) - 1) + [_TOKENS.value]
    tokens, equations, texts = sum(map(len, prompts)), [], {}
    for way in ("all", "short", "put aside"):
        say(f"costs, {way}")
        times = []
        for _ in range(_REPEATS.value):
            # Looks every few rounds find the longest text to be put aside for another, whatever it is worth.
            oracle = Oracle([texts[row].length for row in range(len(texts))])
            restless = ShortestFirst(predictor=oracle, worth=-math.inf)
            schedule = restless if way == "put aside" else FirstCome()
            work = queue(pair, prompts, stop, short if way == "short" else budgets, schedule=schedule)
            begin = time.perf_counter()
            done = list(work)
            times.append(time.perf_counter() - begin)
        equations.append((work.usage.rounds, tokens, work.usage.put_aside, statistics.median(times)))
        if way == "all":
            capacity, usage = len(prompts) / equations[-1][-1], work.usage
            texts = {
                (at := one.prompt_index): Arrival(
                    prompt=prompts[at], length=len(one.tokens), budget=budgets[at], dropped=one.dropped
                )
                for one in done
            }
    *counts, seconds = zip(*equations)
    per_round, per_token, per_swap = np.linalg.solve(np.array(counts).T, np.array(seconds))
    costs = Costs(
        seconds_per_round={_ROWS.value: float(per_round)},
        seconds_per_prefill_token=max(float(per_token), 0.0),
        seconds_per_swap=max(float(per_swap), 0.0),
        emitted_per_round=sum(one.length for one in texts.values()) / usage.busy,
    )
    return [texts[row] for row in range(len(prompts))], costs, capacity


def informed(past: list[Arrival]) -> Nearest:
    """Returns a predictor that has seen the past."""
    predictor = Nearest()
    for row, one in enumerate(past):
        predictor.finish(Ticket(row=row, prompt=one.prompt, budget=one.budget, emitted=one.length))
    return predictor


SCHEDULES = {
    "first come": lambda past, texts: FirstCome(),
    "shortest predicted": lambda past, texts: ShortestFirst(predictor=informed(past), ageing=_AGEING.value),
    "oracle": lambda past, texts: ShortestFirst(predictor=Oracle([one.length for one in texts]), ageing=_AGEING.value),
}


def correlation(past: list[Arrival], texts: list[Arrival]) -> float | None:
    """Returns that of predicted and true lengths; None where all are equal."""
    predictor = informed(past)
    found = [predictor.remaining(Ticket(row=0, prompt=one.prompt, budget=one.budget)) for one in texts]
    lengths = [one.length for one in texts]
    return float(np.corrcoef(found, lengths)[0, 1]) if np.std(found) and np.std(lengths) else None


def measured(pair: Pair, past: list, texts: list, rate: float, stop: list[str], say) -> list[dict]:
    """Returns each schedule's latencies on the clock, all draws of the arrivals together; schedules take turns."""
    served, put_aside, differ = ({name: [] for name in SCHEDULES} for _ in range(3))
    for draw_ in range(_REPEATS.value):
        arrivals = [one.seconds for one in poisson(texts, rate, draw_)]
        for name, schedule in SCHEDULES.items():
            say(f"{name}, {rate:.2f} requests/s, {draw_} of {_REPEATS.value}")
            prompts, budgets = [one.prompt for one in texts], [one.budget for one in texts]
            asked = dict(first=len(past), schedule=schedule(past, texts), arrivals=arrivals)
            work = queue(pair, prompts, stop, budgets, **asked)
            lengths = {one.prompt_index: len(one.tokens) for one in work}
            served[name] += work.served.values()
            put_aside[name].append(work.usage.put_aside)
            differ[name].append(sum(lengths[row] != one.length for row, one in enumerate(texts)))
    return [
        {"schedule": name, "put_aside": statistics.mean(put_aside[name]), "lengths_that_differ": sum(differ[name])}
        | summary(served[name])
        for name in SCHEDULES
    ]


def simulated(past: list, texts: list, name: str, rate: float, costs: Costs) -> dict:
    """Returns the latencies by the simulator, all draws of the arrivals together."""
    served = []
    for draw_ in range(_DRAWS.value):
        served += simulate(poisson(texts, rate, draw_), SCHEDULES[name](past, texts), costs, rows=_ROWS.value)
    return summary(served)


def tables(document: dict) -> list[Table]:
    on_clock = {(row["load"], row["schedule"]): row for row in document["measured"]}
    rows = []
    for row in document["simulated"]:
        clock = on_clock.get((row["load"], row["schedule"]))
        cells = [f"{1e3 * clock[name]:.1f}" for name in ("mean", "p90")] if clock else ["", ""]
        longest = [f"{clock['longest']:.1f}", f"{clock['put_aside']:.0f}"] if clock else ["", ""]
        cells += [f"{1e3 * row[name]:.1f}" for name in ("mean", "p90")]
        rows.append((f"{row['load']:g}", row["schedule"], *cells, *longest))
    costs, lengths = document["costs"], document["lengths"]
    related = "all equal" if document["correlation"] is None else f"correlation {document['correlation']:.2f}"
    note = (
        f"Load 1 is {document['capacity']:.2f} requests a second, of {statistics.mean(lengths):.0f} tokens on average "
        f"({lengths[0]} to {lengths[-1]}); predicted and true lengths: {related}. A round of {document['rows']} rows "
        f"takes {1e3 * costs['seconds_per_round']:.2f} ms and gives a row {costs['emitted_per_round']:.2f} tokens, a token "
        f"of a prompt {1e3 * costs['seconds_per_prefill_token']:.3f} ms, a text put aside and brought back "
        f"{1e3 * costs['seconds_per_swap']:.1f} ms."
    )
    header = ("load", "schedule", "ms/token", "p90", "simulated ms/token", "p90", "longest, s", "put aside")
    return [Table(title="Normalised latency under schedules", header=header, rows=rows, note=note, left=2)]


def draw(document: dict) -> bytes:
    """Returns mean normalised latency by load as PNG: lines are simulated, points were measured."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.6), layout="constrained")
    for colour, name in zip(COLOURS, SCHEDULES):
        for found, style in (("simulated", {"label": name}), ("measured", {"marker": "o", "linestyle": ""})):
            points = [(row["load"], 1e3 * row["mean"]) for row in document[found] if row["schedule"] == name]
            axis.plot(*zip(*points), color=colour, **style)
    axis.set(xlabel="arrivals, as a share of what the machine can do", ylabel="ms per token of a text", yscale="log")
    axis.legend(fontsize="small", frameon=False)
    return to_png(figure)


if __name__ == "__main__":
    entry.run(main)
