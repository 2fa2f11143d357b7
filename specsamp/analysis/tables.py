"""Grids, agreements and sweeps as tables; `specsamp.analysis.report` has the tables of one cell, and prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from specsamp.analysis.agreement import Agreement
from specsamp.analysis.grid import describe, law_of
from specsamp.analysis.report import Table, band, spread, with_error
from specsamp.analysis.spread import Spread
from specsamp.evaluation.audit import CHECKS, Audit


def grid_table(title: str, cells: Iterable[Mapping[str, Any]]) -> Table:
    """One row for each cell of a file of `specsamp.analysis.grid`; the quickest of each distribution and batch is starred."""
    cells = list(cells)

    def law(cell):
        return (law_of(cell["key"]), cell["key"]["batch"])

    best: dict[tuple, float] = {}
    for cell in cells:
        if "result" in cell:
            ratio = cell["result"]["speedup"]["median"]
            best[law(cell)] = max(best.get(law(cell), 0.0), ratio)

    def row(cell: Mapping[str, Any]) -> tuple[str, ...]:
        if "result" not in cell:
            return describe(cell["key"]), "out of memory", *[""] * 8
        result = cell["result"]

        def show(value, unit=""):
            return "" if value is None else spread(Spread(**value), unit)

        plain, drafted, counts = result["autoregressive"], result["speculative"], result["acceptance"]
        split, star = result["split"], " *" if result["speedup"]["median"] == best[law(cell)] else ""
        parts = ""
        if split is not None:
            parts = " + ".join(f"{split[name]['ms']['median']:.2g}" for name in ("draft", "score", "verify"))
        return (
            describe(cell["key"]) + star,
            show(plain["ms_per_token"]),
            show(drafted["ms_per_token"]),
            show(result["speedup"], "x"),
            with_error(counts["rate"], counts["rate_error"]),
            f"{counts['emitted_per_round']:.2f}",
            parts,
            f"{drafted['token_ms']['p50']:.2g}, {drafted['token_ms']['p99']:.2g}",
            f"{drafted['prefill_ms']['median']:.3g}",
            show(result["streaming_share"], "%"),
        )

    return Table(
        title=title,
        header=(
            "",
            "plain, ms per token",
            "drafted",
            "speedup",
            "acceptance",
            "per round",
            "draft + score + verify, ms",
            "a token: p50, p99",
            "prefill, ms",
            "streaming",
        ),
        rows=[row(cell) for cell in cells],
        note="median ± half the distance of the quartiles; acceptance ± standard error, of judged tokens; ms per token "
        "over all rows, a token's own ms with rounds waited for one by one; streaming: weights per second of a plain "
        "round, of what the device reached with one matrix of that size; * is the best of its law and batch",
    )


def agreement_table(where: str, found: Agreement, allowed: float) -> Table:
    """One row for each draft length that was forecast and measured."""

    def percent(share):
        return f"{share:+.1%}"

    rows = [
        (
            f"K = {check.draft_length}{' (fitted)' if check.cost_was_fitted else ''}",
            band(check.forecast),
            f"{check.measured:.3g}",
            percent(check.error),
            percent(check.rounds_error),
            percent(check.round_ms_error),
            f"{check.noise:.1%}",
        )
        for check in found.checks
    ]
    fitted = ", ".join(map(str, sorted({0, *found.fit_lengths})))
    return Table(
        title=f"{where}: forecast from K = {fitted} at batch {', '.join(map(str, found.fit_batches))} on other prompts",
        header=("", "forecast, ms per token", "measured", "error", "of rounds", "of a round's time", "noise"),
        rows=rows,
        note=f"worst error where the cost was not fitted {found.worst_error:.1%} (allowed {allowed:.0%}), worst noise "
        f"{found.worst_noise:.1%}; best K: forecast {found.best_forecast}, measured {found.best_measured}, which costs "
        f"{found.lost:.1%}. Lines between fitted rounds, without the products: worst error "
        f"{found.worst_error_of_lines:.1%}. Noise: two passes over the same texts, the least that clocks leave open",
    )


def audit_table(found: Audit) -> Table:
    """Returns one row for each check: what it claims, the verdict, and what that rests on."""
    notes = [
        "near-tie: the target would choose that token for some logits within rounding of those it has when it reads "
        "the whole text at once"
    ]
    notes += [f"{check.name}: {check.seen}" for check in found.checks if check.seen]
    for check in found.checks:
        if "detected_on_one_prompt" in check.numbers:
            error = check.numbers["detected_on_one_prompt"]
            notes.append(f"between the cells of a single prompt an error of {error:.2g} is seen with 99%")
    return Table(
        title="Exactness audit: with the draft against the target alone",
        header=("", "verdict", "claim", "found"),
        rows=[(check.name, check.verdict.upper(), CHECKS[check.name], check.sentence) for check in found.checks],
        note="; ".join(notes),
        left=4,
    )
