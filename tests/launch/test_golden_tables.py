"""Tables of committed results keep every cell, wherever they are made; the results keep every byte."""

import hashlib
import json
import pathlib
import re

import pytest

from launch.lib import page
from launch.lib.study import RESULTS

# Written from the pages as they stood before tables moved into their studies. It is not written again: a table that
# leaves is deleted from it, in a commit that does nothing else.
GOLDEN = json.loads(pathlib.Path(__file__).with_name("golden_tables.json").read_text(encoding="utf-8"))


def cells_of(table):
    """Returns the cells of a Markdown table as they are shown: of its header, then of its rows."""
    rows = [re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in table.strip().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in row] for row in rows]
    return [row for row in rows if not all(re.fullmatch(r":?-+:?", cell) for cell in row)]


def test_results_keep_their_bytes():
    found = {name: hashlib.sha256((RESULTS / name).read_bytes()).hexdigest() for name in GOLDEN["results"]}
    assert found == GOLDEN["results"]


@pytest.mark.parametrize("name", GOLDEN["tables"])
def test_tables_keep_their_cells(name):
    assert cells_of(page.content("table", name)) == GOLDEN["tables"][name]
