"""Tables of committed results keep every cell, wherever they are made; the results keep every byte."""

import json

import pytest

from launch.lib import page
from support import golden_tables

GOLDEN = json.loads(golden_tables.GOLDEN.read_text(encoding="utf-8"))


def test_results_keep_their_bytes():
    found = golden_tables.digests()
    assert {name: found.get(name) for name in GOLDEN["results"]} == GOLDEN["results"]


@pytest.mark.parametrize("name", GOLDEN["tables"])
def test_tables_keep_their_cells(name):
    (cells,) = golden_tables.tables_of(page.content("table", name))
    assert cells == GOLDEN["tables"][name]
