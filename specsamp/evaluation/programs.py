"""Tasks whose answers are programs: each runs with its tests in isolation, and counts if it passes them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from specsamp.evaluation.isolation import Limits, run_all
from specsamp.evaluation.python_syntax import ParseResult, parse
from specsamp.evaluation.task import Answer, Problem, cut


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramTask:
    """A task of programs.

    Attributes:
      prompt_is_code: a program begins with its prompt, rather than with its completion.
      ks: answers of which one must pass, for pass@k; those above the number of answers are left out.
      insist: run programs although this machine does not isolate them.
    """

    name: str
    problems: Sequence[Problem]
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 512
    continues: bool = True
    prompt_is_code: bool = True
    ks: tuple[int, ...] = (1, 10, 100)
    limits: Limits = Limits()
    insist: bool = False

    def program(self, problem: Problem, text: str) -> str:
        """Returns the program that passes if a completion is right."""
        code = cut(text, self.stop)
        return f"{problem.prompt if self.prompt_is_code else ''}{code}\n\n{problem.reference}\n"

    def score(self, problem: Problem, answers: Sequence[Answer]) -> dict[str, float]:
        """Returns pass@k and the share that parses; raises IsolationError where nothing isolates and nobody insists."""
        programs = [self.program(problem, answer.text) for answer in answers]
        passed = sum(outcome.passed for outcome in run_all(programs, self.limits, insist=self.insist))
        sound = sum(parse(program) is ParseResult.COMPLETE for program in programs)
        passes = {f"pass@{k}": pass_at_k(len(answers), passed, k) for k in self.ks if k <= len(answers)}
        return passes | {"parses": sound / len(answers)}


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Returns the unbiased estimate that one of k answers passes, from n of which some did: 1 - C(n - c, k) / C(n, k).

    Raises:
      ValueError: not ``0 <= passed <= n`` and ``1 <= k <= n``.
    """
    if not (0 <= passed <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} cannot be estimated from {passed} of {n} answers: give at least {k} answers")
    return 1 - math.prod(1 - k / i for i in range(n - passed + 1, n + 1)) if n - passed >= k else 1.0
