"""Tasks by name; a new one is a file beside this one, and a line here."""

from __future__ import annotations

from collections.abc import Callable

from specsamp import validate
from specsamp.evaluation import humaneval, isolation, python_syntax, spec_bench, xsum
from specsamp.evaluation.task import Task

# What reads each task from a file or a data set of the hub; for `python`, the name of a pair with prompts.
TASKS: dict[str, Callable[..., Task]] = {
    "humaneval": humaneval.load,
    "xsum": xsum.load,
    "spec_bench": spec_bench.load,
    "mt_bench": spec_bench.load_mt_bench,
    "gsm8k": spec_bench.load_gsm8k,
    "mbpp": spec_bench.load_mbpp,
    "python": python_syntax.load,
}
RUN_PROGRAMS = ("humaneval", "mbpp")
WITHOUT_SOURCE = ("spec_bench", "mt_bench")


def load_task(name: str, source: str | None = None, *, insist: bool = False) -> Task:
    """Reads a task.

    Args:
      source: a file or a data set of the hub; default the task's own on the hub, or of the pair `python`.
      insist: run generated programs although this machine does not isolate them.

    Raises:
      ValueError: there is no task of this name, it has no source of its own, its records are not as they should be, or it
        runs programs that this machine does not isolate.
      FileNotFoundError: there is no such source.
    """
    validate.choice("task", name, TASKS)
    if source is None and name in WITHOUT_SOURCE:
        raise ValueError(f"the task {name} has no source of its own: name its question.jsonl")
    given = () if source is None else (source,)
    if name not in RUN_PROGRAMS:
        return TASKS[name](*given)
    task = TASKS[name](*given, insist=insist)
    if not insist:
        try:
            isolation.require(isolation.describe())
        except isolation.IsolationError as error:
            raise ValueError(str(error)) from error
    return task
