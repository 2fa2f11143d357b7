"""XSum: summarises articles in one sentence, after one example; ROUGE scores the summaries."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from specsamp.evaluation.records import Record, read_records
from specsamp.evaluation.task import Attempt, EvaluationTask, Problem, cut

HUB = "EdinburghNLP/xsum"
MEASURES = ("rouge1", "rouge2", "rougeL")
STOP = ("\n\n", "\nArticle:")
TEMPLATE = "Article: {document}\nSummary:"


def load_xsum(source: str = HUB) -> EvaluationTask:
    """Reads articles with the fields ``document`` and ``summary``; the first article is the example.

    Raises:
      ValueError: as `read_records`; there is one article only; or the library of the scores is missing.
    """
    _scorer()
    example, *records = read_records(source, {"document": str, "summary": str})
    if not records:
        raise ValueError(f"{source} has one article, which is the example: give more")
    shown = f"{_ask(example)} {_flat(example['summary'])}\n\n"
    problems = [
        Problem(id=str(record.get("id", number)), prompt=shown + _ask(record), reference=_flat(record["summary"]))
        for number, record in enumerate(records, 2)
    ]
    return EvaluationTask(
        name="xsum", problems=problems, stop=STOP, max_new_tokens=128, continues=True, score=score_summaries
    )


def score_summaries(problem: Problem, attempts: Sequence[Attempt]) -> dict[str, float]:
    """Returns the mean F-measures of ROUGE-1, 2 and L of the summaries."""
    found = [_scorer().score(problem.reference, cut(attempt.text, STOP)) for attempt in attempts]
    return {name: float(np.mean([scores[name].fmeasure for scores in found])) for name in MEASURES}


def _ask(record: Record) -> str:
    return TEMPLATE.format(document=_flat(record["document"]))


def _flat(text: str) -> str:
    """Returns a text in one line, since an empty line ends an example."""
    return " ".join(text.split())


@functools.cache
def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ValueError("to score summaries takes a library: pip install rouge-score") from error
    return RougeScorer(MEASURES, use_stemmer=True)
