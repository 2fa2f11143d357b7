"""Does generated Python parse, up to where the budget cut it off?"""

from __future__ import annotations

import ast
import codeop
import enum
import warnings


class Verdict(enum.Enum):
    """What Python's own parser says of a text."""

    COMPLETE = enum.auto()
    INCOMPLETE = enum.auto()  # no error up to the end, where a statement is still open
    ERROR = enum.auto()


def parses(prompt: str, completion: str, ended: bool = False) -> bool:
    """Whether ``prompt + completion``, cut at its last complete statement, parses with `ast`.

    The prompt must begin a top-level statement. What the budget cut (a last line without its end, a
    statement still open at the end) is not held against the completion; any error before that is, and
    at least one line of the completion that is not blank must survive the cut. A completion that ``ended``
    itself, with the end-of-text token, was not cut: all of it must parse.
    """
    text = prompt + completion
    if ended:
        return parse(text) is Verdict.COMPLETE
    whole = text[: text.rfind("\n") + 1]
    verdict = parse(whole)
    if verdict is Verdict.ERROR:
        return False
    lines = [line + "\n" for line in whole.split("\n")[:-1]]  # not splitlines: a form feed ends no line
    # The shortest cut that holds a line of the completion alone; blank ones say nothing.
    of_prompt = prompt.count("\n") + (not prompt.endswith("\n"))
    shortest = next((n + 1 for n in range(of_prompt, len(lines)) if lines[n].strip()), len(lines) + 1)
    return any(parse("".join(lines[:n])) is Verdict.COMPLETE for n in range(len(lines), shortest - 1, -1))


def parse(text: str) -> Verdict:
    """Parses as a module."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes and the like
            compile(text, "<text>", "exec", ast.PyCF_ONLY_AST | codeop.PyCF_ALLOW_INCOMPLETE_INPUT)
        return Verdict.COMPLETE
    except SyntaxError as error:
        return Verdict.INCOMPLETE if "incomplete input" in str(error.msg) else Verdict.ERROR
    except (ValueError, RecursionError, MemoryError):  # a null byte; nesting too deep
        return Verdict.ERROR
