"""Prompts by category, in their public formats: Spec-Bench and MT-bench, GSM8K, MBPP."""

from __future__ import annotations

import dataclasses

from specsamp.evaluation.programs import ProgramTask
from specsamp.evaluation.records import read_records
from specsamp.evaluation.task import Problem, Prompts

GSM8K, MBPP = "openai/gsm8k", "google-research-datasets/mbpp"


def load(source: str) -> Prompts:
    """Reads ``question.jsonl`` of Spec-Bench, whose format is MT-bench's: question_id, category and turns."""
    problems = []
    for record in read_records(source, {"question_id": int, "category": str, "turns": list}, key="question_id"):
        first, *further = map(str, record["turns"]) if record["turns"] else [""]
        if not first:
            raise ValueError(f"{source}: question {record['question_id']} has no turns")
        problems.append(
            Problem(
                id=str(record["question_id"]),
                category=record["category"],
                prompt=first,
                further_turns=tuple(further),
            )
        )
    return Prompts(name="spec_bench", problems=problems)


def load_mt_bench(source: str) -> Prompts:
    """Reads ``question.jsonl`` of MT-bench, as `load`."""
    return dataclasses.replace(load(source), name="mt_bench")


def load_gsm8k(source: str = GSM8K) -> Prompts:
    """Reads questions and answers; the answer's last number follows ``####``."""
    records = read_records(source, {"question": str, "answer": str})
    problems = [
        Problem(
            id=str(number),
            category="math",
            prompt=f"Question: {record['question']}\nAnswer:",
            reference=record["answer"],
        )
        for number, record in enumerate(records, 1)
    ]
    return Prompts(name="gsm8k", problems=problems, stop=("\nQuestion:",))


def load_mbpp(source: str = MBPP, *, insist: bool = False) -> ProgramTask:
    """Reads tasks with their tests, which are shown in the prompt; the sanitized edition calls the text ``prompt``."""
    problems = []
    for record in read_records(source, {"task_id": int, "test_list": list}, key="task_id"):
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
    stop = ('\n"""', "\nassert", "\nprint", "\nif")
    return ProgramTask(name="mbpp", problems=problems, stop=stop, prompt_is_code=False, insist=insist)
