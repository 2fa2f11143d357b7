"""The texts that show measured numbers: their tables keep every cell, and are filled by
launch/study.py --page.
"""

import hashlib
import json
import pathlib
import re

import pytest

from configs.hf import HEADS, PAIRS
from launch.lib import page
from launch.lib.study import RESULTS

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [
    *page.PAGES,
    ROOT / "launch/README.md",
    ROOT / "notebooks/README.md",
    *(ROOT / ".github").glob("*.md"),
]


def test_the_pages_are_what_their_marks_are_filled_with():
    for path in page.PAGES:
        text = path.read_text(encoding="utf-8")
        assert text == page.filled(text), "run python launch/study.py --page"


def test_every_result_is_in_a_mark():
    """As --page wants it; a result that no mark names would be missed."""
    assert {path.stem for path in RESULTS.glob("*.json")} <= page.shown(
        path.read_text() for path in page.PAGES
    )
    assert "grid" not in page.shown(["<!-- files: pair -->\n<!-- end -->"])  # the control


def test_links_of_all_pages_lead_to_files_and_headings():
    count = 0
    for file in PAGES:
        links = re.findall(
            r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", file.read_text(encoding="utf-8")
        )
        count += len(links)
        for path, heading in links:
            target = file.parent / path if path else file
            assert target.exists(), (file, path)
            if heading:
                titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
                assert heading in [
                    re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles
                ]
    assert count > 50


def test_commands_of_the_readmes_name_files_that_are_there():
    for file in (README, ROOT / "launch/README.md"):
        text = file.read_text(encoding="utf-8")
        paths = re.findall(r"\b((?:launch|configs)/[\w/]+\.(?:py|sh))", text)
        paths += re.findall(r"\b(specsamp/[\w/-]+(?:\.\w+)?)\b", text)
        # The cache, and placeholders.
        paths = [path for path in paths if path != "specsamp/xla" and "NAME" not in path]
        assert paths and not [path for path in paths if not (ROOT / path).exists()]


def test_public_pairs_of_the_readme_are_those_of_their_configuration():
    rows = re.findall(
        r"^\| `([\w.-]+)` \| (\S+) \| (\S+) \| (\d+) \|$",
        (ROOT / "launch/README.md").read_text(),
        re.MULTILINE,
    )
    assert rows == [
        (name, pair.target, pair.draft, str(pair.model_parallelism))
        for name, pair in (PAIRS | HEADS).items()
    ]


# What is frozen.


# Written from the pages as they stood before tables moved into their studies. It is not written
# again: a table that leaves is deleted from it, in a commit that does nothing else.
GOLDEN = json.loads(
    pathlib.Path(__file__).with_name("golden_tables.json").read_text(encoding="utf-8")
)


def cells_of(table):
    """Returns the cells of a Markdown table as they are shown: of its header, then of its rows."""
    rows = [
        re.split(r"(?<!\\)\|", line.strip())[1:-1]
        for line in table.strip().splitlines()
        if line.startswith("|")
    ]
    rows = [[cell.strip() for cell in row] for row in rows]
    return [row for row in rows if not all(re.fullmatch(r":?-+:?", cell) for cell in row)]


def test_results_keep_their_bytes():
    found = {
        name: hashlib.sha256((RESULTS / name).read_bytes()).hexdigest()
        for name in GOLDEN["results"]
    }
    assert found == GOLDEN["results"]


@pytest.mark.parametrize("name", GOLDEN["tables"])
def test_tables_keep_their_cells(name):
    assert cells_of(page.content("table", name)) == GOLDEN["tables"][name]
