"""Runs all checks of a pair; together they fail a sound pair with at most one stated probability."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from specsamp.evaluation.audit import budget, distribution, rounds, streams, verdicts
from specsamp.evaluation.audit.subject import Check, Status, Subject
from specsamp.sampling.rejection import TokenRule

CHECKS = {
    "greedy": "greedy text is what the target writes alone",
    "bfloat16": "in bfloat16 every greedy token is the target's choice, or nearly",
    "coupled": "under the coupled rule a seed's text does not depend on the draft",
    "distribution": "samples follow the target's distribution",
    "acceptance": "drafted tokens are accepted as often as both models say, always where the draft is the target",
    "neighbours": "a text does not depend on what else is in its batch",
    "padding": "a text does not depend on padding",
}
ROUNDED = ("acceptance", "neighbours", "padding")  # rounding may show in these, as a matter of chance
UNREADABLE = "errors within a cell are not looked for: only a draft model has a distribution that can be read"


class BrokenOff(RuntimeError):
    """A check could not be carried to its end; ``found`` holds those before it."""

    def __init__(self, message: str, found: Audit):
        super().__init__(message)
        self.found = found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of an audit: what to check and how closely.

    Attributes:
      checks: names of `CHECKS`.
      detect: total-variation error that must be seen with a probability of 99%: any error between the cells of
        `specsamp.evaluation.audit.distribution`, and each named mistake of `specsamp.evaluation.audit.mistakes`.
      samples: number of samples of two tokens in all; None draws as many as ``detect`` takes.
      false_alarm: probability, at most, that a sound pair fails.
      distribution_prompts: number of prompts, evenly spaced, after which two tokens are sampled.
      rows: number of samples that are drawn together.

    Raises:
      ValueError: an unknown check, or a number out of range.
    """

    checks: tuple[str, ...] = tuple(CHECKS)
    detect: float = 0.05
    samples: int | None = None
    false_alarm: float = 1e-4
    distribution_prompts: int = 4
    rows: int = 128

    def __post_init__(self):
        for name in self.checks:
            if name not in CHECKS:
                raise ValueError(f"no check {name!r}: choose from {', '.join(CHECKS)}")
        if not self.checks:
            raise ValueError(f"no checks were asked for: choose from {', '.join(CHECKS)}")
        for name in ("detect", "false_alarm"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in (0, 1); got {getattr(self, name)!r}")
        for name in ("samples", "distribution_prompts", "rows"):
            value = getattr(self, name)
            if not (name == "samples" and value is None or isinstance(value, int) and value >= 1):
                raise ValueError(f"{name} must be an integer >= 1; got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """Results of all checks, with the settings that they ran with."""

    settings: Settings
    checks: tuple[Check, ...]
    budget: float | None = None  # of a lossy rule: total variation per token

    def named(self, verdict: Status) -> list[str]:
        """Returns the names of the checks with this verdict."""
        return [check.name for check in self.checks if check.verdict == verdict]

    @property
    def passed(self) -> bool:
        """Returns whether at least one check passed and none failed."""
        return not self.named(Status.FAILED) and bool(self.named(Status.PASSED))

    @property
    def summary(self) -> str:
        """Returns one line: what failed, or which errors would have been seen."""
        passed, failed, skipped = map(self.named, (Status.PASSED, Status.FAILED, Status.NOT_APPLICABLE))
        aside = f" ({', '.join(skipped)} not applicable)" if skipped else ""
        total = len(passed) + len(failed)
        if failed or not passed:
            told = f": {', '.join(failed)}" if failed else ", nothing was shown"
            return f"{len(failed)} of {total} checks failed{aside}{told}"
        seen = "".join(f"; {check.seen}" for check in self.checks if check.name == "distribution")
        found, alarm = "no difference was found", f"{self.settings.false_alarm:g}"
        if self.budget is not None:
            found = f"LOSSY: no more than its budget of {self.budget:g} per token was found"
            alarm = f"{budget.LEVEL:g} for the budget, {alarm} for the rest"
        return (
            f"{len(passed)} of {total} checks passed{aside}: {found} between what this pair writes "
            f"with the draft and what its target writes alone{seen}; chance of a false alarm {alarm}"
        )


def audit(
    subject: Subject, settings: Settings = Settings(), progress: Callable[[str], None] = lambda text: None
) -> Audit:
    """Runs the checks, in float32 but for the check of bfloat16.

    Half of the false alarm goes to the check of the distribution, half to those of `ROUNDED` in equal parts. The others
    raise none. Where `specsamp.evaluation.audit.rounds` can read the draft, its tests take half of a check's part.

    A lossy rule is held to its budget, see `specsamp.evaluation.audit.budget`, and its drafter to what the token rule
    would accept of it.

    Args:
      subject: the pair, its prompts and settings.
      settings: what to check.
      progress: is told what is being done.

    Raises:
      ValueError: too few samples, a distribution that leaves nothing to chance, or a lossy rule without a budget; raised
        before any check has run.
      BrokenOff: a value within a check was refused: the checks before it stand, nothing else is known of the pair.
    """
    allowed = budget.budget_of(subject.rule)
    exact = subject.cast("float32") or subject
    progress("reading the prompts")
    parts = 2 if rounds.can_read(exact) and allowed is None else 1
    alarm = settings.false_alarm / 2 / parts
    rounding_alarm = alarm / len(ROUNDED)
    plan = plan_of(exact, settings, alarm) if "distribution" in settings.checks else None

    @functools.cache  # two checks read the same texts
    def read_rounds() -> rounds.Rounds | None:
        level = verdicts.mistake_level(alarm)
        return rounds.collect(exact, detect=settings.detect, level=level, rows=settings.rows, progress=progress)

    def distribution_check() -> Check:
        if allowed is not None:
            return budget.within_budget(exact, plan, allowed, rows=settings.rows, progress=progress)
        check = distribution.count_pairs(exact, plan, rows=settings.rows, progress=progress)
        if not rounds.can_read(exact):
            return dataclasses.replace(check, seen=f"{check.seen}; {UNREADABLE}")
        return verdicts.both(check, verdicts.no_mistakes(read_rounds(), detect=settings.detect, false_alarm=alarm))

    def acceptance_check() -> Check:
        if allowed is not None:
            return streams.equal_draft(dataclasses.replace(exact, rule=TokenRule()), rounding_alarm)
        check = streams.equal_draft(exact, rounding_alarm)
        if not (rounds.can_read(exact) and rounds.knows_acceptance(exact)):
            return check
        return verdicts.both(check, verdicts.expected_acceptance(read_rounds(), false_alarm=rounding_alarm))

    run: dict[str, Callable[[], Check]] = {
        "greedy": lambda: streams.greedy_text(exact),
        "bfloat16": lambda: streams.bfloat16_text(exact, subject.cast("bfloat16")),
        "coupled": lambda: streams.coupled_text(exact),
        "distribution": distribution_check,
        "acceptance": acceptance_check,
        "neighbours": lambda: streams.neighbours(exact, parts * rounding_alarm),
        "padding": lambda: streams.padding(exact, parts * rounding_alarm),
    }
    checks = []
    for name, claim in CHECKS.items():
        if name in settings.checks:
            progress(f"{name}: {claim}")
            try:
                checks.append(run[name]())
            except ValueError as error:  # what was asked for has been checked by now
                found = Audit(settings=settings, checks=tuple(checks), budget=allowed)
                raise BrokenOff(f"the check {name!r} broke off: {error}", found) from error
    return Audit(settings=settings, checks=tuple(checks), budget=allowed)


def plan_of(subject: Subject, settings: Settings, false_alarm: float) -> distribution.SamplingPlan:
    """Returns what the pairs of tokens are counted with, see `distribution.make_plan`."""
    count = min(settings.distribution_prompts, len(subject.prompts))
    prompt_ids = [i * len(subject.prompts) // count for i in range(count)]
    return distribution.make_plan(
        distribution.read_continuations(subject, prompt_ids),
        detect=settings.detect,
        false_alarm=false_alarm,
        samples=settings.samples,
        multiple=distribution.per_call(settings.rows, count),
    )
