"""Figure 1 of Chen et al. (arXiv 2302.01318), read off to about 2%: Chinchilla 70B and 4B, 16 TPU v4, batch 1."""

from __future__ import annotations

import dataclasses

TOKENS = 128
ROUND_MS = (14.1, 16.3, 18.2, 20.3, 22.8, 25.0, 27.1, 28.5)  # K = 0 .. 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One of the two tasks."""

    name: str
    alpha: float  # the acceptance of every drafted token that explains the curve
    total_ms: tuple[float, ...]  # for `TOKENS` tokens, K = 0 .. 7
    emitted_share: tuple[float, ...]  # tokens per round over K + 1
    ms_per_token: float  # at K = 4, table 1


HUMANEVAL = Task(
    name="HumanEval",
    alpha=0.885,
    total_ms=(1805, 1108, 875, 777, 735, 710, 697, 675),
    emitted_share=(1, 0.945, 0.887, 0.838, 0.797, 0.752, 0.712, 0.677),
    ms_per_token=5.73,
)
XSUM = Task(
    name="XSum",
    alpha=0.755,
    total_ms=(1805, 1197, 993, 935, 943, 965, 990, 1002),
    emitted_share=(1, 0.875, 0.78, 0.695, 0.618, 0.553, 0.50, 0.455),
    ms_per_token=7.52,
)
TASKS = (HUMANEVAL, XSUM)
