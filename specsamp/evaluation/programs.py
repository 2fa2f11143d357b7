"""Tasks whose answers are programs, HumanEval and MBPP: each runs with its tests in isolation, and counts if it passes.

The files are those of openai/human-eval and of google-research/mbpp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from specsamp.evaluation.isolation import run_all
from specsamp.evaluation.python_syntax import ParseResult, parse_python
from specsamp.evaluation.records import read_records
from specsamp.evaluation.task import Attempt, EvaluationTask, Problem, cut

HUMANEVAL, MBPP = "openai/openai_humaneval", "google-research-datasets/mbpp"
HUMANEVAL_FIELDS = {"task_id": str, "prompt": str, "entry_point": str, "test": str}
HUMANEVAL_STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
MBPP_STOP = ('\n"""', "\nassert", "\nprint", "\nif")
MBPP_TESTED = range(11, 511)  # ids that published results are of; the others are examples and for training
KS = (1, 10, 100)  # of pass@k


def load_humaneval(source: str = HUMANEVAL) -> EvaluationTask:
    """Reads functions to be completed from signature and docstring."""
    problems = [
        Problem(
            id=record["task_id"],
            prompt=record["prompt"],
            reference=f"{record['test']}\n\ncheck({record['entry_point']})",
        )
        for record in read_records(source, HUMANEVAL_FIELDS, key="task_id")
    ]
    score = functools.partial(score_programs, stop=HUMANEVAL_STOP, prompt_is_code=True)
    return EvaluationTask(name="humaneval", problems=problems, stop=HUMANEVAL_STOP, continues=True, score=score)


def load_mbpp(source: str = MBPP) -> EvaluationTask:
    """Reads the tasks 11 to 510 with their tests, which are shown in the prompt.

    The sanitized edition calls the text of a task ``prompt``.
    """
    problems = []
    for record in read_records(source, {"task_id": int, "test_list": list}, key="task_id"):
        if record["task_id"] not in MBPP_TESTED:
            continue
        text = record.get("text", record.get("prompt"))
        if not isinstance(text, str):
            raise ValueError(f"{source}: task {record['task_id']} has neither a field 'text' nor 'prompt'")
        tests, imports = record["test_list"], record.get("test_imports") or []
        for field, lines, fewest in (("test_list", tests, 1), ("test_imports", imports, 0)):
            if len(lines) < fewest or not all(isinstance(line, str) and line.strip() for line in lines):
                raise ValueError(
                    f"{source}: task {record['task_id']}: field {field!r} must hold lines of code, not {lines!r:.40}"
                )
        problems.append(
            Problem(
                id=str(record["task_id"]),
                category="code",
                prompt="\n".join(['"""', text, *tests, '"""', ""]),
                reference="\n".join([record.get("test_setup_code") or "", *imports, *tests]),
            )
        )
    if not problems:
        raise ValueError(f"{source} has no task_id from 11 to 510, which are the tasks that are evaluated")
    score = functools.partial(score_programs, stop=MBPP_STOP, prompt_is_code=False)
    return EvaluationTask(name="mbpp", problems=problems, stop=MBPP_STOP, continues=True, score=score)


def score_programs(
    problem: Problem, attempts: Sequence[Attempt], *, stop: Sequence[str], prompt_is_code: bool, insist: bool = False
) -> dict[str, float]:
    """Returns pass@k for each of `KS` that there are attempts for, and the share of programs that parse.

    Args:
      problem: its reference is the tests.
      attempts: completions of the problem.
      stop: texts that end a program.
      prompt_is_code: a program begins with its prompt.
      insist: run programs although this machine does not isolate them.

    Raises:
      IsolationError: this machine does not isolate programs, and the caller does not insist.
    """
    begin = problem.prompt if prompt_is_code else ""
    programs = [f"{begin}{cut(attempt.text, stop)}\n\n{problem.reference}\n" for attempt in attempts]
    passed = sum(outcome.passed for outcome in run_all(programs, insist=insist))
    sound = sum(parse_python(program) is ParseResult.COMPLETE for program in programs)
    passes = {f"pass@{k}": pass_at_k(len(attempts), passed, k) for k in KS if k <= len(attempts)}
    return passes | {"parses": sound / len(attempts)}


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Returns the unbiased estimate that one of k answers passes, from n of which some did: 1 - C(n - c, k) / C(n, k).

    Raises:
      ValueError: not ``0 <= passed <= n`` and ``1 <= k <= n``.
    """
    if not (0 <= passed <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} cannot be estimated from {passed} of {n} answers: give at least {k} answers")
    return 1 - math.prod(1 - k / i for i in range(n - passed + 1, n + 1)) if n - passed >= k else 1.0
