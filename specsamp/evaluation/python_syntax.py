"""Decides whether generated Python parses, up to where the budget cut it off."""

from __future__ import annotations

import ast
import codeop
import enum
import warnings
from collections.abc import Sequence

from specsamp.checkpoints.pair import load_prompts
from specsamp.evaluation.task import Attempt, EvaluationTask, Problem


class ParseResult(enum.Enum):
    """Results of Python's parser."""

    COMPLETE = enum.auto()
    INCOMPLETE = enum.auto()  # no error up to the end, where a statement is still open
    ERROR = enum.auto()


def parses(prompt: str, completion: str, ended: bool = False) -> bool:
    """Returns whether ``prompt + completion``, cut at its last complete statement, parses with `ast`.

    The cut removes a last line without its end, and a statement that is open at the end: the budget may have cut them.
    At least one line of the completion that is not blank must remain, and no error may come before the cut.

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
    lines = [line + "\n" for line in whole.split("\n")[:-1]]  # not splitlines: a form feed ends no line
    # The shortest cut that holds a line of the completion that is not blank.
    of_prompt = prompt.count("\n") + (not prompt.endswith("\n"))
    shortest = next((n + 1 for n in range(of_prompt, len(lines)) if lines[n].strip()), len(lines) + 1)
    return any(parse_python("".join(lines[:n])) is ParseResult.COMPLETE for n in range(len(lines), shortest - 1, -1))


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


def load_python(pair: str = "python") -> EvaluationTask:
    """Reads the prompts that come with a pair; see `load_prompts`."""
    problems = [Problem(id=str(number), prompt=prompt) for number, prompt in enumerate(load_prompts(pair))]
    return EvaluationTask(name="python", problems=problems, max_new_tokens=128, continues=True, score=score_syntax)


def score_syntax(problem: Problem, attempts: Sequence[Attempt]) -> dict[str, float]:
    """Returns the share of completions that parse."""
    sound = sum(parses(problem.prompt, attempt.text, attempt.ended) for attempt in attempts)
    return {"parses": sound / len(attempts)}
