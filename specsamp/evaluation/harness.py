"""Evaluates decoding methods on a task: quality compared with plain decoding, time per token, and
acceptance.

All methods get the same requests. A block of problems is decoded with every method before the next
block begins, so that drifts of the machine's speed favour no method.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specsamp.decoding.drafter import positions_of
from specsamp.decoding.method import Method
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import Prompt, encode, make_stops
from specsamp.decoding.results import Completion, RowStats
from specsamp.evaluation.task import Attempt, EvaluationTask, Problem, compare_scores, summarise
from specsamp.serving.completion_log import CompletionLog
from specsamp.serving.generate_many import generate_many

TURNS_APART = 1_000_000  # prompt ids between the turns of a problem
Json = Mapping[str, Any]  # of results, see `decode_and_score` and `tabulate`
# Measured for every task: log-probability per token under the target, at temperature 1.
LOG_PROB = "log_prob"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requests:
    """The requests for every method.

    Attributes:
      samples: completions of each problem.
      rows: texts that are decoded together.
      chat: whether a problem is a user's message in the chat template.
      require_exact: refuse lossy methods.
    """

    samples: int = 1
    rows: int = 8
    max_new_tokens: int = 128
    seed: int = 0
    chat: bool = False
    require_exact: bool = False


def decode_and_score(
    pair: Pair,
    task: EvaluationTask,
    problems: Mapping[int, Problem],
    method: Method,
    requests: Requests,
    open_log: Callable[[int], CompletionLog | None] = lambda turn: None,
    say: Callable[[int], None] = lambda done: None,
) -> Json:
    """Decodes some problems of a task with one method, and scores the completions.

    With a chat template, further turns of a problem follow the answers to earlier turns.

    Args:
      pair: a pair with a tokenizer.
      task: scores completions.
      problems: by their place in the task, which is their prompt id.
      method: the method.
      requests: shared by all methods.
      open_log: returns the log of a turn's completions, from which a killed run resumes.
      say: called with the number of completions so far.

    Returns:
      Scores of each problem, counts by category, the reasons why completions ended, and the time of
      this run; as JSON.
    """
    ends = make_stops(pair, None).ids
    written: dict[int, list[Completion]] = {key: [] for key in problems}
    timed = collections.Counter()
    for turn in itertools.count():
        asked = {
            key: prompt
            for key, problem in problems.items()
            if (prompt := conversation(problem, written[key], turn, requests)) is not None
        }
        if turn and asked:  # some may have become too long
            room = positions_of(pair.target, method.drafter) - requests.max_new_tokens
            sizes = lengths(pair, asked)
            asked = {key: prompt for key, prompt in asked.items() if sizes[key] <= room}
        if not asked:
            break
        work = generate_many(
            pair,
            list(asked.values()),
            requests.max_new_tokens,
            rows=requests.rows,
            log=open_log(turn),
            method=method,
            seed=requests.seed,
            stop=[*task.stop, *sorted(ends)],
            num_samples=requests.samples,
            return_log_probs=True,
            prompt_ids=[key + turn * TURNS_APART for key in asked],
            require_exact=requests.require_exact,
        )
        work.compile()
        begin = time.perf_counter()
        of_turn = []
        before = sum(map(len, written.values()))
        for completion in work:
            of_turn.append(completion)
            say(before + len(of_turn))
        if not work.known:  # a resumed run had less work
            timed["completions"] += len(of_turn)
            timed["tokens"] += sum(len(one.tokens) for one in of_turn)
            timed["seconds"] += time.perf_counter() - begin
        keys = list(asked)
        for completion in sorted(of_turn, key=lambda one: (one.prompt_index, one.sample_index)):
            written[keys[completion.prompt_index]].append(completion)
    done = [(problems[key], one) for key, of_problem in written.items() for one in of_problem]
    turns = sum(1 + len(problem.further_turns) for problem in problems.values())
    return {
        "problems": [problem.id for problem in problems.values()],
        "scores": [_score(task, problem, written[key], ends) for key, problem in problems.items()],
        "counts": _add_up((problem.category, one.stats) for problem, one in done),
        "finish": dict(collections.Counter(one.finish for _, one in done)),
        "turns_left_out": turns - len(done) // requests.samples,  # no chat template, or too long
        "exact": method.exact,
        "timed": dict(timed),
    }


def conversation(
    problem: Problem, written: Sequence[Completion], turn: int, requests: Requests
) -> Prompt | None:
    """Returns the prompt of a turn, after the answers so far, or None if the problem has no such
    turn.
    """
    if not requests.chat:
        return problem.prompt if turn == 0 else None
    questions = [problem.prompt, *problem.further_turns]
    if turn >= len(questions) or len(written) < turn or (turn and requests.samples > 1):
        return None
    messages = []
    for question, answer in zip(questions, written):
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer.text},
        ]
    return [*messages, {"role": "user", "content": questions[turn]}]


def lengths(pair: Pair, prompts: Mapping[int, Prompt]) -> dict[int, int]:
    """Returns the number of tokens of each prompt; there is at least one."""
    return dict(zip(prompts, map(len, encode(pair, list(prompts.values())))))


def _score(
    task: EvaluationTask, problem: Problem, completions: Sequence[Completion], ends: frozenset[int]
) -> dict[str, float]:
    if any(one.finish == "invalid" for one in completions):
        raise ValueError(
            f"after {problem.id} the target's logits are no distribution (NaN or inf): check its "
            "weights"
        )
    attempts = [Attempt(text=one.text, ended=one.tokens[-1] in ends) for one in completions]
    log_probs = [value for one in completions for value in one.log_probs]
    return task.score(problem, attempts) | {LOG_PROB: float(np.mean(log_probs))}


def _add_up(counts: Iterable[tuple[str, RowStats]]) -> dict[str, RowStats]:
    """Returns the sum of the counts of each category."""
    sums: dict[str, RowStats] = {}
    for category, stats in counts:
        sums[category] = sums.get(category, 0) + stats
    return sums


def tabulate(cells: Sequence[Json], baseline: str) -> list[Json]:
    """Joins the results of `decode_and_score` for each method and block.

    Args:
      cells: with ``key``, the names of "method" and "block", and ``result``, as JSON.
      baseline: the method to compare with, on the blocks that both methods have.

    Returns:
      Results of each method over all its blocks, in the form of result files; unknown values are
      None. ``scores`` are means over problems with intervals, ``differences`` are differences from
      the baseline. ``ms_per_token`` comes from uninterrupted blocks, ``speedups`` from each block
      that both methods decoded. ``variation_per_text`` is the mean over completions of the sum of a
      lossy rule's meter.
    """
    methods: dict[str, dict[str, Json]] = {}
    for cell in cells:
        blocks = methods.setdefault(cell["key"]["method"], {})
        blocks[cell["key"]["block"]] = cell["result"]
    plain = methods.get(baseline, {})
    return [
        _row(name, blocks, {} if name == baseline else plain) for name, blocks in methods.items()
    ]


def _row(name: str, blocks: Json, plain: Json) -> Json:
    """Returns the results of a method; ``plain`` has the blocks to compare with."""
    counted = (item for block in blocks.values() for item in block["counts"].items())
    counts = _add_up((category, RowStats.from_json(of_block)) for category, of_block in counted)
    total = sum(counts.values())
    shared = [key for key in blocks if key in plain]
    timed = sum(
        (collections.Counter(block["timed"]) for block in blocks.values()), collections.Counter()
    )

    texts = sum(sum(block["finish"].values()) for block in blocks.values())

    def ratio(above, below):
        return above / below if below else None

    def scores_of(blocks, keys):
        return [score for key in keys for score in blocks[key]["scores"]]

    differences = compare_scores(scores_of(blocks, shared), scores_of(plain, shared))
    return {
        "name": name,
        "exact": all(block["exact"] for block in blocks.values()),
        "problems": sum(len(block["problems"]) for block in blocks.values()),
        "scores": summarise(scores_of(blocks, blocks)),
        "differences": {
            measure: vars(one) | {"detectable": one.detectable}
            for measure, one in differences.items()
        },
        "counts": total,
        "counts_by_category": counts,
        "ms_per_token": ratio(1e3 * timed["seconds"], timed["tokens"]),
        "speedups": [
            _seconds_per_token(plain[key]) / _seconds_per_token(blocks[key])
            for key in shared
            if plain[key]["timed"].get("tokens") and blocks[key]["timed"].get("tokens")
        ],
        "variation_per_text": None if total.variation is None else ratio(total.variation, texts),
    }


def _seconds_per_token(block: Json) -> float:
    return block["timed"]["seconds"] / block["timed"]["tokens"]
