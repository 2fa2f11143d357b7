"""Systems that are not Python, implemented from a description in our own words; and rows that were only read."""

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


OPEN = {
    "version": "0.5.23",
    "place": "speculative/sampling.cuh:66",
    "draws": "two children, one-hot, one coin over siblings",
}
ROWS = {
    "mlx-lm": (
        equal,
        True,
        {"version": "0.32.2", "place": "generate.py:606", "draws": "target only: both drawn, accepted when equal"},
    ),
    "llama.cpp": (
        equal,
        False,
        {
            "version": "b6900",
            "place": "common/sampling.cpp",
            "draws": "target only: drawn, compared with the argmax draft",
            "note": "issue 27694 would add rejection",
        },
    ),
    "mistral.rs (MTP)": (
        ratio,
        True,
        {"version": "9e922623f", "place": "speculative/verifier.rs:341", "draws": "draft's distribution"},
    ),
    "mistral.rs (DFlash outside of CUDA graphs)": (
        ratio,
        False,
        {
            "version": "9e922623f",
            "place": "qwen3_5/speculative.rs:367",
            "draws": "argmax drafts, as if they had been drawn",
            "note": "no report found",
        },
    ),
    "SGLang (target only)": (functools.partial(coin, 1.0, 1.0), False, OPEN),
    "SGLang (target only at thresholds 0.5)": (
        functools.partial(coin, 0.5, 0.5),
        False,
        OPEN | {"says": "lossy by a flag"},
    ),
}
for _name, (_verify, _drawn, _known) in ROWS.items():
    system(_name, how="description", **_known)(functools.partial(make, _verify, _drawn))

READ = {
    "SGLang (rejection kernels)": ("0.5.23", "kernels/ops/speculative/reject_sampling.py:5", "draft's distribution, token and block",
        "exact: in an earlier run its Triton kernel, interpreted, agreed with an enumerated reference at 220 of 220 points beside thresholds"),
    "vLLM (version 1)": ("0.33.0", "v1/sample/rejection_sampler.py:432", "draft's distribution, and one-hot",
        "exact: in an earlier run its Triton kernel, interpreted, agreed with an enumerated reference at 200 of 200 points beside thresholds"),
    "vLLM (runner 2)": ("0.33.0", "worker/gpu/spec_decode/rejection_sampler_utils.py:503", "draft's distribution, token and block",
        "exact; its methods fly and synthetic are lossy, and say so"),
    "sglang-jax": ("cddbf6f1", "speculative/draft_extend_fused.py:260", "one-hot",
        "exact at thresholds 1; a tree kernel that nothing imports would emit token 0"),
    "TensorRT-LLM": ("main of 2026-08", "sampler/ops/spec_decode.py", "draft's distribution when asked, else exact match",
        "read in part; issue 19390: an unset temperature became 1e-5"),
}  # fmt: skip
for _name, (_version, _place, _draws, _read) in READ.items():
    system(_name, version=_version, place=_place, draws=_draws, how="read", read=_read)(None)
