"""Two checks of the texts that both models read: which distribution tokens follow, and how often they are accepted.

The tests for mistakes and for ratio bins share the false alarm of the first check, those of positions that of the
second.
"""

from __future__ import annotations

import numpy as np

from specsamp.evaluation.audit.evidence import POWER, TILTS, Evidence
from specsamp.evaluation.audit.mistakes import MISTAKES
from specsamp.evaluation.audit.rounds import BIN_EDGES, Rounds
from specsamp.evaluation.audit.subject import Check, Status

NOTHING_EMITTED = "texts ended before their first token: the target's logits were NaN or infinite"


def mistake_level(false_alarm: float) -> float:
    """Returns the level of a single test for a mistake or a ratio bin."""
    return false_alarm / (len(MISTAKES) + len(BIN_EDGES) + 1)


def no_mistakes(found: Rounds | None, *, detect: float, false_alarm: float) -> Check:
    """Checks that neither a named mistake nor a change of a ratio bin explains the texts better than the target does.

    Args:
      found: the evidence; None if no text has a token.
      detect: smallest total variation that is to be seen.
      false_alarm: probability, at most, that this check fails a sound pair.
    """
    if found is None:
        return Check(name="distribution", verdict=Status.FAILED, sentence=NOTHING_EMITTED, numbers={})
    level, tests = mistake_level(false_alarm), found.mistakes
    power_M, moved_M = tests.power(level)[:, 0], tests.total_variation[:, 0]
    name, p_value = _smallest(tests, found.bins)
    numbers = {"texts": found.texts, "tested_tokens": int(tests.tokens_T[0])}
    numbers |= {"level_of_a_mistake": level, "p_value_of_the_ratio_bins": float(found.bins.p_values.min())}
    for i, mistake in enumerate(tests.names):
        key = mistake.replace(" ", "_").replace("-", "_")
        numbers |= {f"p_value_{key}": float(tests.p_values[i]), f"power_{key}": float(power_M[i])}
        numbers |= {f"moved_by_{key}": float(moved_M[i])}

    def said(chosen_M):
        return ", ".join(f"{tests.names[i]} ({moved_M[i]:.2g})" for i in np.flatnonzero(chosen_M))

    sure_M, matters_M = power_M >= POWER, moved_M >= detect
    seen = f"mistakes seen with at least {POWER:.0%}, and the probability they move per token: {said(sure_M) or 'none'}"
    for words, chosen_M in (("NOT SURELY SEEN", ~sure_M & matters_M), ("too small here", ~sure_M & ~matters_M)):
        seen += f"; {words}: {said(chosen_M)}" if chosen_M.any() else ""
    sentence = f"of {len(tests.names)} mistakes and {len(found.bins.names)} ratio bins in {found.texts} texts the "
    sentence += f"likeliest is {name}, p = {p_value:.2g}"
    verdict = Status.FAILED if p_value < level else Status.PASSED
    return Check(name="distribution", verdict=verdict, sentence=sentence, numbers=numbers, seen=seen)


def expected_acceptance(found: Rounds | None, *, false_alarm: float) -> Check:
    """Checks that each position of a draft is accepted as often as the two models say; arguments as above."""
    if found is None:
        return Check(name="acceptance", verdict=Status.FAILED, sentence=NOTHING_EMITTED, numbers={})
    tests, level = found.positions, false_alarm / len(found.positions.names)
    name, p_value = _smallest(tests)
    tilts = np.flatnonzero(np.array(TILTS) > 0)
    power_TS, moved_TS = tests.power(level)[:, tilts], tests.total_variation[:, tilts]
    numbers = {"p_value_of_the_worst_position": p_value}
    for i, position in enumerate(tests.names):
        key = position.replace(" ", "_")
        numbers[f"verified_at_{key}"] = int(tests.tokens_T[i])
        numbers[f"accepted_at_{key}"] = int(found.accepted_T[i])
        numbers[f"expected_at_{key}"] = float(found.expected_T[i])
        numbers[f"change_seen_at_{key}"] = float(moved_TS[i][power_TS[i] >= POWER].min(initial=1.0))
    sentence = f"with the draft {found.accepted_T[0]} of {tests.tokens_T[0]} were, {found.expected_T[0]:.0f} expected; "
    sentence += f"of {len(tests.names)} tests the farthest off is that of {name}, p = {p_value:.2g}"
    verdict = Status.FAILED if p_value < level else Status.PASSED
    seen = f"a rate of acceptance that is off by {numbers['change_seen_at_all_positions']:.2g} seen with {POWER:.0%}"
    return Check(name="acceptance", verdict=verdict, sentence=sentence, numbers=numbers, seen=seen)


def both(first: Check, second: Check) -> Check:
    """Joins two parts of one check: it fails if either does, and passes if one does and the other does not apply."""
    verdicts = (first.verdict, second.verdict)
    worst = next(verdict for verdict in (Status.FAILED, Status.PASSED, Status.NOT_APPLICABLE) if verdict in verdicts)
    return Check(
        name=first.name,
        verdict=worst,
        sentence="; ".join((first.sentence, second.sentence)),
        numbers=first.numbers | second.numbers,
        seen="; ".join(filter(None, (first.seen, second.seen))),
    )


def _smallest(*tests: Evidence) -> tuple[str, float]:
    """Returns the test with the smallest p-value."""
    values = [(float(p_value), name) for one in tests for name, p_value in zip(one.names, one.p_values, strict=True)]
    p_value, name = min(values)
    return name, p_value
