"""The sampled distribution against the target's: the first two tokens after a prompt, counted and compared by chi-square.

Expected are the target's own probabilities, read by teacher forcing. Cells of a prompt are its most probable pairs
(x1, x2), its most probable first tokens x1 with any other second one, and the rest: a partition of all continuations,
each cell expected at least `EXPECTED` times. One test for each prompt and one for all together share the false alarm;
its level allows for small counts: the tail of Pearson's statistic is heavier than the chi-square's, at a level of 1e-6
at most `TAIL` times, where all but one cell hold much more than `EXPECTED` (tests/evaluation/test_audit.py).

**Power.** Whatever the error: if it moves mass e between the cells of every prompt (a total variation of e), Pearson's
statistic has at least the noncentrality 4 e^2 N, by Cauchy and Schwarz. So N samples see every error of that size with
the probability given here. (Probabilities read here and there differ by rounding, 1e-6 in total variation: a
thousandth of what could be seen at any affordable N.)

**Not seen** are an error between continuations of one cell, and one that begins at the third token of a draft: a wrong
residual there, from which greedy and coupled texts never draw, is for the tests of the rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from scipy import optimize, stats

from specsamp.evaluation.audit.subject import Check, Subject, Verdict
from specsamp.evaluation.audit.teacher import next_logits
from specsamp.sampling.warp import for_rows, log_probs

FIRSTS, CONTINUED, PAIRS = 24, 12, 16  # first tokens with a cell, those whose followers are read, pairs with a cell
EXPECTED = 25  # counts per cell, at least
TAIL = 10
POWER = 0.99
MOST_SAMPLES = 10**9
REST = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continuations:
    """The target's distribution after one prompt, as far as it is read."""

    prompt_id: int
    firsts_F: np.ndarray  # the most probable tokens
    probs_F: np.ndarray  # float64
    joint_CV: np.ndarray  # of the first C of them and any second token

    def cells(self, samples: int) -> Cells:
        """The finest partition in which each cell is expected often enough."""
        smallest = EXPECTED / samples
        flat = np.argsort(-self.joint_CV, axis=None)[:PAIRS]
        index = {}
        cells = []
        for c, x2 in zip(*np.unravel_index(flat, self.joint_CV.shape)):
            cells.append(((int(self.firsts_F[c]), int(x2)), float(self.joint_CV[c, x2])))
        for x1, probability in zip(self.firsts_F.tolist(), self.probs_F.tolist()):
            cells.append(((x1, None), probability - sum(p for (first, _), p in cells if first == x1)))
        cells.sort(key=lambda cell: -cell[1])
        while cells and (cells[-1][1] < smallest or 1 - sum(p for _, p in cells) < smallest):
            index[cells.pop()[0]] = REST
        index |= {key: number for number, (key, _) in enumerate(cells, start=1)}
        probs = np.array([1 - sum(p for _, p in cells), *(p for _, p in cells)])
        return Cells(prompt_id=self.prompt_id, index=index, probs_C=probs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cells:
    """A partition of the continuations of one prompt; cell `REST` is what no other holds."""

    prompt_id: int
    index: dict[tuple[int, int | None], int]  # (x1, x2), or (x1, None): x1 and a second token that is not listed
    probs_C: np.ndarray

    @property
    def degrees(self) -> int:
        return len(self.probs_C) - 1

    def count(self, samples: Sequence[tuple[int, int]]) -> np.ndarray:
        """How many samples fell into each cell."""

        def cell(x1, x2):
            return self.index.get((x1, x2), self.index.get((x1, None), REST))

        return np.bincount([cell(x1, x2) for x1, x2 in samples], minlength=len(self.probs_C))

    def statistic(self, counts_C: np.ndarray) -> float:
        expected_C = self.probs_C * counts_C.sum()
        return float(((counts_C - expected_C) ** 2 / expected_C).sum())

    def name(self, cell: int) -> str:
        """For a reader."""
        if cell == REST:
            return "the rest"
        x1, x2 = next(key for key, number in self.index.items() if number == cell)
        return f"{x1} and another token" if x2 is None else f"{x1} {x2}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A test of the distribution that is worth running."""

    cells: tuple[Cells, ...]  # of each prompt that leaves a choice
    samples: int  # per prompt
    false_alarm: float
    power: float  # of seeing the error asked for, on every prompt
    detected_on_one: float  # the error on a single prompt, whichever, that is seen with `POWER`

    @property
    def level(self) -> float:
        """Of a single test."""
        return level_of(self.false_alarm, len(self.cells))

    @property
    def degrees(self) -> int:
        return sum(cells.degrees for cells in self.cells)


def level_of(false_alarm: float, prompts: int) -> float:
    """Of a single test: there is one for each prompt and one for all, and a single prompt is all."""
    return false_alarm / TAIL / (prompts + 1 if prompts > 1 else 1)


def power_of(error: float, samples: int, degrees: int, level: float) -> float:
    """Of Pearson's test at ``level`` on ``samples`` in all, against a total variation of ``error``."""
    return float(stats.ncx2.sf(stats.chi2.isf(level, degrees), degrees, 4 * error**2 * samples))


def continuations(subject: Subject, prompt_ids: Sequence[int]) -> list[Continuations]:
    """The target's distribution after some of the prompts: one call for the first tokens, one for what may follow them."""
    laws = _probs(subject, subject.prompt_logits[list(prompt_ids)])
    firsts = [np.argsort(-law_V)[:FIRSTS] for law_V in laws]
    followed = [(i, int(x1)) for i, firsts_F in enumerate(firsts) for x1 in firsts_F[:CONTINUED] if laws[i][x1] > 0]
    texts = [(*subject.prompts[prompt_ids[i]], x1) for i, x1 in followed]
    seconds = _probs(subject, next_logits(subject.pair, texts))
    found = []
    for i, (prompt_id, firsts_F) in enumerate(zip(prompt_ids, firsts, strict=True)):
        seconds_CV = seconds[[row for row, (prompt, _) in enumerate(followed) if prompt == i]]
        probs_F = laws[i][firsts_F]
        joint_CV = probs_F[: len(seconds_CV), None] * seconds_CV
        found.append(Continuations(prompt_id=prompt_id, firsts_F=firsts_F, probs_F=probs_F, joint_CV=joint_CV))
    return found


def make_plan(
    laws: Sequence[Continuations], *, detect: float, false_alarm: float, samples: int | None, multiple: int = 1
) -> Plan:
    """How many samples see a total variation of ``detect``, and what they are sorted into.

    Args:
      samples: in all; None draws as few as are needed.
      multiple: samples per prompt come in multiples of it.

    Raises:
      ValueError: too few samples, with the number that would do; distributions that leave nothing to chance.
    """
    laws = [law for law in laws if law.cells(MOST_SAMPLES).degrees]
    if not laws:
        raise ValueError(
            "the sampled law leaves nothing to chance (temperature 0?), so the check of it would be empty: set a "
            "temperature, or leave the check out"
        )
    level = level_of(false_alarm, len(laws))

    def power(per_prompt: int) -> float:
        degrees = sum(law.cells(per_prompt).degrees for law in laws)
        return power_of(detect, per_prompt * len(laws), degrees, level) if degrees else 0.0

    needed = _fewest(lambda count: power(count) >= POWER)
    if needed is None:
        raise ValueError(f"to see an error of {detect} takes more than {MOST_SAMPLES} samples: ask for a larger one")
    needed = -(-needed // multiple) * multiple
    if samples is not None and samples < needed * len(laws):
        raise ValueError(
            f"{samples} samples see a total-variation error of {detect} with {power(max(samples // len(laws), 1)):.0%} "
            f"only: {needed * len(laws)} are needed for {POWER:.0%}"
        )
    per_prompt = needed if samples is None else -(-samples // len(laws) // multiple) * multiple
    cells = tuple(law.cells(per_prompt) for law in laws)
    return Plan(
        cells=cells,
        samples=per_prompt,
        false_alarm=false_alarm,
        power=power(per_prompt),
        detected_on_one=max(detected(per_prompt, one.degrees, level) for one in cells),
    )


def detected(samples: int, degrees: int, level: float) -> float:
    """The smallest total variation that is seen with `POWER`; 1 if none is."""
    if degrees == 0 or power_of(1.0, samples, degrees, level) < POWER:
        return 1.0
    return float(optimize.brentq(lambda error: power_of(error, samples, degrees, level) - POWER, 1e-9, 1.0))


def sampled_law(
    subject: Subject, plan: Plan, *, rows: int = 128, progress: Callable[[str], None] = lambda text: None
) -> Check:
    """Draws ``plan.samples`` continuations of each prompt, ``rows`` at a time, and counts."""
    drawn = draw(subject, [cells.prompt_id for cells in plan.cells], plan.samples, rows, progress)
    if any(len(pair) < 2 for samples in drawn for pair in samples):
        sentence = "texts ended before their second token: the target's logits were no law (NaN or inf)"
        return Check(name="law", verdict=Verdict.FAILED, sentence=sentence, numbers={})
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
        "share_in_the_rest": float(np.mean([cells.probs_C[REST] for cells in plan.cells])),
    }
    return Check(name="law", verdict=Verdict.FAILED if failed else Verdict.PASSED, sentence=sentence, numbers=numbers)


def draw(
    subject: Subject, prompt_ids: Sequence[int], samples: int, rows: int, progress: Callable[[str], None]
) -> list[list[tuple[int, ...]]]:
    """The first two tokens of ``samples`` texts for each prompt."""
    drawn: list[list[tuple[int, ...]]] = [[] for _ in prompt_ids]
    together, call = per_call(rows, len(prompt_ids)), 0
    while len(drawn[0]) < samples:
        progress(f"law: {len(drawn[0]) * len(drawn)} of {samples * len(drawn)} samples")
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
    """Samples of each prompt that one call draws."""
    return max(rows // prompts, 1)


def _probs(subject: Subject, logits_NV: np.ndarray) -> np.ndarray:
    """The warped distributions, float64."""
    warped_NV = log_probs(for_rows(subject.law(subject.sampling), len(logits_NV)), logits_NV)
    probs_NV = np.exp(np.asarray(warped_NV, np.float64))
    return probs_NV / probs_NV.sum(-1, keepdims=True)


def _fewest(enough: Callable[[int], bool]) -> int | None:
    """The fewest samples, up to a percent, for which ``enough`` holds; None if none do."""
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
    """The cell that is farthest off, in words."""
    off = []
    for cells, counts_C in zip(partitions, counts, strict=True):
        expected_C = cells.probs_C * counts_C.sum()
        cell = int(np.argmax((counts_C - expected_C) ** 2 / expected_C))
        far = (counts_C[cell] - expected_C[cell]) ** 2 / expected_C[cell]
        off.append(
            (
                far,
                f"after prompt {cells.prompt_id}, {cells.name(cell)} came {counts_C[cell]} times, not "
                f"{expected_C[cell]:.0f}",
            )
        )
    return max(off)[1]
