"""Evaluates a pair on a task: quality against plain decoding with intervals, time per token, and
acceptance.

    python launch/evaluate.py --task=python
    python launch/evaluate.py --task=humaneval --config=configs/hf.py:llama-8b --samples=10 \\
        --output=runs/he.json
    python launch/evaluate.py --task=spec_bench --source=question.jsonl \\
        --methods=plain,token,block/ngram/4,always

A method is "plain"; RULE, RULE/DRAFTER or RULE/DRAFTER/K; or "always", a control that accepts every
drafted token, whose scores must differ. A lossy rule, such as "ears:0.3" or "bounded:0.01:typical",
is shown with its cost; --require_exact refuses it. A rule or a drafter of your own is
FILE.py:EXPRESSION, with no slash in the expression; with a comma, the method is put in double
quotes. Problems are decoded in blocks (the categories
of the task, if it has any), each with every method before the next block begins. With --output,
finished blocks and completions are written at once: the same command resumes, and a command with
more methods for the same pair, task and requests adds them. --replica=i/N takes a part of the
problems; the command without it takes over all parts, decodes what is missing, and scores all.

Generated programs (humaneval, mbpp) run in bubblewrap, see specsamp/evaluation/isolation.py; where
it is missing or not permitted, none runs without --run_unisolated.

Exit status: 0, done; 2, the command is impossible (stderr has the reason).
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from launch.lib import costs, entry
from launch.lib.cells import machine_identity
from launch.lib.evaluation_tables import evaluation_tables
from launch.lib.experiment import Experiment, build, headline, use_few_rows
from launch.lib.fields import MACHINE, ExperimentConfig, ExperimentFlag, own_with_digest
from launch.lib.own_code import is_own
from launch.lib.rules import LOSSY, RULES
from specsamp import CompletionLog, Pair, storage, validate
from specsamp.analysis import report
from specsamp.analysis.grid import Results, distribution_of
from specsamp.decoding.drafter import positions_of
from specsamp.decoding.method import Method, check_exact
from specsamp.evaluation.harness import (
    Requests,
    conversation,
    decode_and_score,
    lengths,
    tabulate,
)
from specsamp.evaluation.task import EvaluationTask, Problem, first_of_each
from specsamp.evaluation.tasks import TASKS, load_task
from specsamp.mesh.distributed import from_first
from specsamp.replica import Replica

PLAIN, ALWAYS = "plain", "always"
WAYS = {
    PLAIN: {"rule": "token", "draft_length": 0},
    ALWAYS: {"rule": "token", "synthetic_acceptance": 1.0},
}
NAMES = [PLAIN, ALWAYS, *RULES, *LOSSY]
# The path of your own code may have slashes; its expression has none. A path does not begin with
# the name of a rule.
DRAFTER = r"((?:[^:]*\.py:)?[^/]+)"
RULE = rf"((?:(?!(?:{'|'.join(NAMES)})[:/])[^:]*\.py:)?[^/]+)"
FEW = 20  # problems; a bootstrap of fewer is uncertain
# Fields of the configuration that do not change what a problem asks.
LEFT_OUT = (
    *("rule", "drafter", "draft_length", "exit_layer", "window", "sinks", "corpus"),
    *("mesh", "repeats", "prompt_length"),
)
_CONFIG = ExperimentFlag("configs/trained_pair.py")
_TASK = flags.DEFINE_enum("task", None, list(TASKS), "Evaluate on this task.", required=True)
_SOURCE = flags.DEFINE_string(
    "source",
    None,
    "File of the task's records, local or gs://, or a data set of the hub; by default the task's "
    "own.",
)
_SHOTS = flags.DEFINE_string(
    "shots", None, "Show the solved problems of this file before each problem of gsm8k."
)
_METHODS = flags.DEFINE_list("methods", [PLAIN, "token"], "Ways to decode, separated by commas.")
_PROBLEMS = flags.DEFINE_integer(
    "problems", None, "Take the first so many problems; by default all.", lower_bound=1
)
_OF_EACH = flags.DEFINE_integer(
    "of_each", None, "Take the first so many problems of each category.", lower_bound=1
)
_SAMPLES = flags.DEFINE_integer("samples", 1, "Completions of each problem.", lower_bound=1)
_ROWS = flags.DEFINE_integer("rows", 8, "Texts that are decoded together.", lower_bound=1)
_BLOCKS = flags.DEFINE_integer(
    "blocks",
    4,
    "Blocks of problems, if the task has no categories. More blocks compare times better.",
    lower_bound=1,
)
_RUN_UNISOLATED = flags.DEFINE_bool(
    "run_unisolated",
    False,
    "Where bubblewrap does not work, run generated programs as plain processes with limits.",
)
_REQUIRE_EXACT = entry.define("require_exact")
_CHIP_HOUR = costs.define_chip_hour()
_OUTPUT = entry.define("output")
_REPLICA = entry.define("replica")


def main() -> None:
    console = entry.make_console()
    _CONFIG.refuse_fields(["rule"], "name it in --methods")
    _CONFIG.refuse_fields(["prompts"], "give --source")
    _CONFIG.refuse_fields(
        ["batch", "prompt_length", "repeats"], "give --rows, --problems and --samples"
    )
    config = _CONFIG.value
    replica, output = entry.parse_replica(_REPLICA.value, _OUTPUT.value)
    task = load_task(_TASK.value, _SOURCE.value, shots=_SHOTS.value, insist=_RUN_UNISOLATED.value)
    problems = dict(enumerate(first_of_each(task.problems[: _PROBLEMS.value], _OF_EACH.value)))
    own = {} if "max_new_tokens" in _CONFIG.fields_set else {"max_new_tokens": task.max_new_tokens}
    config = config.turned({"batch": _ROWS.value} | own)
    if config.chat and task.continues:
        raise ValueError(
            f"{task.name} needs completions instead of answers: set --config.chat=false"
        )
    identity = task_identity(config, problems)
    identity["replica"] = None if replica.is_whole else str(replica)
    Results.open(output, identity)
    ways = ways_of(config)
    _CONFIG.refuse_unread([own.drafter for own in ways.values() if not own.is_plain])
    use_few_rows(config, console)
    experiments = build_each(
        config, ways, [one.prompt for one in problems.values()][: config.batch]
    )
    experiment = next(iter(experiments.values()))
    requests = Requests(
        samples=_SAMPLES.value,
        rows=_ROWS.value,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        chat=bool(config.chat),
        require_exact=_REQUIRE_EXACT.value,
    )
    pairs = {name: experiments.get(own.word.draft, experiment).pair for name, own in ways.items()}
    methods = {name: own.make_method(pairs[name]) for name, own in ways.items()}
    problems = fitting(problems, experiment, list(methods.values()), requests, console)
    blocks = blocks_of(problems, replica)
    weights = ", ".join(filter(None, (one.weights for one in experiments.values())))
    identity |= {"weights": weights, "environment": machine_identity()}
    results = Results.open(output, identity)
    count = sum(map(len, blocks.values()))
    asked = (
        f"{task.name}: {count} problems, {requests.samples} x {requests.max_new_tokens} tokens of "
        f"each; {distribution_of(dataclasses.asdict(config.sampling))}; "
        f"{'with' if requests.chat else 'without'} a chat template"
    )
    console.print(headline(experiment, asked))
    with entry.keeps("the same command goes on" if output else "nothing is kept without --output"):
        with entry.progress(console, "decoding") as say:
            decode_blocks(task, blocks, methods, pairs, requests, results, say)
    if not entry.is_first():
        return
    if turns := sum(cell["result"]["turns_left_out"] for cell in results.cells):
        console.print(
            f"{turns} further turns of conversations were left out: without a chat template, with "
            "several completions of each problem, or too long for the models",
            style="yellow",
        )
    if count < FEW:
        console.print(
            f"fewer than {FEW} problems: intervals and differences mean little", style="yellow"
        )
    rows = report.as_json(tabulate(results.cells, PLAIN))
    times = [(row["name"], row["ms_per_token"]) for row in rows if row["ms_per_token"] is not None]
    dollars = costs.cost_tables(times, costs.chips_of(experiment.pair), _CHIP_HOUR.value)
    entry.show([*evaluation_tables(task.name, rows), *dollars], console)
    entry.say_written(output, console)


def decode_blocks(
    task: EvaluationTask,
    blocks: Mapping[str, Mapping[int, Problem]],
    methods: Mapping[str, Method],
    pairs: Mapping[str, Pair],
    requests: Requests,
    results: Results,
    say: Any,
) -> None:
    """Decodes every block with every method whose result is missing; the methods take turns in
    going first.
    """
    for number, (block, problems) in enumerate(blocks.items()):
        for name in reversed(methods) if number % 2 else methods:
            key = {"method": name, "block": block}
            if from_first(lambda: results.find(key) is not None):
                continue
            where = f"{name}, block {block}"
            result = decode_and_score(
                pairs[name],
                task,
                problems,
                methods[name],
                requests,
                functools.partial(open_log, name, block, results.document["identity"]["weights"]),
                lambda done: say(f"{where}: {done} completions of {len(problems)} problems"),
            )
            cell = report.as_json({"key": key, "method": repr(methods[name]), "result": result})
            results.document["cells"].append(cell)
            results.add(cell, entry.header() | {"evaluation": tabulate(results.cells, PLAIN)})


def open_log(method: str, block: str, weights: str, turn: int) -> CompletionLog | None:
    """Returns the log of the completions of a block, in a folder next to the output; None without
    an output.
    """
    if not _OUTPUT.value or storage.is_stream(_OUTPUT.value):
        return None
    name = f"{method}.{block}" + (f".turn {turn + 1}" if turn else "")
    # A valid and unique name of a file.
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    file = f"{re.sub(r'[^A-Za-z0-9.-]+', '_', name)[:80]}.{digest}"
    replica = Replica.parse(_REPLICA.value)
    return CompletionLog(f"{_OUTPUT.value}.texts/{file}.jsonl", {"weights": weights}, replica)


def build_each(
    config: ExperimentConfig, ways: Mapping[str, ExperimentConfig], prompts: Sequence[str]
) -> dict[str | None, Experiment]:
    """Reads the pair once for each kind of draft, "model" or "head", that the methods need; all
    share the target.
    """
    needed = {own.word.draft: own for own in ways.values() if own.word.draft and not own.is_plain}
    made: dict[str | None, Experiment] = {}
    for draft, own in (needed or {config.word.draft: config}).items():
        experiment = build(own.turned({"rule": config.rule, "synthetic_acceptance": None}), prompts)
        if made:
            target_params = next(iter(made.values())).pair.target_params
            experiment = dataclasses.replace(
                experiment, pair=dataclasses.replace(experiment.pair, target_params=target_params)
            )
        made[draft] = experiment
    return made


def ways_of(config: ExperimentConfig) -> dict[str, ExperimentConfig]:
    """Returns the configuration of each method in --methods."""
    ways: dict[str, ExperimentConfig] = {}
    for word in _METHODS.value or [""]:
        match = re.fullmatch(rf"(?!plain/){RULE}(?:/{DRAFTER})?(?:/(\d+))?", word)
        if match is None:
            raise ValueError(
                f"--methods has {word!r}: write plain, or RULE, RULE/DRAFTER or RULE/DRAFTER/K"
            )
        rule, drafter, K = match.groups()
        if not is_own(rule):
            validate.choice("--methods", rule.partition(":")[0], NAMES)
        point = ({"drafter": drafter} if drafter else {}) | ({"draft_length": int(K)} if K else {})
        own = config.turned(point | WAYS.get(rule, {"rule": rule}))
        if _REQUIRE_EXACT.value:
            check_exact(own.acceptance_rule)
        if rule != PLAIN and not own.word.drafts:
            raise ValueError(f"--methods has {word!r}, which drafts nothing: write plain")
        if rule != PLAIN and own.draft_length in (0, MACHINE):
            raise ValueError(
                f"--methods has {word!r} with K = {own.draft_length}: name a number of at least 1"
            )
        name = f"{own_with_digest(rule)}, {own.drafter_name}, K = {own.draft_length}"
        name = PLAIN if rule == PLAIN else name
        if name in ways:
            raise ValueError(f"--methods names {name} twice")
        ways[name] = own
    return ways


def fitting(
    problems: Mapping[int, Problem],
    experiment: Experiment,
    methods: Sequence[Method],
    requests: Requests,
    console: Any,
) -> dict[int, Problem]:
    """Returns the problems that fit into the models' positions, and prints how many are
    left out.
    """
    most = positions_of(experiment.pair.target, *(method.drafter for method in methods))
    sizes = lengths(
        experiment.pair, {key: conversation(p, [], 0, requests) for key, p in problems.items()}
    )
    fit = {
        key: one for key, one in problems.items() if sizes[key] + requests.max_new_tokens <= most
    }
    if not fit:
        raise ValueError(
            f"all {len(problems)} problems are too long for {most} positions: the shortest prompt "
            f"has {min(sizes.values())} tokens, and --config.max_new_tokens is "
            f"{requests.max_new_tokens}"
        )
    if len(fit) < len(problems):
        console.print(
            f"{len(problems) - len(fit)} problems are too long for the models: left out",
            style="yellow",
        )
    return fit


def blocks_of(problems: Mapping[int, Problem], replica: Replica) -> dict[str, dict[int, Problem]]:
    """Returns a replica's problems by category; for a task without categories, in blocks of every
    n-th problem of the task.
    """
    blocks: dict[str, dict[int, Problem]] = {}
    part = replica.part(problems, "problems")
    count = min(_BLOCKS.value, len(problems))
    has_categories = len({problem.category for problem in problems.values()}) > 1
    for place, (key, problem) in enumerate(problems.items()):
        name = problem.category if has_categories else f"{place % count + 1} of {count}"
        if key in part:
            blocks.setdefault(name, {})[key] = problem
    return blocks


def task_identity(config: ExperimentConfig, problems: Mapping[int, Problem]) -> dict[str, Any]:
    """Returns the part of the identity of a file of blocks that needs no pair."""
    contents = repr(sorted(problems.items())).encode()
    task = {
        "name": _TASK.value,
        "problems": len(problems),
        "sha256": hashlib.sha256(contents).hexdigest()[:16],
        "samples": _SAMPLES.value,
    }
    fields = {name: value for name, value in config.recorded.items() if name not in LEFT_OUT}
    return {"task": task, "blocks": _BLOCKS.value, "config": fields}


if __name__ == "__main__":
    entry.run(main, _CONFIG)
