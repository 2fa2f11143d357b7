"""XSum: summaries of articles in one sentence, after one example, scored by ROUGE."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from specsamp.evaluation.records import Record, read_records
from specsamp.evaluation.task import Answer, Problem, cut

HUB = "EdinburghNLP/xsum"
MEASURES = ("rouge1", "rouge2", "rougeL")
TEMPLATE = "Article: {document}\nSummary:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class XSum:
    """Articles, and the F-measures of ROUGE-1, 2 and L of their summaries."""

    problems: Sequence[Problem]
    name: str = "xsum"
    stop: tuple[str, ...] = ("\n\n", "\nArticle:")
    max_new_tokens: int = 128
    continues: bool = True

    def score(self, problem: Problem, answers: Sequence[Answer]) -> dict[str, float]:
        found = [_scorer().score(problem.reference, cut(answer.text, self.stop)) for answer in answers]
        return {name: float(np.mean([one[name].fmeasure for one in found])) for name in MEASURES}


def load(source: str = HUB) -> XSum:
    """Reads articles with the fields ``document`` and ``summary``; the first of them is the example.

    Raises:
      ValueError: as `read_records`; there is one article only; or the library of the scores is missing.
    """
    _scorer()
    example, *records = read_records(source, {"document": str, "summary": str})
    if not records:
        raise ValueError(f"{source} has one article, which is the example: give more")
    shown = f"{_ask(example)} {_flat(example['summary'])}\n\n"
    return XSum(
        problems=[
            Problem(id=str(record.get("id", number)), prompt=shown + _ask(record), reference=_flat(record["summary"]))
            for number, record in enumerate(records, 2)
        ]
    )


def _ask(record: Record) -> str:
    return TEMPLATE.format(document=_flat(record["document"]))


def _flat(text: str) -> str:
    """Returns a text in one line: an empty line ends an example."""
    return " ".join(text.split())


@functools.cache
def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ValueError("to score summaries takes a library: pip install rouge-score") from error
    return RougeScorer(MEASURES, use_stemmer=True)
