"""Tables of evaluations: scores, differences from plain decoding, speed and acceptance."""

import itertools
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
        scores = [band(one["mean"], (one["low"], one["high"]), 3) for one in row["scores"].values()]
        others = [
            f"{one['mean']:+.3f} ({one['low']:+.3f} to {one['high']:+.3f}), sees "
            f"{one['detectable']:.3f}"
            for one in row["differences"].values()
        ]
        compared = itertools.chain(*zip(scores, others or [""] * len(scores)))
        ratios = sorted(row["speedups"])
        faster = band(statistics.median(ratios), (ratios[0], ratios[-1]), 2) if ratios else ""
        emitted = f"{row['counts']['emitted_per_round']:.2f}"
        cells.append((label_of(row), *compared, known(row["ms_per_token"], ".2f"), faster, emitted))
    columns = itertools.chain(*((measure, "less plain's") for measure in rows[0]["scores"]))
    header = ("", *columns, "ms per token", "speedup", "tokens per round")
    return Table(title=title, header=header, rows=cells, note=QUALITY)


def evaluation_tables(task: str, rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Returns the tables of an evaluation; rows are JSON objects."""
    found = [quality(rows, f"{task}: quality and speed over {rows[0]['problems']} problems")]
    totals = [counts_of({"result": {"acceptance": row["counts"]}}) for row in rows]
    lossy = [(row, counts) for row, counts in zip(rows, totals) if counts.variation is not None]
    if lossy:
        costs = [
            (label_of(row), *prices(counts, row["variation_per_text"])) for row, counts in lossy
        ]
        found.append(
            Table(
                title="Price of lossy rules, metered",
                header=("", *PRICE),
                rows=costs,
                note=PRICE_NOTE,
            )
        )
    drafted = []
    for row in (row for row in rows if row["counts"]["drafted"]):
        by_category = row["counts_by_category"] if len(row["counts_by_category"]) > 1 else {}
        for category, counts in (by_category | {"all": row["counts"]}).items():
            shares = [known(share, ".3f") for share in counts["by_position"]]
            drafted.append(
                [row["name"], category, known(counts["emitted_per_round"], ".2f"), *shares]
            )
    if drafted:
        width = max(map(len, drafted))
        cells = [[*row, *[""] * (width - len(row))] for row in drafted]
        header = ("", "category", "tokens per round", *map(str, range(1, width - 2)))
        found.append(
            Table(title="Acceptance by position", header=header, rows=cells, note=POSITIONS, left=2)
        )
    return found


def label_of(row: Mapping[str, Any]) -> str:
    """Returns the name of a method; a control is marked."""
    return row["name"] if row["exact"] else f"{row['name']} (control, not exact)"


def known(value: float | None, form: str) -> str:
    """Formats a number; an unknown number is empty."""
    return "" if value is None else format(value, form)
