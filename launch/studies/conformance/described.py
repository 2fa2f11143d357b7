"""Systems that are not Python, implemented from a description in our own words."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from launch.studies.conformance.cases import Case
from launch.studies.conformance.systems import Emit


def probabilities(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Returns the rows' distributions."""
    weights = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
    return weights / weights.sum(-1, keepdims=True)


def draw_token(weights: np.ndarray) -> int:
    """Draws a token in proportion to weights."""
    return int(np.random.choice(len(weights), p=weights / weights.sum()))


def samplers(case: Case, verify: Callable[[int, np.ndarray, np.ndarray], Sequence[int]]) -> tuple[Emit, Emit]:
    """Returns rounds that ``verify`` makes of the last token, target and draft; and plain sampling."""
    q, p = probabilities(case.target, case.temperature), probabilities(case.draft, case.temperature)
    return lambda last: verify(last, q, p), lambda last: [draw_token(q[last])]


def chain_of_drafts(files: None, case: Case, *, rule: str, drawn: bool) -> tuple[Emit, Emit]:
    """Verifies a chain of drafts, which are drawn or the most probable, by the rule "equal" or "ratio"."""

    def verify(last: int, q: np.ndarray, p: np.ndarray) -> list[int]:
        tokens = [last]
        for _ in range(case.K):
            tokens.append(draw_token(p[tokens[-1]]) if drawn else int(p[tokens[-1]].argmax()))
        return {"equal": accept_equals, "ratio": accept_by_ratio}[rule](tokens, q, p)

    return samplers(case, verify)


def accept_equals(tokens: list[int], q: np.ndarray, p: np.ndarray) -> list[int]:
    """Draws the target's own token at each position, and goes on while it is the drafted one."""
    emitted = []
    for last, drafted in zip(tokens, [*tokens[1:], None], strict=True):
        emitted.append(draw_token(q[last]))
        if emitted[-1] != drafted:
            break
    return emitted


def accept_by_ratio(tokens: list[int], q: np.ndarray, p: np.ndarray) -> list[int]:
    """Accepts with min(1, q / p), and corrects with a draw from (q - p)+."""
    for place, (last, drafted) in enumerate(zip(tokens, tokens[1:], strict=False)):
        if random.random() >= min(1, q[last, drafted] / p[last, drafted]):
            return [*tokens[1 : place + 1], draw_token(np.maximum(q[last] - p[last], 0))]
    return [*tokens[1:], draw_token(q[tokens[-1]])]


def two_children(files: None, case: Case, *, threshold: float) -> tuple[Emit, Emit]:
    """Walks a tree of two children with one coin for all siblings: their probabilities add up until the coin is below.

    Sums are divided by the threshold, and a child whose own probability reaches it is accepted. What was rejected is left
    out of the last draw.
    """

    def verify(last: int, q: np.ndarray, p: np.ndarray) -> list[int]:
        emitted: list[int] = []
        for _ in range(case.K):
            weights, uniform, mass = q[last].copy(), random.random(), 0.0
            for child in np.argsort(-p[last], kind="stable")[:2]:
                mass += q[last, child]
                if q[last, child] >= threshold or uniform < mass / threshold:
                    emitted.append(int(child))
                    break
                weights[child] = 0
            else:
                return [*emitted, draw_token(weights)]
            last = emitted[-1]
        return [*emitted, draw_token(q[last])]

    return samplers(case, verify)
