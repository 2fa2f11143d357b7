"""Lists the tasks by name. A new task needs a function that reads, a function that scores, and a
line here.
"""

import dataclasses
import functools
from collections.abc import Callable

from specsamp import validate
from specsamp.evaluation import coding_tasks, isolation, text_tasks
from specsamp.evaluation.task import EvaluationTask

# The function that reads each task from a file or a data set on the hub; `python` reads the prompts
# of a pair.
TASKS: dict[str, Callable[..., EvaluationTask]] = {
    "humaneval": coding_tasks.load_humaneval,
    "xsum": text_tasks.load_xsum,
    "spec_bench": functools.partial(text_tasks.load_turns, "spec_bench"),
    "mt_bench": functools.partial(text_tasks.load_turns, "mt_bench"),
    "gsm8k": text_tasks.load_gsm8k,
    "mbpp": coding_tasks.load_mbpp,
    "python": coding_tasks.load_python,
}
RUN_PROGRAMS = ("humaneval", "mbpp")
SHOWS_SHOTS = ("gsm8k",)
WITHOUT_SOURCE = ("spec_bench", "mt_bench")


def load_task(
    name: str, source: str | None = None, *, shots: str | None = None, insist: bool = False
) -> EvaluationTask:
    """Reads a task.

    Args:
      name: one of `TASKS`.
      source: a file or a data set on the hub; default: the task's own data set, or the pair
        "python".
      shots: a file of solved problems that are shown before each problem, for the tasks
        `SHOWS_SHOTS`.
      insist: run generated programs as plain processes if this machine does not isolate them.

    Raises:
      ValueError: there is no task of this name, it has no default source, or its records are
        malformed.
      IsolationError: it runs programs that this machine does not isolate.
      FileNotFoundError: there is no such source.
    """
    validate.choice("task", name, TASKS)
    if source is None and name in WITHOUT_SOURCE:
        raise ValueError(f"the task {name} has no default source: name its question.jsonl")
    if shots is not None and name not in SHOWS_SHOTS:
        raise ValueError(
            f"shots have no effect on the task {name}: only on {', '.join(SHOWS_SHOTS)}"
        )
    given = {"source": source, "shots": shots}
    task = TASKS[name](**{option: value for option, value in given.items() if value is not None})
    if name not in RUN_PROGRAMS:
        return task
    if insist:
        return dataclasses.replace(task, score=functools.partial(task.score, insist=True))
    isolation.require_isolation()
    return task
