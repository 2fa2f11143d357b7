"""Measures the queue that keeps rows busy: against fixed batches, against one run of the loop, and text by text.

    python launch/studies/refill.py --problems=HumanEval.jsonl.gz --output=runs/python_pair_refill.json

Three questions, of the same requests of HumanEval's prompts with its stop texts: how many rounds and how much time fixed
batches take, whose rows wait for the slowest; what it costs to leave the loop every few rounds, where all texts are
equally long and nothing is refilled; and how many texts differ from those of the same prompt alone. Near-ties of float32
logits may fall either way in another batch; table models, where tests ask for equal bits, have none.
"""

import math
import statistics
import time

from absl import flags

from launch.lib import entry
from specsamp import Pair, chain, generate, generate_many, load_pair, temperature, top_p
from specsamp.analysis.report import Table
from specsamp.decoding.checks import encode
from specsamp.evaluation.task import Problem, Task
from specsamp.evaluation.tasks import load_task

_PROBLEMS = flags.DEFINE_string("problems", None, "HumanEval's problems: a file, or a data set of the hub.")
_PAIR = flags.DEFINE_string("pair", "python", "The pair, by name or folder.")
_COUNT = flags.DEFINE_integer("count", 164, "Take the first so many problems.", lower_bound=1)
_ROWS = flags.DEFINE_integer("rows", 8, "Texts that are decoded together.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("max_new_tokens", 192, "The budget of each text.", lower_bound=1)
_K = flags.DEFINE_integer("K", 3, "Tokens per draft; 0 decodes plainly.", lower_bound=0)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Measure times so often, in turn.", lower_bound=1)
_ALONE = flags.DEFINE_integer("alone", 24, "Compare so many texts with those of their prompts alone.", lower_bound=0)
_OUTPUT = entry.define_output()

SLICE = 16  # rounds, where the cost of leaving the loop is measured
SAMPLING = chain(temperature(0.8), top_p(0.95))


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    task = load_task("humaneval", _PROBLEMS.value, insist=True)  # nothing is scored: no program runs
    pair = load_pair(_PAIR.value)
    problems = [one for one in task.problems if fits(pair, one)][: _COUNT.value]
    with entry.progress(console, "measuring") as say:
        document = {
            "pair": _PAIR.value,
            "K": _K.value,
            "rows": _ROWS.value,
            "max_new_tokens": _TOKENS.value,
            "problems": len(problems),
            "fixed_batches": compare_with_batches(pair, task, problems, say),
            "slices": compare_with_one_run(pair, problems, say),
            "alone": compare_with_alone(pair, task, problems, say),
        }
    entry.show(tables(document), console)
    entry.write_result(_OUTPUT.value, document, console)


def fits(pair: Pair, problem: Problem) -> bool:
    return len(encode(pair, [problem.prompt])[0]) + _TOKENS.value <= (pair.target.max_positions or 1 << 30)


def settings(task: Task | None, **changes) -> dict:
    """Returns what all calls share; without a task, texts end at their budget."""
    return dict(sampling=SAMPLING, draft_length=_K.value, stop=[] if task is None else list(task.stop)) | changes


def compare_with_batches(pair: Pair, task: Task, problems: list[Problem], say) -> dict:
    """Returns rounds and seconds of fixed batches and of the queue, which take turns."""
    prompts, rows = [one.prompt for one in problems], _ROWS.value
    found = {"queue": [], "batches": []}
    for repeat in range(_REPEATS.value + 1):  # the first compiles
        for way in found:
            say(f"{way}, {repeat} of {_REPEATS.value}")
            begin = time.perf_counter()
            if way == "queue":
                work = generate_many(pair, prompts, _TOKENS.value, rows=rows, **settings(task))
                done, rounds = list(work), work.usage.rounds
                usage = work.usage
            else:
                done, rounds = [], 0
                for first in range(0, len(prompts), rows):
                    part = range(first, min(first + rows, len(prompts)))
                    batch = generate(
                        pair, [prompts[i] for i in part], _TOKENS.value, prompt_ids=list(part), **settings(task)
                    )
                    rounds += max(one.stats.rounds + -(-one.dropped // (_K.value + 1)) for one in batch)
                    done += batch
            seconds = time.perf_counter() - begin
            tokens = sum(len(one.tokens) for one in done)
            found[way].append({"seconds": seconds, "rounds": rounds, "tokens": tokens})
    lengths = sorted(len(one.tokens) for one in done)
    pairs = list(zip(found["batches"][1:], found["queue"][1:]))
    return {
        "tokens_per_text": {"median": statistics.median(lengths), "least": lengths[0], "most": lengths[-1]},
        "runs": {way: runs[1:] for way, runs in found.items()},
        "occupancy": None if math.isnan(usage.occupancy) else usage.occupancy,
        "rounds_saved": 1 - found["queue"][-1]["rounds"] / found["batches"][-1]["rounds"],
        "speedup": statistics.median(batches["seconds"] / queue["seconds"] for batches, queue in pairs),
    }


def compare_with_one_run(pair: Pair, problems: list[Problem], say) -> dict:
    """Returns what leaving the loop every few rounds costs, where all texts have one length and nothing waits."""
    prompts = [pair.tokenizer.encode(one.prompt)[:64] for one in problems[: _ROWS.value]]
    ways, ratios = {"one run": None, "slices": SLICE}, []
    for repeat in range(6 * _REPEATS.value + 1):  # the first compiles
        say(f"slices, {repeat} of {6 * _REPEATS.value}")
        seconds = {}
        for way in list(ways) if repeat % 2 else reversed(ways):  # who goes first finds another machine
            work = generate_many(
                pair,
                prompts,
                _TOKENS.value,
                rows=len(prompts),
                rounds_per_slice=ways[way],
                **settings(None, draft_length=0),
            )
            begin = time.perf_counter()
            list(work)
            seconds[way] = time.perf_counter() - begin
        ratios.append(seconds["slices"] / seconds["one run"])
    ratios = sorted(ratios[1:])
    return {"rounds_per_slice": SLICE, "ratios": ratios, "median": statistics.median(ratios)}


def compare_with_alone(pair: Pair, task: Task, problems: list[Problem], say) -> dict:
    """Returns how many texts are those of their prompts alone, and where the others begin to differ."""
    some = problems[: _ALONE.value]
    if not some:
        return {"texts": 0, "tokens": 0, "differ": 0, "first_difference": []}
    work = generate_many(pair, [one.prompt for one in some], _TOKENS.value, rows=_ROWS.value, **settings(task))
    together = {one.prompt_index: one.tokens for one in work}
    differ = []
    for index, problem in enumerate(some):
        say(f"alone, {index} of {len(some)}")
        (alone,) = generate(pair, [problem.prompt], _TOKENS.value, prompt_ids=[index], **settings(task))
        if alone.tokens != together[index]:
            pairs = zip(alone.tokens, together[index])
            differ.append(
                next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(alone.tokens), len(together[index])))
            )
    tokens = sum(map(len, together.values()))
    return {"texts": len(some), "tokens": tokens, "differ": len(differ), "first_difference": sorted(differ)}


def tables(document: dict) -> list[Table]:
    found, slices, alone = (document[name] for name in ("fixed_batches", "slices", "alone"))
    rows = [
        (way, f"{run['rounds']}", f"{run['seconds']:.1f}", f"{1e3 * run['seconds'] / run['tokens']:.2f}")
        for way, runs in found["runs"].items()
        for run in runs
    ]
    busy = (
        "No prompt ever waited"
        if found["occupancy"] is None
        else f"Rows were busy {found['occupancy']:.1%} of the rounds in which prompts waited"
    )
    note = (
        f"{busy}; {found['rounds_saved']:.0%} fewer "
        f"rounds, {found['speedup']:.2f}x. Leaving the loop every {slices['rounds_per_slice']} rounds took "
        f"{slices['median'] - 1:+.1%}. {alone['texts'] - alone['differ']} of {alone['texts']} texts are those of the "
        "prompt alone."
    )
    return [Table(title="Queue and fixed batches", header=("", "rounds", "seconds", "ms/token"), rows=rows, note=note)]


if __name__ == "__main__":
    entry.run(main)
