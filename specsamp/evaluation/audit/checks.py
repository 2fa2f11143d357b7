"""Runs all checks of a pair, with one bound on the probability that a correct pair fails any of
them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specsamp import validate
from specsamp.analysis.report import Say, Table, silent
from specsamp.evaluation.audit import distribution, round_evidence, streams
from specsamp.evaluation.audit.subject import Check, Status, Subject
from specsamp.sampling.lossy import Bounded
from specsamp.sampling.rejection import TokenRule
from specsamp.sampling.rules import Rule

CHECKS = {
    "greedy": "greedy text is the text of the target alone",
    "bfloat16": "in bfloat16 every greedy token is the target's choice, or nearly",
    "coupled": "under the coupled rule a seed's text does not depend on the draft",
    "distribution": "samples follow the target's distribution, up to the budget of a lossy rule",
    "acceptance": "drafted tokens are accepted as often as both models say, "
    "always where the draft is the target",
    "neighbours": "a text does not depend on the rest of its batch",
    "padding": "a text does not depend on padding",
}
# Tests that may fail by chance: pairs of tokens, ratios, two of acceptance, neighbours, padding.
CHANCES = 6
UNREADABLE = (
    "errors within a cell are not searched for: only a draft model has a distribution that can be "
    "read"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of an audit: the checks and their sensitivity.

    Attributes:
      checks: names of `CHECKS`.
      detect: total-variation error that must be detected with a probability of 99%: any error
        between the cells of `specsamp.evaluation.audit.distribution`, and across the ratios of
        `specsamp.evaluation.audit.round_evidence`.
      false_alarm: largest probability that a correct pair fails.
      distribution_prompts: number of prompts, evenly spaced, after which two tokens are sampled.
      rows: number of samples that are drawn together.
    """

    checks: tuple[str, ...] = tuple(CHECKS)
    detect: float = 0.05
    false_alarm: float = 1e-4
    distribution_prompts: int = 4
    rows: int = 128

    def __post_init__(self):
        if not self.checks or isinstance(self.checks, str):
            raise ValueError(f"checks must be a tuple of {', '.join(CHECKS)}; got {self.checks!r}")
        for name in self.checks:
            validate.choice("checks", name, CHECKS)
        validate.number("detect", self.detect, 0.001, 0.99)
        validate.number("false_alarm", self.false_alarm, 0, 0.99, above=True)
        for name in ("distribution_prompts", "rows"):
            validate.integer(name, getattr(self, name), 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """Results of all checks, with their settings."""

    settings: Settings
    checks: tuple[Check, ...]
    budget: float | None = None  # total variation per token of a lossy rule

    def named(self, verdict: Status) -> list[str]:
        """Returns the names of the checks with this verdict."""
        return [check.name for check in self.checks if check.verdict == verdict]

    @property
    def passed(self) -> bool:
        """Returns whether at least one check passed and none failed."""
        return not self.named(Status.FAILED) and bool(self.named(Status.PASSED))

    @property
    def summary(self) -> str:
        """Returns a line with the checks that failed, or with the errors that would have
        been seen.
        """
        passed, failed, skipped = map(self.named, Status)
        aside = f" ({', '.join(skipped)} not applicable)" if skipped else ""
        total = len(passed) + len(failed)
        if failed or not passed:
            names = f": {', '.join(failed)}" if failed else ", nothing was shown"
            return f"{len(failed)} of {total} checks failed{aside}{names}"
        seen = "".join(f"; {check.seen}" for check in self.checks if check.name == "distribution")
        found = "no difference was found"
        if self.budget is not None:
            found = f"LOSSY: no more than its budget of {self.budget:g} per token was found"
        return (
            f"{len(passed)} of {total} checks passed{aside}: {found} between this pair's texts "
            f"with the draft and the texts of its target alone{seen}; chance of a false alarm "
            f"{self.settings.false_alarm:g}"
        )


def audit(
    subject: Subject,
    settings: Settings = Settings(),
    progress: Say = silent,
) -> Audit:
    """Runs the checks, in float32 except for the check of bfloat16. A check that raises ValueError
    has failed.

    A lossy rule is tested against its budget, and its drafter against the acceptance under the
    token rule.

    Args:
      subject: the pair, its prompts and settings.
      settings: the checks and their sensitivity.
      progress: called with the work that begins.

    Raises:
      ValueError: before the first check, for a deterministic distribution or a lossy rule without a
        budget.
    """
    budget = budget_of(subject.method.rule)
    exact = subject.cast("float32") or subject
    level = settings.false_alarm / CHANCES
    is_readable = budget is None and round_evidence.can_read(exact)
    progress("reading the prompts")
    if "distribution" in settings.checks:
        total = len(exact.prompts)
        count = min(settings.distribution_prompts, total)
        cells = distribution.read_cells(exact, [i * total // count for i in range(count)])

    @functools.cache
    def sampled():
        return round_evidence.collect(
            exact, detect=settings.detect, false_alarm=level, rows=settings.rows, progress=progress
        )

    def check_distribution():
        check = distribution.count_pairs(
            exact,
            cells,
            level=level,
            detect=settings.detect,
            allowed=distribution.TOKENS * (budget or 0.0),
            rows=settings.rows,
            progress=progress,
        )
        if is_readable:
            return check & round_evidence.expected_ratios(
                sampled(), detect=settings.detect, false_alarm=level
            )
        if budget is not None:
            return check
        return dataclasses.replace(check, seen=f"{check.seen}; {UNREADABLE}")

    def check_acceptance():
        method = exact.method
        by_token = method if budget is None else dataclasses.replace(method, rule=TokenRule())
        check = streams.equal_draft(dataclasses.replace(exact, method=by_token), level)
        if not (is_readable and isinstance(method.rule, TokenRule)):
            return check
        return check & round_evidence.expected_acceptance(sampled(), false_alarm=level)

    run: dict[str, Callable[[], Check]] = {
        "greedy": lambda: streams.greedy_text(exact),
        "bfloat16": lambda: streams.bfloat16_text(exact, subject.cast("bfloat16")),
        "coupled": lambda: streams.coupled_text(exact),
        "distribution": check_distribution,
        "acceptance": check_acceptance,
        "neighbours": lambda: streams.neighbours(exact, level),
        "padding": lambda: streams.padding(exact, level),
    }
    checks = []
    for name in filter(settings.checks.__contains__, CHECKS):
        progress(f"{name}: {CHECKS[name]}")
        try:
            check = run[name]()
        except ValueError as error:
            check = Check.tested(name, True, f"the check ended early: {error}")
        checks.append(check)
    return Audit(settings=settings, checks=tuple(checks), budget=budget)


def budget_of(rule: Rule) -> float | None:
    """Returns the budget of a lossy rule, a total variation per token; None for a rule that claims
    to be exact.

    Raises:
      ValueError: the rule is lossy and has no budget.
    """
    if rule.metered and not isinstance(rule, Bounded):
        raise ValueError(
            f"{rule!r} is lossy and has no budget that could be audited: give it a budget, such as "
            "rule = bounded:0.01:ears:1.0, or audit an exact rule"
        )
    return rule.tv_per_token if rule.metered else None


def audit_table(checks: Sequence[Mapping[str, Any]], *, claims: bool = False) -> Table:
    """Returns a row for each check: its verdict and the observations behind it.

    Args:
      checks: the checks in JSON form.
      claims: adds a column of the claims, and to the note the errors that would have been seen.
    """
    rows = []
    notes = [
        "near-tie: the target would choose that token if rounding changed the logits that it "
        "computes when it reads the whole text at once"
    ]
    for check in checks:
        row = {"check": check["name"], "verdict": check["verdict"]}
        if claims:
            row["claim"] = CHECKS[check["name"]]
            notes += [f"{check['name']}: {check['seen']}"] if check["seen"] else []
        rows.append(row | {"what was seen": check["sentence"]})
    title = "Exactness audit: with the draft against the target alone"
    return Table.of(title, rows, note="; ".join(notes), left=len(rows[0]))
