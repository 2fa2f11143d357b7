"""Decides whether generated Python parses, up to where the budget cut it off."""

from __future__ import annotations

import ast
import codeop
import dataclasses
import enum
import warnings
from collections.abc import Sequence

from specsamp.checkpoints.pair import load_prompts
from specsamp.evaluation.task import Answer, Problem


class ParseResult(enum.Enum):
    """Answers of Python's own parser."""

    COMPLETE = enum.auto()
    INCOMPLETE = enum.auto()  # no error up to the end, where a statement is still open
    ERROR = enum.auto()


def parses(prompt: str, completion: str, ended: bool = False) -> bool:
    """Returns whether ``prompt + completion``, cut at its last complete statement, parses with `ast`.

    What the budget may have cut is left out: a last line without its end, a statement that is open at the end. At least
    one line of the completion that is not blank must remain, and no error may come before the cut.

    Args:
      prompt: begins a top-level statement.
      completion: what was generated.
      ended: the completion ended with the end-of-text token. Then nothing was cut, and all of it must parse.
    """
    text = prompt + completion
    if ended:
        return parse(text) is ParseResult.COMPLETE
    whole = text[: text.rfind("\n") + 1]
    verdict = parse(whole)
    if verdict is ParseResult.ERROR:
        return False
    lines = [line + "\n" for line in whole.split("\n")[:-1]]  # not splitlines: a form feed ends no line
    # The shortest cut that holds a line of the completion that is not blank.
    of_prompt = prompt.count("\n") + (not prompt.endswith("\n"))
    shortest = next((n + 1 for n in range(of_prompt, len(lines)) if lines[n].strip()), len(lines) + 1)
    return any(parse("".join(lines[:n])) is ParseResult.COMPLETE for n in range(len(lines), shortest - 1, -1))


def parse(text: str) -> ParseResult:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PythonSyntax:
    """Prompts of a pair that writes Python, scored by the share of completions that parse."""

    problems: Sequence[Problem]
    name: str = "python"
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 128
    continues: bool = True

    def score(self, problem: Problem, answers: Sequence[Answer]) -> dict[str, float]:
        return {"parses": sum(parses(problem.prompt, one.text, one.ended) for one in answers) / len(answers)}


def load(pair: str = "python") -> PythonSyntax:
    """Reads the prompts that come with a pair; see `load_prompts`."""
    return PythonSyntax(
        problems=[Problem(id=str(number), prompt=prompt) for number, prompt in enumerate(load_prompts(pair))]
    )
