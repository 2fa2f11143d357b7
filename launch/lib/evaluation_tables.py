"""Tables of launch/evaluate.py: quality, speed, the price of lossy rules, and acceptance by position."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from specsamp.analysis.report import Table
from specsamp.analysis.tables import PRICE, PRICE_NOTE, prices
from specsamp.evaluation.evaluate import Row
from specsamp.evaluation.task import Interval, Task

DIFFERENCES = (
    "On the same problems, with an interval of 95%, and the size that four of five such runs would see. log_prob: per "
    "token, under the target at temperature 1."
)
SPEEDS = (
    "Chains; tokens per round count the target's own. A speedup is the median over blocks of problems, with the range. "
    "Rows busy: while requests waited. Past a stop: decoded before a stop text was found, and dropped."
)
POSITIONS = "Of the rounds that reached a position, the share in which its token was accepted."


def tables(task: Task, rows: Sequence[Row]) -> list[Table]:
    """Returns the quality of each way, its speed, and what was accepted by category and position."""
    names = {row.name: row.name if row.exact else f"{row.name} (not exact)" for row in rows}
    measures = list(rows[0].scores)
    quality = [
        [
            names[row.name],
            *(shown(row.scores[name]) for name in measures),
            *(shown_difference(row.differences[name]) if row.differences else "" for name in measures),
        ]
        for row in rows
    ]
    speeds = [
        [
            names[row.name],
            known(row.ms_per_token, ".2f"),
            speedup(row.speedups),
            f"{row.total.emitted_per_round:.2f}",
            known(row.occupancy, ".0%"),
            known(row.dropped, ".1%"),
        ]
        for row in rows
    ]
    by_position = [
        [
            row.name,
            category,
            f"{counts.emitted_per_round:.2f}",
            *(known(x, ".3f") for x in counts.acceptance_by_position),
        ]
        for row in rows
        if row.total.drafted
        for category, counts in (row.counts | {"all": row.total} if len(row.counts) > 1 else {"all": row.total}).items()
    ]
    deepest = max(map(len, by_position), default=3)
    costs = [
        [names[row.name], *prices(row.total, row.variation_per_text)] for row in rows if row.total.variation is not None
    ]
    found = [
        Table(
            title=f"{task.name}: quality over {rows[0].problems} problems",
            header=["", *measures, *(f"{name} less plain's" for name in measures)],
            rows=quality,
            note=DIFFERENCES,
        ),
        Table(
            title="Speed",
            header=["", "ms/token", "speedup", "tokens/round", "rows busy", "past a stop"],
            rows=speeds,
            note=SPEEDS,
        ),
        Table(
            title="Acceptance by position",
            header=["", "category", "tokens/round", *(str(i + 1) for i in range(deepest - 3))],
            rows=[[*cells, *[""] * (deepest - len(cells))] for cells in by_position],
            note=POSITIONS,
            left=2,
        ),
    ]
    if costs:
        found.insert(2, Table(title="Price of lossy rules, metered", header=["", *PRICE], rows=costs, note=PRICE_NOTE))
    return found if by_position else found[:-1]


def known(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)


def shown(interval: Interval) -> str:
    return f"{interval.mean:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def shown_difference(interval: Interval) -> str:
    return f"{interval.mean:+.3f} ({interval.low:+.3f} to {interval.high:+.3f}; sees {interval.detectable:.3f})"


def speedup(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
