"""Tables of committed results keep every cell, wherever they are made; the results keep every byte."""

import json

import pytest

from support import golden_tables
from support.run_script import module

GOLDEN = json.loads(golden_tables.GOLDEN.read_text(encoding="utf-8"))


def test_results_keep_their_bytes():
    found = golden_tables.digests()
    assert {name: found.get(name) for name in GOLDEN["results"]} == GOLDEN["results"]


@pytest.fixture(scope="module")
def made():
    script = module("studies/results_readme")
    documents = script.read()
    page = golden_tables.tables_by_heading(script.page(documents))
    named = {golden_tables.NAMES[heading]: cells for heading, cells in page.items()}
    return named | {
        "headline": golden_tables.tables_of(script.headline(documents))[0],
        "summary": golden_tables.tables_of(script.summary(documents))[0],
    }


@pytest.mark.parametrize("name", GOLDEN["tables"])
def test_tables_keep_their_cells(name, made):
    assert made[name] == GOLDEN["tables"][name]
