"""Systems that are not Python, implemented from a description in our own words."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

import numpy as np

from launch.studies.conformance.cases import Case
from launch.studies.conformance.systems import Emit, system

Verify = Callable[..., list[int]]


def probabilities(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Returns the rows' distributions."""
    weights = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
    return weights / weights.sum(-1, keepdims=True)


def draw(weights: np.ndarray) -> int:
    """Draws a token in proportion to weights."""
    return int(np.random.choice(len(weights), p=weights / weights.sum()))


def make(verify: Verify, drawn: bool, folder: None, case: Case) -> tuple[Emit, Emit]:
    """Returns rounds that verify a chain of drafts, which are drawn or the most probable; and plain sampling."""
    del folder
    q, p = probabilities(case.target, case.temperature), probabilities(case.draft, case.temperature)

    def emit(last: int) -> Sequence[int]:
        tokens = [last]
        for _ in range(case.K):
            tokens.append(draw(p[tokens[-1]]) if drawn else int(p[tokens[-1]].argmax()))
        return verify(tokens, q, p)

    return emit, lambda last: [draw(q[last])]


def equal(tokens: list[int], q: np.ndarray, p: np.ndarray) -> list[int]:
    """Draws the target's own token at each position, and goes on while it is the drafted one."""
    emitted = []
    for last, drafted in zip(tokens, [*tokens[1:], None], strict=True):
        emitted.append(draw(q[last]))
        if emitted[-1] != drafted:
            break
    return emitted


def ratio(tokens: list[int], q: np.ndarray, p: np.ndarray) -> list[int]:
    """Accepts with min(1, q / p), and corrects with a draw from (q - p)+."""
    for place, (last, drafted) in enumerate(zip(tokens, tokens[1:], strict=False)):
        if random.random() >= min(1, q[last, drafted] / p[last, drafted]):
            return [*tokens[1 : place + 1], draw(np.maximum(q[last] - p[last], 0))]
    return [*tokens[1:], draw(q[tokens[-1]])]


def coin(single: float, total: float, tokens: list[int], q: np.ndarray, p: np.ndarray) -> list[int]:
    """Walks a tree of two children with one coin for all siblings: their probabilities add up until the coin is below.

    A child is also accepted where its own probability reaches ``single``. What was rejected is left out of the last draw.
    """
    last, emitted = tokens[0], []
    for _ in tokens[1:]:
        weights, uniform, mass = q[last].copy(), random.random(), 0.0
        for child in np.argsort(-p[last], kind="stable")[:2]:
            mass += q[last, child]
            if q[last, child] >= single or uniform < mass / total:
                emitted.append(int(child))
                break
            weights[child] = 0
        else:
            return [*emitted, draw(weights)]
        last = emitted[-1]
    return [*emitted, draw(q[last])]


ROWS = {  # the rule, and whether drafts are drawn
    "mlx-lm": (equal, True),
    "llama.cpp": (equal, False),
    "mistral.rs (MTP)": (ratio, True),
    "mistral.rs (DFlash outside of CUDA graphs)": (ratio, False),
    "SGLang (target only)": (functools.partial(coin, 1.0, 1.0), False),
    "SGLang (target only at thresholds 0.5)": (functools.partial(coin, 0.5, 0.5), False),
}
for _name, (_verify, _drawn) in ROWS.items():
    system(_name)(functools.partial(make, _verify, _drawn))
