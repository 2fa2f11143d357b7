"""Tables of evaluations: scores, differences from plain decoding, speed and acceptance."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from specsamp.analysis.grid import counts_of
from specsamp.analysis.report import Table
from specsamp.analysis.tables import PRICE, PRICE_NOTE, band, prices

QUALITY = (
    "Differences are on the same problems, with an interval of 95% and the size that four of five "
    "such runs would see. log_prob: per token, under the target at temperature 1. A speedup is the "
    "median over blocks of problems, with the range."
)
POSITIONS = "Of the rounds that reached a position, the share in which its token was accepted."


def quality(rows: Sequence[Mapping[str, Any]], title: str = "Quality and speed") -> Table:
    """Returns scores, differences from plain decoding and speed of each method; rows are JSON
    objects.
    """
    cells = []
    for row in rows:
        compared = []
        for measure, score in row["scores"].items():
            compared.append(band(score["mean"], (score["low"], score["high"]), 3))
            less = row["differences"].get(measure)
            compared.append(
                f"{less['mean']:+.3f} ({less['low']:+.3f} to {less['high']:+.3f}), sees "
                f"{less['detectable']:.3f}"
                if less
                else ""
            )
        ratios = sorted(row["speedups"])
        faster = band(statistics.median(ratios), (ratios[0], ratios[-1]), 2) if ratios else ""
        emitted = f"{row['counts']['emitted_per_round']:.2f}"
        cells.append((label_of(row), *compared, known(row["ms_per_token"], ".2f"), faster, emitted))
    columns = [name for measure in rows[0]["scores"] for name in (measure, "less plain's")]
    header = ("", *columns, "ms per token", "speedup", "tokens per round")
    return Table(title=title, header=header, rows=cells, note=QUALITY)


def evaluation_tables(task: str, rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Returns the tables of an evaluation; rows are JSON objects."""
    tables = [quality(rows, f"{task}: quality and speed over {rows[0]['problems']} problems")]
    costs = []
    for row in rows:
        counts = counts_of({"result": {"acceptance": row["counts"]}})
        if counts.variation is not None:
            price = dict(zip(PRICE, prices(counts, row["variation_per_text"])))
            costs.append({"": label_of(row)} | price)
    if costs:
        tables.append(Table.of("Price of lossy rules, metered", costs, note=PRICE_NOTE))
    drafted = [
        {
            "": row["name"],
            "category": category,
            "tokens per round": known(counts["emitted_per_round"], ".2f"),
            **{f"{i}": known(p, ".3f") for i, p in enumerate(counts["by_position"], 1)},
        }
        for row in rows
        if row["counts"]["drafted"]
        for category, counts in counts_by_category(row).items()
    ]
    if drafted:
        tables.append(Table.of("Acceptance by position", drafted, note=POSITIONS, left=2))
    return tables


def counts_by_category(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the counts of each category, where there are several, and of all."""
    categories = row["counts_by_category"]
    return (categories if len(categories) > 1 else {}) | {"all": row["counts"]}


def label_of(row: Mapping[str, Any]) -> str:
    """Returns the name of a method; a control is marked."""
    return row["name"] if row["exact"] else f"{row['name']} (control, not exact)"


def known(value: float | None, form: str) -> str:
    """Formats a number; an unknown number is empty."""
    return "" if value is None else format(value, form)
