"""Tasks of text, in their public formats: Spec-Bench and MT-bench, whose answers have no score;
GSM8K and XSum.
"""

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from specsamp.evaluation.records import Record, read_records
from specsamp.evaluation.task import Attempt, EvaluationTask, Problem, cut

GSM8K = "openai/gsm8k"
GSM8K_STOP = ("\nQuestion:",)
MT_BENCH = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)
NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
MARKED_NUMBER = re.compile(rf" *####\s*(?:- (?!-))?{NUMBER.pattern}")
# Those that begin with a marker count first.
MARKED_LINES = re.compile("^ *####.*", re.MULTILINE), re.compile("####.*")
XSUM = "EdinburghNLP/xsum"
ROUGE = ("rouge1", "rouge2", "rougeL")
XSUM_STOP = ("\n\n", "\nArticle:")
ARTICLE = "Article: {document}\nSummary:"


def load_turns(name: str, source: str) -> EvaluationTask:
    """Reads ``question.jsonl`` of "mt_bench", or of "spec_bench": five categories, and those of
    MT-bench as a sixth.
    """
    problems = []
    for record in read_records(
        source, {"question_id": int, "category": str, "turns": list}, key="question_id"
    ):
        first, *further = map(str, record["turns"]) if record["turns"] else [""]
        if not first:
            raise ValueError(f"{source}: question {record['question_id']} has no turns")
        category = record["category"]
        if name == "spec_bench" and category in MT_BENCH:
            category = "mt_bench"
        problems.append(
            Problem(
                id=str(record["question_id"]),
                category=category,
                prompt=first,
                further_turns=tuple(further),
            )
        )
    return EvaluationTask(name=name, problems=problems)


def load_gsm8k(source: str = GSM8K, shots: str | None = None) -> EvaluationTask:
    """Reads questions and answers, which end with the result behind ``####``.

    Args:
      shots: a file of example questions, which are shown with their answers before each question.
    """
    fields = {"question": str, "answer": str}
    asked = "Question: {question}\nAnswer:"
    examples = read_records(shots, fields) if shots else []
    shown = "".join(f"{asked.format(**example)} {example['answer']}\n\n" for example in examples)
    problems = [
        Problem(
            id=str(place),
            category="math",
            prompt=shown + asked.format(**record),
            reference=record["answer"],
        )
        for place, record in enumerate(read_records(source, fields), 1)
    ]
    return EvaluationTask(name="gsm8k", problems=problems, stop=GSM8K_STOP, score=score_numbers)


def score_numbers(problem: Problem, attempts: Sequence[Attempt]) -> dict[str, float]:
    """Returns the share of attempts whose result equals the reference's, see `find_result`."""
    expected = find_result(problem.reference)
    right = sum(find_result(cut(attempt.text, GSM8K_STOP)) == expected for attempt in attempts)
    return {"correct": right / len(attempts)}


def find_result(text: str) -> float | None:
    """Returns the result of a text, or None.

    It is in the first line that begins with a marker ``####``, or has one, and has a number: the
    number directly behind the marker, which may stand in the next line, else the first of the line.
    Without such a line it is the last number of the text. Commas may separate thousands, and a sign
    may stand before a dollar. After its result a model goes on, often with questions of its own.
    """
    text = text.replace("$", "").replace("\N{MINUS SIGN}", "-")
    for line in itertools.chain.from_iterable(pattern.finditer(text) for pattern in MARKED_LINES):
        number = MARKED_NUMBER.match(text, line.start()) or NUMBER.search(line[0])
        if number:
            return float(re.sub(r"[#,\s]", "", number[0]))
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def load_xsum(source: str = XSUM) -> EvaluationTask:
    """Reads articles with the fields ``document`` and ``summary``; the first article is the
    example.

    Raises:
      ValueError: see `read_records`; there is only one article; or the library of the scores is
        missing.
    """
    _scorer()
    example, *records = read_records(source, {"document": str, "summary": str})
    if not records:
        raise ValueError(f"{source} has one article, which is the example: give more")
    shown = f"{_ask(example)} {_flat(example['summary'])}\n\n"
    problems = [
        Problem(
            id=str(record.get("id", number)),
            prompt=shown + _ask(record),
            reference=_flat(record["summary"]),
        )
        for number, record in enumerate(records, 2)
    ]
    return EvaluationTask(
        name="xsum",
        problems=problems,
        stop=XSUM_STOP,
        max_new_tokens=128,
        continues=True,
        score=score_summaries,
    )


def score_summaries(problem: Problem, attempts: Sequence[Attempt]) -> dict[str, float]:
    """Returns the mean F-measures of ROUGE-1, 2 and L of the summaries."""
    found = [
        _scorer().score(problem.reference, cut(attempt.text, XSUM_STOP)) for attempt in attempts
    ]
    return {name: float(np.mean([scores[name].fmeasure for scores in found])) for name in ROUGE}


def _ask(record: Record) -> str:
    return ARTICLE.format(document=_flat(record["document"]))


def _flat(text: str) -> str:
    """Returns a text in one line, since an empty line ends an example."""
    return " ".join(text.split())


@functools.cache
def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ValueError("scoring summaries needs a library: pip install rouge-score") from error
    return RougeScorer(ROUGE, use_stemmer=True)
