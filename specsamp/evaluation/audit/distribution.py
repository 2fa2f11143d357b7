"""Counts the first two sampled tokens after a prompt and compares them with the target's distribution by chi-square.

Expected counts come from the target's own probabilities, read by teacher forcing. The cells of a prompt are its most
probable pairs (x1, x2), its most probable first tokens x1 with any other second token, and the rest. They partition all
continuations, and each cell is expected at least `EXPECTED` times. There is one test for each prompt and one for all
together; they share the false alarm. Their level allows for small counts: the tail of Pearson's statistic is heavier
than that of the chi-square distribution, at a level of 4e-7 at most `TAIL` times, where all cells but one hold much
more than `EXPECTED` (tests/evaluation/test_audit.py).

**Power.** If an error, of whatever kind, moves the probability e between the cells of every prompt (a total variation
of e), Pearson's statistic has at least the noncentrality 4 e^2 N, by the Cauchy-Schwarz inequality. So N samples see
every error of that size with the probability that is stated. Probabilities that are read differ from those that are
sampled by rounding: 1e-6 in total variation, a thousandth of what any affordable N could see.

**Not seen** are an error between continuations of one cell, which may hold most of a flat distribution, and an error
that begins at the third token. Mistakes in acceptance and residual are tested by `specsamp.evaluation.audit.rounds`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from scipy import optimize, stats

from specsamp.evaluation.audit.cells import EXPECTED, REST, Cells, Continuations
from specsamp.evaluation.audit.evidence import POWER
from specsamp.evaluation.audit.subject import Check, Status, Subject
from specsamp.evaluation.audit.teacher import next_logits
from specsamp.sampling.warp import for_rows, log_probs

FIRSTS = 24  # first tokens that may have a cell
CONTINUED = 12  # first tokens whose second tokens are read
TAIL = 14
MOST_SAMPLES = 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """Numbers of samples and cells, and the errors that they show.

    Attributes:
      cells: of each prompt whose continuations are left to chance.
      samples: number of samples for each prompt.
      detect: the error between cells that was asked for.
      false_alarm: probability, at most, that a sound pair fails.
      power: probability that an error of ``detect`` on every prompt is seen.
      detected_on_one: error that is seen with `POWER` if it is made on a single prompt, whichever that is.
    """

    cells: tuple[Cells, ...]
    samples: int
    detect: float
    false_alarm: float
    power: float
    detected_on_one: float

    @property
    def level(self) -> float:
        """Returns the level of a single test."""
        return level_of(self.false_alarm, len(self.cells))

    @property
    def degrees(self) -> int:
        """Returns the degrees of freedom of the test of all prompts together."""
        return sum(cells.degrees for cells in self.cells)


def level_of(false_alarm: float, prompts: int) -> float:
    """Returns the level of a single test: there is one for each prompt, and one for all if there are several."""
    return false_alarm / TAIL / (prompts + 1 if prompts > 1 else 1)


def power_of(error: float, samples: int, degrees: int, level: float) -> float:
    """Returns the power of Pearson's test at ``level``, on ``samples`` samples, against a total variation ``error``."""
    return float(stats.ncx2.sf(stats.chi2.isf(level, degrees), degrees, 4 * error**2 * samples))


def read_continuations(subject: Subject, prompt_ids: Sequence[int]) -> list[Continuations]:
    """Reads the target's distribution after some prompts: one call for the first tokens, one for the second ones."""
    probs_NV = _probs(subject, subject.prompt_logits[list(prompt_ids)])
    firsts = [np.argsort(-probs_V)[:FIRSTS] for probs_V in probs_NV]
    followed = [(i, int(x1)) for i, firsts_F in enumerate(firsts) for x1 in firsts_F[:CONTINUED] if probs_NV[i][x1] > 0]
    texts = [(*subject.prompts[prompt_ids[i]], x1) for i, x1 in followed]
    seconds = _probs(subject, next_logits(subject.pair, texts))
    found = []
    for i, (prompt_id, firsts_F) in enumerate(zip(prompt_ids, firsts, strict=True)):
        seconds_CV = seconds[[row for row, (prompt, _) in enumerate(followed) if prompt == i]]
        probs_F = probs_NV[i][firsts_F]
        joint_CV = probs_F[: len(seconds_CV), None] * seconds_CV
        found.append(Continuations(prompt_id=prompt_id, firsts_F=firsts_F, probs_F=probs_F, joint_CV=joint_CV))
    return found


def make_plan(
    prompts: Sequence[Continuations], *, detect: float, false_alarm: float, samples: int | None, multiple: int = 1
) -> SamplingPlan:
    """Returns how many samples see a total variation of ``detect`` between cells, and the cells.

    Args:
      prompts: the target's distribution after each prompt.
      detect: the total variation that must be seen with probability `POWER`.
      false_alarm: the probability, at most, that a sound pair fails.
      samples: number of samples in all; None draws as few as are needed.
      multiple: samples per prompt come in multiples of it.

    Raises:
      ValueError: too few samples, with the number that would do; or no prompt leaves anything to chance.
    """
    prompts = [one for one in prompts if one.cells(MOST_SAMPLES).degrees]
    if not prompts:
        raise ValueError(
            "the sampled distribution leaves nothing to chance (temperature 0?), so the check of it would be empty: "
            "set a temperature, or leave the check out"
        )
    level = level_of(false_alarm, len(prompts))

    def power(per_prompt: int) -> float:
        degrees = sum(one.cells(per_prompt).degrees for one in prompts)
        return power_of(detect, per_prompt * len(prompts), degrees, level) if degrees else 0.0

    needed = _fewest(lambda count: power(count) >= POWER)
    if needed is None:
        raise ValueError(f"to see an error of {detect} takes more than {MOST_SAMPLES} samples: ask for a larger one")
    needed = -(-needed // multiple) * multiple
    if samples is not None and samples < needed * len(prompts):
        raise ValueError(
            f"{samples} samples see a total-variation error of {detect} with "
            f"{power(max(samples // len(prompts), 1)):.0%} only: {needed * len(prompts)} are needed for {POWER:.0%}"
        )
    per_prompt = needed if samples is None else -(-samples // len(prompts) // multiple) * multiple
    cells = tuple(one.cells(per_prompt) for one in prompts)
    return SamplingPlan(
        cells=cells,
        samples=per_prompt,
        detect=detect,
        false_alarm=false_alarm,
        power=power(per_prompt),
        detected_on_one=max(detected(per_prompt, one.degrees, level) for one in cells),
    )


def detected(samples: int, degrees: int, level: float) -> float:
    """Returns the smallest total variation that is seen with `POWER`; 1 if none is."""
    if degrees == 0 or power_of(1.0, samples, degrees, level) < POWER:
        return 1.0
    return float(optimize.brentq(lambda error: power_of(error, samples, degrees, level) - POWER, 1e-9, 1.0))


def count_pairs(
    subject: Subject, plan: SamplingPlan, *, rows: int = 128, progress: Callable[[str], None] = lambda text: None
) -> Check:
    """Checks that sampled continuations fall into cells as often as expected.

    Args:
      subject: the pair, its prompts and settings.
      plan: what to sample.
      rows: number of samples that are drawn together.
      progress: is told how many are drawn.
    """
    drawn = draw(subject, [cells.prompt_id for cells in plan.cells], plan.samples, rows, progress)
    if any(len(pair) < 2 for samples in drawn for pair in samples):
        sentence = "texts ended before their second token: the target's logits were NaN or infinite"
        return Check(name="distribution", verdict=Status.FAILED, sentence=sentence, numbers={})
    counts = [cells.count(samples) for cells, samples in zip(plan.cells, drawn, strict=True)]
    statistics = [cells.statistic(counts_C) for cells, counts_C in zip(plan.cells, counts, strict=True)]
    p_all = float(stats.chi2.sf(sum(statistics), plan.degrees))
    p_single = [float(stats.chi2.sf(x, cells.degrees)) for x, cells in zip(statistics, plan.cells) if cells.degrees]
    failed = min(p_all, *p_single) < plan.level
    total = plan.samples * len(plan.cells)
    sentence = f"{total} samples of two tokens after {len(plan.cells)} prompts: chi-square {sum(statistics):.0f} on "
    sentence += f"{plan.degrees} degrees of freedom, p = {p_all:.2g}"
    if failed:
        sentence += f" (of the worst prompt {min(p_single):.2g}); {_worst(plan.cells, counts)}"
    rest = float(np.mean([cells.probs_C[REST] for cells in plan.cells]))
    numbers = {
        "samples": total,
        "prompts": len(plan.cells),
        "degrees": plan.degrees,
        "statistic": sum(statistics),
        "p_value": p_all,
        "p_value_of_the_worst_prompt": min(p_single),
        "level": plan.level,
        "power": plan.power,
        "detected_on_one_prompt": plan.detected_on_one,
        "share_in_the_rest": rest,
    }
    num_cells = sum(len(cells.probs_C) for cells in plan.cells)
    seen = f"any error of {plan.detect:g} between the {num_cells} cells of two tokens seen with {plan.power:.1%} "
    seen += f"({rest:.0%} of the probability lies in one cell)"
    verdict = Status.FAILED if failed else Status.PASSED
    return Check(name="distribution", verdict=verdict, sentence=sentence, numbers=numbers, seen=seen)


def draw(
    subject: Subject, prompt_ids: Sequence[int], samples: int, rows: int, progress: Callable[[str], None]
) -> list[list[tuple[int, ...]]]:
    """Returns the first two tokens of ``samples`` sampled texts for each prompt."""
    drawn: list[list[tuple[int, ...]]] = [[] for _ in prompt_ids]
    together, call = per_call(rows, len(prompt_ids)), 0
    while len(drawn[0]) < samples:
        progress(f"distribution: {len(drawn[0]) * len(drawn)} of {samples * len(drawn)} samples")
        # Every call has a seed of its own, or it would draw the same again.
        completions = subject.decode(
            [subject.prompts[i] for i in prompt_ids],
            prompt_ids=prompt_ids,
            max_new_tokens=2,
            stop=(),
            num_samples=together,
            seed=(subject.seed + 1 + call) % 2**32,
        )
        for completion in completions:
            drawn[completion.prompt_index].append(tuple(completion.tokens))
        call += 1
    return [pairs[:samples] for pairs in drawn]


def per_call(rows: int, prompts: int) -> int:
    """Returns how many samples of each prompt one call draws."""
    return max(rows // prompts, 1)


def _probs(subject: Subject, logits_NV: np.ndarray) -> np.ndarray:
    """Returns the warped distributions, float64 [N, V]."""
    warped_NV = log_probs(for_rows(subject.full_warp(subject.sampling), len(logits_NV)), logits_NV)
    probs_NV = np.exp(np.asarray(warped_NV, np.float64))
    return probs_NV / probs_NV.sum(-1, keepdims=True)


def _fewest(enough: Callable[[int], bool]) -> int | None:
    """Returns the fewest samples, up to a percent, for which ``enough`` holds; None if none do."""
    high = EXPECTED
    while not enough(high):
        high *= 2
        if high > MOST_SAMPLES:
            return None
    low = high // 2
    while high - low > max(high // 100, 1):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _worst(partitions: Sequence[Cells], counts: Sequence[np.ndarray]) -> str:
    """Describes the cell that is farthest off."""
    off = []
    for cells, counts_C in zip(partitions, counts, strict=True):
        terms_C = cells.terms(counts_C)
        cell = int(np.argmax(terms_C))
        expected = cells.probs_C[cell] * counts_C.sum()
        told = f"after prompt {cells.prompt_id}, {cells.name(cell)} came {counts_C[cell]} times, not {expected:.0f}"
        off.append((terms_C[cell], told))
    return max(off)[1]
