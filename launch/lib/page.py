"""Fills the tables of the pages: `PAGES` hold prose by hand, and marks.

    <!-- table: NAME -->        a table of a study, see `launch.lib.study.Published`
    <!-- files: NAME NAME -->   origin of results: files, machine, versions and commands
    <!-- end -->

The text between a mark and its end is replaced. Every committed result must be in a mark.
"""

import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from launch.lib import study
from launch.lib.config import CHECKOUT
from launch.lib.study import PAIR, RESULTS, Document, Published
from specsamp import storage

PAGES = (
    CHECKOUT / "README.md",
    RESULTS / "README.md",
    RESULTS / "archive.md",
    PAIR.with_name("README.md"),
)
MARK = re.compile(r"(<!-- (table|files): ([\w ]+?) -->\n)((?:(?!<!--).)*)(<!-- end -->)", re.DOTALL)
OPENED = re.compile(r"<!-- *(?:table|files|end)\b.*")

# Results contain the commands that made them, and some commands have moved since: patterns of old
# commands, with today's. Removed programs have no command today; the page has their answers. The
# last pattern matches all studies.
MOVED: dict[str, str] = storage.read_json(pathlib.Path(__file__).with_suffix(".json"))
REPEATED = re.compile(r" --(\w+)=(\S+) --\1=(\S+)")


def fill_pages() -> list[pathlib.Path]:
    """Fills all pages and returns their paths; raises ValueError for a result that no
    mark shows.
    """
    if not all(path.is_file() for path in PAGES):
        raise ValueError(
            "--page fills the pages of a checkout, and this is none: run it in a clone"
        )
    texts = {path: filled(path.read_text(encoding="utf-8")) for path in PAGES}
    if lost := {path.stem for path in RESULTS.glob("*.json")} - shown(texts.values()):
        raise ValueError(
            f"no mark of a page shows {', '.join(sorted(lost))}: add <!-- files: {min(lost)} -->"
        )
    for path, text in texts.items():
        storage.write(path, text.encode())
    return list(texts)


def filled(text: str) -> str:
    """Returns a page with its marks filled again; raises ValueError for a mark that is misspelt or
    has no end.
    """
    if wrong := OPENED.search(MARK.sub("", text)):
        raise ValueError(
            f"{wrong[0]} is misspelt or has no other end: write <!-- table: NAME -->, and <!-- end "
            "--> below it"
        )
    return MARK.sub(lambda mark: mark[1] + content(mark[2], mark[3]) + "\n" + mark[5], text)


def shown(texts: Iterable[str]) -> set[str]:
    """Returns the results in the marks of pages and in their tables."""
    found, known = set(), all_tables()
    for mark in MARK.finditer("\n".join(texts)):
        kind, names = mark[2], mark[3]
        if kind == "files":
            found.update(names.split())
        elif names in known:
            found.update(known[names].results)
    return found


def all_tables() -> dict[str, Published]:
    """Returns the tables of all studies by name."""
    return {
        name: table
        for each in study.names()
        for name, table in study.load_study(each).tables.items()
    }


def content(kind: str, names: str) -> str:
    """Returns the content of a mark; raises ValueError for a table that no study makes."""
    if kind == "files":
        return "\n".join(source(name, study.read_result(name)) for name in names.split())
    known = all_tables()
    if names not in known:
        raise ValueError(f"no study makes the table {names!r}: choose one of {', '.join(known)}")
    return study.made(known[names]).to_markdown()


def source(name: str, document: Document) -> str:
    """Returns the source of numbers: file, dates, machine, versions and the commands that measure
    them again.
    """
    records = (
        [cell for cell in document.get("cells", ()) if "environment" in cell]
        or document.get("batches")
        or [document]
    )
    environments = [record["environment"] for record in records if "environment" in record]
    facts = [_machine(environments)] if environments else []
    known = document.get("identity", {}) | document
    facts += [f"{key} {known[key]}" for key in ("libtpu", "torch", "transformers") if key in known]
    commands = dict.fromkeys(today(record.get("command", "")) for record in records)
    again = "".join(f"\n  - `{command}`" for command in commands if command)
    return f"- [`{name}.json`]({name}.json)" + (": " if facts else "") + "; ".join(facts) + again


def _machine(environments: Sequence[Mapping[str, Any]]) -> str:
    def all_of(name: str) -> str:
        return ", ".join(dict.fromkeys(str(one[name]) for one in environments if one.get(name)))

    days = [one["date"][:10] for one in environments]
    instructions = " ".join(environments[-1].get("instructions", ()))
    machine = ", ".join(filter(None, (all_of("cpu"), instructions, all_of("machine"))))
    return (
        f"{' to '.join(sorted({min(days), max(days)}))}; {machine}, {all_of('cores')} cores, "
        f"{all_of('devices')} x {all_of('device_kind')}; Python {all_of('python')}, jax "
        f"{all_of('jax')}, jaxlib {all_of('jaxlib')}, flax {all_of('flax')}"
    )


def today(command: str) -> str:
    """Returns today's form of a recorded command: commands have moved, and results go to runs/."""
    for then, now in MOVED.items():
        command = re.sub(then, now, command)
    while "launch/study.py" in command and REPEATED.search(command):
        command = REPEATED.sub(r" --\1=\2,\3", command)
    return re.sub(r"--(output|figures?)=notebooks/results/", r"--\1=runs/", command)
