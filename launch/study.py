"""Runs a study, the measurements behind a figure or a table; lists studies; fills the tables of the
pages.

python launch/study.py --list
python launch/study.py backtest --output=runs/tpu_backtest.json
python launch/study.py backtest --results=notebooks/results    # shows results, measures nothing
python launch/study.py backtest --help
python launch/study.py --page    # fills the tables of all pages
"""

import sys
from collections.abc import Sequence

from absl import flags

from launch.lib import entry, page, study
from specsamp.analysis.report import Table

_LIST = flags.DEFINE_bool("list", False, "List the studies and what they ask.")
_PAGE = flags.DEFINE_bool(
    "page",
    False,
    "Fill the tables of README.md, of notebooks/results and of the shipped pair's card.",
)


def main() -> None:
    console = entry.make_console()
    if _PAGE.value and _LIST.value:
        raise ValueError("--page fills pages and --list shows studies: choose one")
    if _PAGE.value:
        for path in page.fill_pages():
            console.print(f"filled {path}")
        return
    if not _LIST.value:
        raise ValueError("name a study, such as: python launch/study.py backtest; --list shows all")
    rows = [
        {"study": name, "what it asks": study.load_study(name).question} for name in study.names()
    ]
    entry.show([Table.of("Studies", rows, left=2)], console)


def status_of(arguments: Sequence[str]) -> int:
    """Runs the study that the first argument names, else this command itself."""
    first = arguments[1] if len(arguments) > 1 else ""
    if first and not first.startswith("-"):
        return entry.guarded(
            lambda: study.run_study(
                study.load_study(first), [f"{arguments[0]} {first}", *arguments[2:]]
            )
        )
    return entry.status_of(main, None, arguments)


if __name__ == "__main__":
    sys.exit(status_of(sys.argv))
