"""The table of an audit, for its console and for pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specsamp.analysis.report import Table
from specsamp.evaluation.audit.run import CHECKS


def audit_table(checks: Sequence[Mapping[str, Any]], *, claims: bool = False) -> Table:
    """Returns a row for each check: its verdict, and what that rests on.

    Args:
      checks: as JSON has them.
      claims: also what each check claims, and in the note what it can see.
    """
    header = ("check", "verdict", *["claim"][:claims], "what was seen")
    rows = [
        (check["name"], check["verdict"], *[check.get("claim") or CHECKS[check["name"]]][:claims], check["sentence"])
        for check in checks
    ]
    notes = [
        "near-tie: the target would choose that token for some logits within rounding of those it has when it reads "
        "the whole text at once"
    ]
    notes += [f"{check['name']}: {check['seen']}" for check in checks if claims and check["seen"]]
    for check in checks:
        if claims and "detected_on_one_prompt" in check["numbers"]:
            error = check["numbers"]["detected_on_one_prompt"]
            notes.append(f"between the cells of a single prompt an error of {error:.2g} is seen with 99%")
    title = "Exactness audit: with the draft against the target alone"
    return Table(title=title, header=header, rows=rows, note="; ".join(notes), left=len(header))
