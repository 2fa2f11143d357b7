"""Tasks of code: HumanEval and MBPP, in the files of openai/human-eval and google-research/mbpp,
and the prompts of a pair.

Programs are tested in isolation; the completions of a pair's prompts must parse, up to the end of
the budget.
"""

import ast
import codeop
import enum
import functools
import math
import warnings
from collections.abc import Sequence

from specsamp.checkpoints.trained_pair import load_prompts
from specsamp.evaluation.isolation import run_all
from specsamp.evaluation.records import read_records
from specsamp.evaluation.task import Attempt, EvaluationTask, Problem, cut

HUMANEVAL, MBPP = "openai/openai_humaneval", "google-research-datasets/mbpp"
HUMANEVAL_FIELDS = {"task_id": str, "prompt": str, "entry_point": str, "test": str}
HUMANEVAL_STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
MBPP_STOP = ('\n"""', "\nassert", "\nprint", "\nif")
MBPP_TESTED = range(11, 511)  # ids of published results; other ids are examples and for training
KS = (1, 10, 100)  # of pass@k


def load_humaneval(source: str = HUMANEVAL) -> EvaluationTask:
    """Reads signatures with docstrings; answers complete the functions."""
    problems = [
        Problem(
            id=record["task_id"],
            prompt=record["prompt"],
            reference=f"{record['test']}\n\ncheck({record['entry_point']})",
        )
        for record in read_records(source, HUMANEVAL_FIELDS, key="task_id")
    ]
    score = functools.partial(score_programs, stop=HUMANEVAL_STOP, prompt_is_code=True)
    return EvaluationTask(
        name="humaneval", problems=problems, stop=HUMANEVAL_STOP, continues=True, score=score
    )


def load_mbpp(source: str = MBPP) -> EvaluationTask:
    """Reads the tasks 11 to 510; prompts show the tests. The sanitized edition calls a task's text
    ``prompt``.
    """
    problems = []
    for record in read_records(source, {"task_id": int, "test_list": list}, key="task_id"):
        if record["task_id"] not in MBPP_TESTED:
            continue
        text = record.get("text", record.get("prompt"))
        if not isinstance(text, str):
            raise ValueError(
                f"{source}: task {record['task_id']} has neither a field 'text' nor 'prompt'"
            )
        tests = record["test_list"]
        imports = record.get("test_imports") or []
        for field, lines, fewest in (("test_list", tests, 1), ("test_imports", imports, 0)):
            if len(lines) < fewest or not all(
                isinstance(line, str) and line.strip() for line in lines
            ):
                raise ValueError(
                    f"{source}: task {record['task_id']}: field {field!r} must hold lines of code, "
                    f"not {lines!r:.40}"
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
        raise ValueError(
            f"{source} has no task_id from 11 to 510, which are the tasks that are evaluated"
        )
    score = functools.partial(score_programs, stop=MBPP_STOP, prompt_is_code=False)
    return EvaluationTask(
        name="mbpp", problems=problems, stop=MBPP_STOP, continues=True, score=score
    )


def score_programs(
    problem: Problem,
    attempts: Sequence[Attempt],
    *,
    stop: Sequence[str],
    prompt_is_code: bool,
    insist: bool = False,
) -> dict[str, float]:
    """Returns pass@k for each of `KS` up to the number of attempts, and the share of programs that
    parse.

    Args:
      problem: its reference is the tests.
      attempts: completions of the problem.
      stop: texts that end a program.
      prompt_is_code: whether the prompt is the program's beginning.
      insist: run programs although this machine does not isolate them.

    Raises:
      IsolationError: this machine does not isolate programs, and the caller does not insist.
    """
    begin = problem.prompt if prompt_is_code else ""
    programs = [
        f"{begin}{cut(attempt.text, stop)}\n\n{problem.reference}\n" for attempt in attempts
    ]
    passed = sum(outcome.passed for outcome in run_all(programs, insist=insist))
    sound = sum(parse_python(program) is ParseResult.COMPLETE for program in programs)
    passes = {f"pass@{k}": pass_at_k(len(attempts), passed, k) for k in KS if k <= len(attempts)}
    return passes | {"parses": sound / len(attempts)}


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Returns the unbiased estimate that one of k <= n answers passes: ``1 - C(n - passed, k) /
    C(n, k)``.
    """
    if n - passed < k:
        return 1.0
    return 1 - math.prod(1 - k / i for i in range(n - passed + 1, n + 1))


class ParseResult(enum.Enum):
    """Results of Python's parser."""

    COMPLETE = enum.auto()
    INCOMPLETE = enum.auto()  # no error up to the end, where a statement is still open
    ERROR = enum.auto()


def parses(prompt: str, completion: str, ended: bool = False) -> bool:
    """Returns whether ``prompt + completion``, cut at its last complete statement, parses with
    `ast`.

    The cut removes an incomplete last line and an incomplete last statement, which the budget may
    have cut. At least one line of the completion that is not blank must remain, and there must be
    no error before the cut.

    Args:
      prompt: begins a top-level statement.
      completion: the generated text.
      ended: whether the completion ended with the end-of-text token; then all of it must parse.
    """
    text = prompt + completion
    if ended:
        return parse_python(text) is ParseResult.COMPLETE
    whole = text[: text.rfind("\n") + 1]
    verdict = parse_python(whole)
    if verdict is ParseResult.ERROR:
        return False
    # Not splitlines: a form feed ends no line.
    lines = [line + "\n" for line in whole.split("\n")[:-1]]
    # The shortest cut that holds a line of the completion that is not blank.
    of_prompt = prompt.count("\n") + (not prompt.endswith("\n"))
    shortest = next(
        (n + 1 for n in range(of_prompt, len(lines)) if lines[n].strip()), len(lines) + 1
    )
    return any(
        parse_python("".join(lines[:n])) is ParseResult.COMPLETE
        for n in range(len(lines), shortest - 1, -1)
    )


def parse_python(text: str) -> ParseResult:
    """Parses a text as a module."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes and the like
            compile(text, "<text>", "exec", ast.PyCF_ONLY_AST | codeop.PyCF_ALLOW_INCOMPLETE_INPUT)
        return ParseResult.COMPLETE
    except SyntaxError as error:
        return ParseResult.INCOMPLETE if "incomplete input" in str(error.msg) else ParseResult.ERROR
    except (ValueError, RecursionError, MemoryError):  # a null byte; nesting too deep
        return ParseResult.ERROR


def load_python(source: str = "python") -> EvaluationTask:
    """Reads the prompts that come with a pair; see `load_prompts`."""
    problems = [
        Problem(id=str(number), prompt=prompt) for number, prompt in enumerate(load_prompts(source))
    ]
    return EvaluationTask(
        name="python", problems=problems, max_new_tokens=128, continues=True, score=score_syntax
    )


def score_syntax(problem: Problem, attempts: Sequence[Attempt]) -> dict[str, float]:
    """Returns the share of completions that parse."""
    sound = sum(parses(problem.prompt, attempt.text, attempt.ended) for attempt in attempts)
    return {"parses": sound / len(attempts)}
