"""Counts the first two sampled tokens after some prompts and compares them with the target's
distribution.

The cells of a prompt are its probable pairs (x1, x2), its probable first tokens x1 with any other
second token, and the rest. They partition all continuations. Their probabilities come from the
target's logits, read by teacher forcing.

**The test.** The first half of the samples selects, after each prompt, the cells that came too
often. The second half counts how often these cells come. The difference between their sampled
probability and their probability under the target is at most the total variation of the two
distributions. So the rule fails if the count is too large for the target's probability plus the
allowed total variation: none, or the budget of a lossy rule (`specsamp.sampling.lossy.Bounded`).
The test is binomial. The probabilities of several prompts differ, which makes large counts rarer
still (Hoeffding 1956).

**Power.** An error moves the probability e between cells. With n samples in the first half, a cell
of probability r that is chosen wrongly loses at most ``0.17 sqrt(r (1 - r) / n)`` of e, by the
normal approximation; C cells lose at most ``0.17 sqrt((C - 1) / n)``. The remaining error must
exceed the spread of the count. `samples_for` solves this for n.

**Not detected** are errors between continuations within a cell, which may have most of the mass of
a flat distribution, and errors that begin at the third token.
`specsamp.evaluation.audit.round_evidence` tests acceptance and residual.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from scipy import stats

from specsamp.analysis.report import Say, silent
from specsamp.evaluation.audit.subject import POWER, Check, Status, Subject
from specsamp.evaluation.audit.teacher import next_logits
from specsamp.sampling.warp import for_rows, log_probs

SMALLEST = 1e-2  # probability of a cell
REST = 0  # index of the cell of all other continuations
TOKENS = 2  # of a sample
CHOICE_LOSS = 0.17  # largest value of x * normal.sf(x)
# Standard deviations of the count, times the square root of its size: under the target, and with an
# error, where the choice of cells varies as well.
SPREAD, SPREAD_WITH_ERROR = 0.5, 0.7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cells:
    """A partition of a prompt's continuations.

    Attributes:
      prompt_id: index of the prompt.
      index: the cell of each pair ``(x1, x2)``; ``(x1, None)`` is x1 with any other second token.
      probs_C: float64, the probability of each cell; the cell `REST` comes first.
    """

    prompt_id: int
    index: dict[tuple[int, int | None], int]
    probs_C: np.ndarray

    @classmethod
    def of(cls, prompt_id: int, probable: Mapping[tuple[Any, Any], float]) -> Self:
        """Makes a cell of each probable pair, and one of all other continuations."""
        return cls(
            prompt_id=prompt_id,
            index={pair: number for number, pair in enumerate(probable, start=REST + 1)},
            probs_C=np.array([max(1 - sum(probable.values()), 0), *probable.values()]),
        )

    @property
    def is_random(self) -> bool:
        """Returns whether no cell has nearly all of the probability."""
        return self.probs_C.max() < 1 - SMALLEST

    def count(self, samples: Sequence[tuple[int, int]]) -> np.ndarray:
        """Returns the number of samples in each cell, [C]."""
        cells = [self.index.get((x1, x2), self.index.get((x1, None), REST)) for x1, x2 in samples]
        return np.bincount(cells, minlength=len(self.probs_C))


def read_cells(subject: Subject, prompt_ids: Sequence[int]) -> list[Cells]:
    """Returns the cells of each prompt whose continuation is random.

    Raises:
      ValueError: there is no such prompt.
    """
    probs_NV = _probs(subject, subject.prompt_logits[list(prompt_ids)])
    followed = [
        (i, x1)
        for i, probs_V in enumerate(probs_NV)
        for x1 in np.flatnonzero(probs_V >= min(SMALLEST, probs_V.max())).tolist()
    ]
    seconds = _probs(
        subject,
        next_logits(subject.pair, [(*subject.prompts[prompt_ids[i]], x1) for i, x1 in followed]),
    )
    probable: list[dict[tuple[int, int | None], float]] = [{} for _ in prompt_ids]
    for (i, x1), seconds_V in zip(followed, seconds, strict=True):
        pairs_V = probs_NV[i, x1] * seconds_V
        pairs = {(x1, x2): pairs_V[x2] for x2 in np.flatnonzero(pairs_V >= SMALLEST).tolist()}
        probable[i] |= pairs
        other = probs_NV[i, x1] - sum(pairs.values())
        if other >= SMALLEST:
            probable[i][x1, None] = other
    cells = [*filter(lambda one: one.is_random, map(Cells.of, prompt_ids, probable))]
    if not cells:
        raise ValueError(
            "the sampled distribution is deterministic (temperature 0?), so its check would be "
            "empty: set a temperature, or leave the check out"
        )
    return cells


def samples_for(cells: Sequence[Cells], detect: float, level: float) -> int:
    """Returns the samples per prompt that detect a total variation of ``detect`` beyond the
    allowed, with `POWER`.

    Args:
      cells: of each prompt.
      detect: total variation, on average over the prompts.
      level: probability, at most, that a sound pair fails.
    """
    lost = CHOICE_LOSS * np.mean([np.sqrt(len(one.probs_C) - 1) for one in cells])
    spread = SPREAD * stats.norm.isf(level) + SPREAD_WITH_ERROR * stats.norm.isf(1 - POWER)
    return 2 * math.ceil(((lost + spread / np.sqrt(len(cells))) / detect) ** 2)


def count_pairs(
    subject: Subject,
    cells: Sequence[Cells],
    *,
    detect: float,
    level: float,
    rows: int,
    allowed: float = 0.0,
    progress: Say = silent,
) -> Check:
    """Checks that sampled pairs of tokens differ from the target's distribution by at most
    ``allowed``.

    Args:
      subject: the pair, its prompts and settings.
      cells: of some prompts, see `read_cells`.
      detect: total variation beyond the allowed that is detected with `POWER`.
      level: largest probability that a correct pair fails.
      allowed: total variation of two tokens that a lossy rule may cost.
      rows: number of samples that are drawn together.
      progress: called with the work that begins.

    Raises:
      ValueError: a text has no second token.
    """
    samples = samples_for(cells, detect, level)
    prompt_ids = [one.prompt_id for one in cells]
    drawn: list[list[list[int]]] = [[] for _ in cells]
    seed = subject.seed
    while len(drawn[0]) < samples:
        progress(f"distribution: {len(drawn[0]) * len(drawn)} of {samples * len(drawn)} samples")
        seed = (seed + 1) % 2**32  # with the same seed every call would draw the same samples
        completions = subject.decode(
            [subject.prompts[i] for i in prompt_ids],
            prompt_ids=prompt_ids,
            max_new_tokens=TOKENS,
            stop=(),
            num_samples=max(rows // len(prompt_ids), 1),
            seed=seed,
        )
        for completion in completions:
            drawn[completion.prompt_index].append(completion.tokens)
    if any(len(pair) < TOKENS for of_prompt in drawn for pair in of_prompt[:samples]):
        raise ValueError(
            "texts ended before their second token: the target's logits were NaN or infinite"
        )
    choosing, counting = (
        [one.count(of_prompt[half]) for one, of_prompt in zip(cells, drawn, strict=True)]
        for half in (slice(samples // 2), slice(samples // 2, samples))
    )
    found = excess(cells, choosing, counting, allowed)
    check = check_cells(cells, samples, found, detect=detect, level=level, allowed=allowed)
    if check.verdict is Status.PASSED:
        return check
    return dataclasses.replace(check, sentence=f"{check.sentence}; {_worst(cells, counting)}")


def check_cells(
    cells: Sequence[Cells],
    samples: int,
    found: tuple[float, float],
    *,
    detect: float,
    level: float,
    allowed: float = 0.0,
    against: str = "",
) -> Check:
    """Returns the result of the check from the counts of both halves, see `excess`."""
    measured, p_value = found
    rest = float(np.mean([one.probs_C[REST] for one in cells]))
    numbers = {
        "samples": samples * len(cells),
        "prompts": len(cells),
        "cells": sum(len(one.probs_C) for one in cells),
        "allowed": allowed,
        "measured": measured,
        "p_value": p_value,
        "level": level,
        "share_in_the_rest": rest,
    }
    budget = f", of which {allowed:g} is allowed" if allowed else ""
    beyond = f" beyond the allowed {allowed:g}" if allowed else ""
    return Check.tested(
        "distribution",
        p_value < level,
        f"{numbers['samples']} samples of two tokens after {len(cells)} prompts{against}: total "
        f"variation {max(measured, 0):.2g}{budget}, p = {p_value:.2g}",
        numbers=numbers,
        seen=f"any error of {detect:g}{beyond} between the {numbers['cells']} cells of two tokens "
        f"seen with {POWER:.0%} ({rest:.0%} of the probability lies in one cell)",
    )


def excess(
    cells: Sequence[Cells],
    choosing: Sequence[np.ndarray],
    counting: Sequence[np.ndarray],
    allowed: float,
) -> tuple[float, float]:
    """Returns the measured total variation, and the p-value of the claim that it is at most
    ``allowed``.

    Args:
      cells: of each prompt.
      choosing: counts [C] of the samples that choose cells.
      counting: counts [C] of the other samples.
      allowed: total variation, on average over the prompts.
    """
    hits = 0
    counted = 0
    expected = []
    for one, first_C, second_C in zip(cells, choosing, counting, strict=True):
        is_chosen_C = first_C > one.probs_C * first_C.sum()
        hits += int(second_C[is_chosen_C].sum())
        counted += int(second_C.sum())
        expected.append(float(one.probs_C[is_chosen_C].sum()))
    probability = float(np.mean(expected))
    p_value = stats.binom.sf(hits - 1, counted, min(probability + allowed, 1.0))
    return hits / counted - probability, float(p_value)


def _probs(subject: Subject, logits_NV: np.ndarray) -> np.ndarray:
    """Returns the warped distributions, float64 [N, V]."""
    warp = for_rows(subject.pair.full_warp(subject.method.sampling), len(logits_NV))
    probs_NV = np.exp(np.asarray(log_probs(warp, logits_NV), np.float64))
    return probs_NV / probs_NV.sum(-1, keepdims=True)


def _worst(cells: Sequence[Cells], counts: Sequence[np.ndarray]) -> str:
    """Describes the cell whose count is farthest from its expectation."""
    off = []
    for one, counts_C in zip(cells, counts, strict=True):
        expected_C = one.probs_C * counts_C.sum()
        terms_C = (counts_C - expected_C) ** 2 / np.maximum(expected_C, 1)
        cell = int(np.argmax(terms_C))
        names = ["the rest"]
        names += [f"{x1} {'and another token' if x2 is None else x2}" for x1, x2 in one.index]
        came = (
            f"after prompt {one.prompt_id}, {names[cell]} came {counts_C[cell]} times, not "
            f"{expected_C[cell]:.0f}"
        )
        off.append((terms_C[cell], came))
    return max(off)[1]
