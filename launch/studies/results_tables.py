"""Makes Markdown of the tables in legacy.py; it goes with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Documents = Mapping[str, Any]


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
