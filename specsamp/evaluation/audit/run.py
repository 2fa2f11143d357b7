"""All checks of a pair, in one run and with one chance of a false alarm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from specsamp.evaluation.audit import law, streams
from specsamp.evaluation.audit.subject import Check, Subject, Verdict

CHECKS = {
    "greedy": "greedy text is what the target writes alone",
    "bfloat16": "in bfloat16 every greedy token is the target's choice, or nearly",
    "coupled": "under the coupled rule a seed's text does not depend on the draft",
    "law": "samples follow the target's law",
    "acceptance": "a draft equal to the target is always accepted",
    "neighbours": "a text does not depend on what else is in its batch",
    "padding": "nor on padding",
}
ROUNDED = ("acceptance", "neighbours", "padding")  # how often rounding may show there is a matter of chance, too


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How much to look at.

    Attributes:
      checks: names of `CHECKS`.
      detect: the total-variation error of the sampled distribution that must be seen with a chance of 99%.
      samples: in all, for the sampled distribution; None: as many as that takes.
      false_alarm: the chance, at most, that a sound pair fails.
      law_prompts: prompts whose distribution is sampled, evenly spaced.
      rows: samples drawn together.

    Raises:
      ValueError: an unknown check or a number out of range.
    """

    checks: tuple[str, ...] = tuple(CHECKS)
    detect: float = 0.05
    samples: int | None = None
    false_alarm: float = 1e-4
    law_prompts: int = 4
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
        for name in ("samples", "law_prompts", "rows"):
            value = getattr(self, name)
            if not (name == "samples" and value is None or isinstance(value, int) and value >= 1):
                raise ValueError(f"{name} must be an integer >= 1; got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """What `audit` returns."""

    settings: Settings
    checks: tuple[Check, ...]

    def named(self, verdict: Verdict) -> list[str]:
        """The checks with this verdict."""
        return [check.name for check in self.checks if check.verdict == verdict]

    @property
    def passed(self) -> bool:
        """No check failed, and one passed."""
        return not self.named(Verdict.FAILED) and bool(self.named(Verdict.PASSED))

    @property
    def summary(self) -> str:
        """One line."""
        good, bad, neither = map(self.named, (Verdict.PASSED, Verdict.FAILED, Verdict.NOT_APPLICABLE))
        aside = f" ({', '.join(neither)} not applicable)" if neither else ""
        judged = len(good) + len(bad)
        if bad or not good:
            what = f": {', '.join(bad)}" if bad else ", nothing was proved"
            return f"{len(bad)} of {judged} checks failed{aside}{what}"
        law_check = next((check for check in self.checks if check.name == "law" and check.name in good), None)
        seen = ""
        if law_check:
            power = law_check.numbers["power"]
            seen = f"; an error of {self.settings.detect:g} in the law of two tokens would be seen with {power:.1%}"
        return (
            f"{len(good)} of {judged} checks passed{aside}: with the draft this pair writes what its target writes"
            f"{seen}; chance of a false alarm {self.settings.false_alarm:g}"
        )


def audit(
    subject: Subject, settings: Settings = Settings(), progress: Callable[[str], None] = lambda text: None
) -> Audit:
    """Runs the checks, in float32 but for the one that says otherwise.

    Raises:
      ValueError: what is asked for cannot be had (too few samples, a distribution without chance); before any check has run.
      RuntimeError: a check broke off, for whatever reason: nothing is known of the pair.
    """
    exact = subject.cast("float32") or subject
    progress("reading the prompts")
    alarm = settings.false_alarm / 2
    plan = plan_of(exact, settings, alarm) if "law" in settings.checks else None
    rounding = alarm / len(ROUNDED)
    run: dict[str, Callable[[], Check]] = {
        "greedy": lambda: streams.greedy_text(exact),
        "bfloat16": lambda: streams.bfloat16_text(exact, subject.cast("bfloat16")),
        "coupled": lambda: streams.coupled_text(exact),
        "law": lambda: law.sampled_law(exact, plan, rows=settings.rows, progress=progress),
        "acceptance": lambda: streams.equal_draft(exact, rounding),
        "neighbours": lambda: streams.neighbours(exact, rounding),
        "padding": lambda: streams.padding(exact, rounding),
    }
    checks = []
    for name in CHECKS:
        if name in settings.checks:
            progress(f"{name}: {CHECKS[name]}")
            try:
                checks.append(run[name]())
            except ValueError as error:  # not of what was asked for, which is checked by now
                raise RuntimeError(f"the check {name!r} broke off") from error
    return Audit(settings=settings, checks=tuple(checks))


def plan_of(subject: Subject, settings: Settings, false_alarm: float) -> law.Plan:
    """What the sampled distribution is tested with, see `law.make_plan`."""
    count = min(settings.law_prompts, len(subject.prompts))
    prompt_ids = [i * len(subject.prompts) // count for i in range(count)]
    return law.make_plan(
        law.continuations(subject, prompt_ids),
        detect=settings.detect,
        false_alarm=false_alarm,
        samples=settings.samples,
        multiple=law.per_call(settings.rows, count),
    )
