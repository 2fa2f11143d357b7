"""HumanEval: functions to be completed from signature and docstring, in the file format of openai/human-eval.

Generated programs run in isolation, see `isolation`.
"""

from __future__ import annotations

from specsamp.evaluation.programs import ProgramTask
from specsamp.evaluation.records import read_records
from specsamp.evaluation.task import Problem

HUB = "openai/openai_humaneval"
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
FIELDS = {"task_id": str, "prompt": str, "entry_point": str, "test": str}


def load(source: str = HUB, *, insist: bool = False) -> ProgramTask:
    """Reads the problems; see `read_records` for sources and errors."""
    problems = [
        Problem(
            id=record["task_id"],
            prompt=record["prompt"],
            reference=f"{record['test']}\n\ncheck({record['entry_point']})",
        )
        for record in read_records(source, FIELDS, key="task_id")
    ]
    return ProgramTask(name="humaneval", problems=problems, stop=STOP, insist=insist)
