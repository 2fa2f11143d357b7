"""Tests whether a rule that is lossy within a budget keeps to it: `specsamp.sampling.lossy.Bounded`.

Texts of two tokens may differ from the target's by a total variation of twice the budget of a token. Samples fall into
the same cells as those of an exact rule. Half of them choose, after each prompt, the cells that came too often; the
other half, which knows nothing of that choice, counts how often these cells come. Their probability under the rule,
less that under the target, is at most the total variation. So a lower bound of the one is a lower bound of the other,
and the rule is rejected where that of 99% exceeds the budget. The bound is that of a binomial distribution (Clopper and
Pearson); the probabilities of several prompts differ, which makes it only smaller (Hoeffding 1956).

**Power** is stated for the cells that were chosen. Not seen are the errors that `specsamp.evaluation.audit.distribution`
does not see either: within a cell, and from the third token on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy import optimize, stats

from specsamp.evaluation.audit.cells import Cells
from specsamp.evaluation.audit.distribution import SamplingPlan, draw
from specsamp.evaluation.audit.evidence import POWER
from specsamp.evaluation.audit.subject import Check, Status, Subject
from specsamp.sampling.lossy import Bounded
from specsamp.sampling.rules import Rule

CLAIM = "samples stay within the rule's budget of total variation from the target's distribution"
LEVEL = 0.01  # one-sided
TOKENS = 2  # of a sample


def budget_of(rule: Rule) -> float | None:
    """Returns the total variation per token that a lossy rule may cost; None of a rule that claims to be exact.

    Raises:
      ValueError: the rule is lossy and states no budget, so there is nothing to hold it to.
    """
    if not rule.metered:
        return None
    if not isinstance(rule, Bounded):
        raise ValueError(
            f"{rule!r} is lossy and promises nothing that could be audited: give it a budget, such as "
            "rule = bounded:0.01:ears:1.0, or audit an exact rule"
        )
    return rule.tv_per_token


def within_budget(
    subject: Subject,
    plan: SamplingPlan,
    budget: float,
    *,
    rows: int = 128,
    progress: Callable[[str], None] = lambda text: None,
) -> Check:
    """Draws samples and rejects the rule if they show that it exceeds its budget; arguments as of `count_pairs`."""
    drawn = draw(subject, [cells.prompt_id for cells in plan.cells], plan.samples, rows, progress)
    if any(len(pair) < TOKENS for samples in drawn for pair in samples):
        sentence = "texts ended before their second token: the target's logits were NaN or infinite"
        return Check(name="distribution", verdict=Status.FAILED, sentence=sentence, numbers={}, claim=CLAIM)
    half = plan.samples // 2
    first, second = (
        [cells.count(samples[part]) for cells, samples in zip(plan.cells, drawn, strict=True)]
        for part in (slice(half), slice(half, None))
    )
    hits, counted, expected = _hits(plan.cells, first, second)
    allowed = TOKENS * budget
    shown = lower_bound(hits, counted) - expected
    seen_from = smallest_seen(counted, expected, allowed)
    sentence = (
        f"{counted} samples of two tokens after {len(plan.cells)} prompts: with 99% their total variation is above "
        f"{max(shown, 0):.3g}; {allowed:g} is allowed (measured {hits / counted - expected:.3g})"
    )
    numbers = {
        "samples": counted,
        "prompts": len(plan.cells),
        "budget_per_token": budget,
        "allowed": allowed,
        "measured": hits / counted - expected,
        "lower_bound": shown,
        "level": LEVEL,
        "seen_from": seen_from,
        "power": POWER,
    }
    seen = (
        f"a total variation of two tokens of {seen_from:.2g} in the chosen cells, {allowed:g} being allowed, seen with "
    )
    verdict = Status.FAILED if shown > allowed else Status.PASSED
    return Check(
        name="distribution",
        verdict=verdict,
        sentence=sentence,
        numbers=numbers,
        seen=f"{seen}{POWER:.0%}",
        claim=CLAIM,
    )


def _hits(
    partitions: Sequence[Cells], first: Sequence[np.ndarray], second: Sequence[np.ndarray]
) -> tuple[int, int, float]:
    """Returns the hits of the second half in the cells that the first chose, its size, and the target's probability."""
    hits, counted, expected = 0, 0, []
    for cells, chosen_by_C, counts_C in zip(partitions, first, second, strict=True):
        is_chosen_C = chosen_by_C > cells.probs_C * chosen_by_C.sum()
        hits += int(counts_C[is_chosen_C].sum())
        counted += int(counts_C.sum())
        expected.append(float(cells.probs_C[is_chosen_C].sum()))
    return hits, counted, float(np.mean(expected))


def lower_bound(hits: int, counted: int) -> float:
    """Returns the one-sided lower bound of a probability, by Clopper and Pearson."""
    return float(stats.beta.ppf(LEVEL, hits, counted - hits + 1)) if hits else 0.0


def smallest_seen(counted: int, expected: float, allowed: float) -> float:
    """Returns the total variation that is shown to exceed ``allowed`` with `POWER`; 1 if none is.

    Args:
      counted: samples that are counted.
      expected: the target's probability of the chosen cells.
      allowed: total variation.
    """
    edge = expected + allowed
    if edge >= 1:
        return 1.0
    low, high = 0, counted + 1  # of the hits from which on the bound is above the edge
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if lower_bound(middle, counted) > edge else (middle, high)

    def missing(probability: float) -> float:
        return float(stats.binom.sf(high - 1, counted, probability)) - POWER

    return 1.0 if missing(1.0) < 0 else float(optimize.brentq(missing, edge, 1.0)) - expected
