"""Writes results as JSON, prints tables, and shows progress."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from specsamp.decoding.results import RowStats

Say = Callable[[str], None]  # shows the work that begins


def silent(text: str) -> None:
    """Shows nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Cells of text; the first ``left`` columns are aligned to the left, all other to the right.

    A cell in ``**two stars**`` is bold, on the console too.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    left: int = 1  # columns aligned to the left

    @classmethod
    def of(cls, title: str, rows: Sequence[Mapping[str, Any]], **fields: Any) -> Table:
        """Makes a table of rows by column; a row may lack columns, whose cells are empty."""
        header = tuple(dict.fromkeys(name for row in rows for name in row))
        cells = [tuple(str(row.get(name, "")) for name in header) for row in rows]
        return cls(title=title, header=header, rows=cells, **fields)

    def to_markdown(self) -> str:
        """Returns the table as Markdown, followed by the note; the page has the title."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        text = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
        return f"{text}\n\n{self.note}" if self.note else text


def json_text(document: Any) -> str:
    """Returns the text of a JSON file; dataclasses are written as their fields, counts with the
    rates that follow.
    """
    return json.dumps(document, default=_as_json, indent=1, allow_nan=False) + "\n"


def as_json(document: Any) -> Any:
    """Returns a document as it reads when it comes from a file: mappings, lists, numbers
    and texts.
    """
    return json.loads(json_text(document))


def print_tables(tables: Iterable[Table], console: Console, plain: bool = False) -> None:
    """Prints tables, with lines and colours or ``plain``; cells fold where a table is too wide."""
    for table in tables:
        console.print()
        console.print(Text(table.title, style="bold"), soft_wrap=True)
        drawn = RichTable(box=None if plain else box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        for i, name in enumerate(table.header):
            justify = "left" if i < table.left else "right"
            style = "bold" if i == 0 else ""
            drawn.add_column(Text(name), justify=justify, style=style, overflow="fold")
        for row in table.rows:
            drawn.add_row(*(Text(cell) if plain else _cell(cell) for cell in row))
        console.print(drawn, soft_wrap=False)
        if table.note:
            console.print(Text(table.note, style="" if plain else "dim"), soft_wrap=plain)


def _cell(text: str) -> Text:
    bold = text.startswith("**")
    return Text(text.strip("*") if bold else text, style="bold" if bold else "")


def _as_json(value: Any) -> Any:
    if isinstance(value, RowStats):
        return _counts_as_json(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")


def _counts_as_json(counts: RowStats) -> dict[str, Any]:
    """Writes the counts, and the rates that follow for a reader; rates of nothing are null."""
    rates = {
        "emitted_per_round": counts.emitted_per_round,
        "rate": counts.acceptance_rate,
        "by_position": counts.acceptance_by_position,
    }
    written = {
        name: getattr(counts, name)
        for name in ("rounds", "emitted", "drafted", "reached", "accepted_counts")
    }
    if counts.variation is not None:  # of a lossy rule, metered
        written |= {"variation": counts.variation, "extra_accepted": counts.extra_accepted}
        rates |= {"variation_per_token": counts.variation_per_token}
    return written | {name: _or_null(value) for name, value in rates.items()}


def _or_null(value: float | Sequence[float]) -> Any:
    if isinstance(value, Sequence):
        return [*map(_or_null, value)]
    return None if math.isnan(value) else value
