"""launch/study.py --page fills the pages that show measured numbers."""

import pathlib
import re

from configs.hf import HEADS, PAIRS
from launch.lib import page
from launch.lib.study import RESULTS
from support.refusals import refused_calls

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [
    *page.PAGES,
    ROOT / "launch/README.md",
    ROOT / "notebooks/README.md",
    *(ROOT / ".github").glob("*.md"),
]


def test_pages_equal_their_generated_parts():
    for path in page.PAGES:
        text = path.read_text(encoding="utf-8")
        assert text == page.filled(text), "run python launch/study.py --page"


def test_every_result_is_in_a_mark():
    """A result without a mark appears on no page, and --page refuses it."""
    assert {path.stem for path in RESULTS.glob("*.json")} <= page.shown(
        path.read_text() for path in page.PAGES
    )
    assert "grid" not in page.shown(["<!-- files: pair -->\n<!-- end -->"])  # the control


def test_links_lead_to_files_and_headings():
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


def test_readme_commands_name_existing_files():
    for file in (README, ROOT / "launch/README.md"):
        text = file.read_text(encoding="utf-8")
        paths = re.findall(r"\b((?:launch|configs)/[\w/]+\.(?:py|sh))", text)
        paths += re.findall(r"\b(specsamp/[\w/-]+(?:\.\w+)?)\b", text)
        # The folder of the cache and placeholders are no files.
        paths = [path for path in paths if path != "specsamp/xla" and "NAME" not in path]
        assert paths and not [path for path in paths if not (ROOT / path).exists()]


def test_readme_lists_the_configured_public_pairs():
    rows = re.findall(
        r"^\| `([\w.-]+)` \| (\S+) \| (\S+) \| (\d+) \|$",
        (ROOT / "launch/README.md").read_text(),
        re.MULTILINE,
    )
    assert rows == [
        (name, pair.target, pair.draft, str(pair.model_parallelism))
        for name, pair in (PAIRS | HEADS).items()
    ]


test_refused_pages = refused_calls(
    {
        "grid-x": lambda: page.filled("<!-- table: grid-x -->\n<!-- end -->"),
        "table: grid -->": lambda: page.filled("<!-- table: grid -->\nprose"),
        "table: grid": lambda: page.filled("<!-- table: grid -->\n" * 2 + "<!-- end -->"),
        "<!-- end -->": lambda: page.filled("prose\n<!-- end -->"),
        "'nothing'": lambda: page.filled("<!-- table: nothing -->\n<!-- end -->"),
    }
)
