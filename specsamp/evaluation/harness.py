"""Evaluates decoding methods on a task: quality compared with plain decoding, time per token, and
acceptance.

All methods get the same requests. A block of problems is decoded with every method before the next
block begins, so that drifts of the machine's speed favour no method.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specsamp.decoding.drafter import Drafter
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
      Scores of each problem, counts by category, and the time of this run; as JSON.
    """
    ends = make_stops(pair, None).ids
    written: dict[int, list[Completion]] = {key: [] for key in problems}
    timed = collections.Counter()
    for turn in itertools.count():
        asked = _ask(pair, problems, written, turn, method, requests)
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
        begin, of_turn, done = time.perf_counter(), [], sum(map(len, written.values()))
        for completion in work:
            of_turn.append(completion)
            say(done + len(of_turn))
        if not work.known:  # a resumed run had less work
            tokens = sum(len(one.tokens) for one in of_turn)
            timed += collections.Counter(
                completions=len(of_turn), tokens=tokens, seconds=time.perf_counter() - begin
            )
        for completion in sorted(of_turn, key=lambda one: (one.prompt_index, one.sample_index)):
            written[list(asked)[completion.prompt_index]].append(completion)
    return _results(task, problems, written, ends, requests.samples) | {
        "exact": method.exact,
        "timed": dict(timed),
    }


def _results(
    task: EvaluationTask,
    problems: Mapping[int, Problem],
    written: Mapping[int, Sequence[Completion]],
    ends: frozenset[int],
    samples: int,
) -> Json:
    """Returns the scores of completions, their counts by category, and the reasons why
    they ended.
    """
    completions = [one for of_problem in written.values() for one in of_problem]
    counts = (
        (problem.category, one.stats) for key, problem in problems.items() for one in written[key]
    )
    turns = sum(1 + len(problem.further_turns) for problem in problems.values())
    return {
        "problems": [problem.id for problem in problems.values()],
        "scores": [_score(task, problem, written[key], ends) for key, problem in problems.items()],
        "counts": _add_up(counts),
        "finish": dict(collections.Counter(one.finish for one in completions)),
        "turns_left_out": turns - len(completions) // samples,  # no chat template, or too long
    }


def _ask(
    pair: Pair,
    problems: Mapping[int, Problem],
    written: Mapping[int, Sequence[Completion]],
    turn: int,
    method: Method,
    requests: Requests,
) -> dict[int, Prompt]:
    """Returns the prompts of a turn, without those that have become too long."""
    asked = {
        key: conversation(problem, written[key], turn, requests)
        for key, problem in problems.items()
    }
    asked = {key: prompt for key, prompt in asked.items() if prompt is not None}
    room = max_positions(pair, method.drafter) - requests.max_new_tokens
    fit = {key for key, n in lengths(pair, asked).items() if n <= room} if turn else asked
    return {key: prompt for key, prompt in asked.items() if key in fit}


def conversation(
    problem: Problem, written: Sequence[Completion], turn: int, requests: Requests
) -> Prompt | None:
    """Returns the prompt of a turn, after the answers so far, or None if the problem has no such
    turn.
    """
    if turn == 0:
        return [{"role": "user", "content": problem.prompt}] if requests.chat else problem.prompt
    if (
        not requests.chat
        or requests.samples > 1
        or turn > len(problem.further_turns)
        or len(written) < turn
    ):
        return None
    asked = [problem.prompt, *problem.further_turns[:turn]]
    messages = [{"role": "user", "content": asked[0]}]
    for answer, question in zip(written, asked[1:], strict=True):
        messages += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": question},
        ]
    return messages


def max_positions(pair: Pair, drafter: Drafter) -> float:
    """Returns the smaller number of positions of target and drafter."""
    known = (pair.target.max_positions, drafter.max_positions)
    return min((positions for positions in known if positions is not None), default=math.inf)


def lengths(pair: Pair, prompts: Mapping[int, Prompt]) -> dict[int, int]:
    """Returns the number of tokens of each prompt."""
    return dict(zip(prompts, map(len, encode(pair, list(prompts.values()))))) if prompts else {}


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
        sums[category] = sums[category] + stats if category in sums else stats
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
    methods = list(dict.fromkeys(cell["key"]["method"] for cell in cells))
    return [
        _row(name, _blocks_of(name, cells), _blocks_of(baseline, cells), name == baseline)
        for name in methods
    ]


def _blocks_of(method: str, cells: Sequence[Json]) -> dict[str, Json]:
    return {
        cell["key"]["block"]: cell["result"] for cell in cells if cell["key"]["method"] == method
    }


def _row(name: str, blocks: Json, plain: Json, is_plain: bool) -> Json:
    counted = (item for block in blocks.values() for item in block["counts"].items())
    counts = _add_up((category, RowStats.from_json(of_block)) for category, of_block in counted)
    total = sum(counts.values())
    shared = [] if is_plain else [key for key in blocks if key in plain]
    timed = [block["timed"] for block in blocks.values()]

    def over_blocks(field: str) -> float:
        return sum(one.get(field, 0) for one in timed)  # a counter has no zeros

    def ratio(above: float, below: float) -> float | None:
        return above / below if below else None

    texts = sum(sum(block["finish"].values()) for block in blocks.values())
    differences = compare_scores(
        *([score for key in shared for score in of[key]["scores"]] for of in (blocks, plain))
    )
    return {
        "name": name,
        "exact": all(block["exact"] for block in blocks.values()),
        "problems": sum(len(block["problems"]) for block in blocks.values()),
        "scores": summarise([score for block in blocks.values() for score in block["scores"]]),
        "differences": {
            measure: vars(one) | {"detectable": one.detectable}
            for measure, one in differences.items()
        },
        "counts": total,
        "counts_by_category": counts,
        "ms_per_token": ratio(1e3 * over_blocks("seconds"), over_blocks("tokens")),
        "speedups": [
            _seconds_per_token(plain[key]) / _seconds_per_token(blocks[key])
            for key in shared
            if plain[key]["timed"].get("tokens") and blocks[key]["timed"].get("tokens")
        ],
        "variation_per_text": None if total.variation is None else ratio(total.variation, texts),
    }


def _seconds_per_token(block: Json) -> float:
    return block["timed"]["seconds"] / block["timed"]["tokens"]
