"""The cases: target and draft are tables of the next token's logits by the last token, so that everything can be summed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """Two tables and settings. ``temperatures`` are those of the rows of a batch, of which ``row`` is looked at."""

    name: str
    target: np.ndarray  # [V, V] logits
    draft: np.ndarray
    K: int = 2
    count: int = 3  # tokens whose joint distribution is compared
    temperatures: tuple[float, ...] = (1.0,)
    row: int = 0
    top_k: int = 0
    top_p: float = 1.0
    lengths: tuple[int, ...] = ()  # drafted tokens of each row; all K if empty

    @property
    def temperature(self) -> float:
        return self.temperatures[self.row]

    @property
    def needs(self) -> set[str]:
        """The settings that a system must know."""
        given = {"top_k": self.top_k > 0, "top_p": self.top_p < 1, "rows": len(self.temperatures) > 1}
        given["temperatures"] = len(set(self.temperatures)) > 1
        return {name for name, needed in given.items() if needed}


def logits_of(*rows: Sequence[float], size: int = 0) -> np.ndarray:
    """Returns logits of probabilities; a single row is that of each of ``size`` tokens."""
    with np.errstate(divide="ignore"):
        return np.log(np.tile(rows[0], (size, 1)) if size else np.array(rows))


def rotated(row: Sequence[float]) -> np.ndarray:
    """Returns the table whose row i is ``row`` moved on by i places."""
    return logits_of(*(np.roll(row, i) for i in range(len(row))))


Q, P = rotated((0.6, 0.3, 0.1)), rotated((0.4, 0.35, 0.25))
WIDE_Q, WIDE_P = rotated((0.45, 0.3, 0.15, 0.1)), rotated((0.3, 0.1, 0.35, 0.25))
ONE_Q, ONE_P = logits_of((0.7, 0.2, 0.1), size=3), logits_of((0.2, 0.3, 0.5), size=3)
PEAKED = logits_of((0.9998, 0.0001, 0.0001), size=3)

CASES = (
    Case("one position", ONE_Q, ONE_P, K=1, count=1),
    Case("joint", Q, P),
    Case("joint, K = 3", Q, P, K=3),
    Case("T = 0.7, top-p 0.8", WIDE_Q, WIDE_P, count=2, temperatures=(0.7,), top_p=0.8),
    Case("T = 1.5, top-p 0.8", WIDE_Q, WIDE_P, count=2, temperatures=(1.5,), top_p=0.8),
    Case("T = 0.7, top-k 2", WIDE_Q, WIDE_P, count=2, temperatures=(0.7,), top_k=2),
    Case("T = 0.7", Q, P, count=2, temperatures=(0.7,)),
    Case("disjoint supports", logits_of((0.6, 0.4, 0), size=3), logits_of((0, 0, 1), size=3), count=2),
    Case("equal distributions", Q, Q),
    Case("no residual", PEAKED, PEAKED, count=2, temperatures=(0.25,)),
    Case("a sampled row beside a greedy one", ONE_Q, ONE_P, K=1, count=2, temperatures=(1.0, 0.0)),
    Case("a greedy row beside a sampled one", ONE_Q, ONE_P, K=1, count=2, temperatures=(1.0, 0.0), row=1),
    Case("ragged batch, short row", Q, P, count=2, temperatures=(1.0, 1.0), lengths=(1, 2)),
    Case("ragged batch, long row", Q, P, count=2, temperatures=(1.0, 1.0), row=1, lengths=(1, 2)),
)
