"""Runs studies: a file in launch/studies defines the measurement; flags, files and tables are here.

A study is a module ``launch/studies/NAME.py`` with a `Study` named ``STUDY``. The runner adds
--output, a file whose result is not measured again without --again; --figures; --results, which
shows the tables of existing results and measures nothing; progress, tables on the console, and the
same tables as Markdown.
"""

import dataclasses
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

import specsamp
from launch.lib import entry
from launch.lib.cells import machine_identity, measure_missing
from launch.lib.config import CHECKOUT, meant
from specsamp import storage
from specsamp.analysis import figures, grid
from specsamp.analysis.report import Table

STUDIES = pathlib.Path(__file__).parents[1] / "studies"
RESULTS = CHECKOUT / "notebooks/results"
PAIR = pathlib.Path(specsamp.__file__).parent / "checkpoints/assets/python/pair.json"

Document = Mapping[str, Any]  # a result, as its JSON holds it
Say = Callable[[str], None]  # shows progress


OF_ALL = {
    "figures": (None, "Draw the figures into this folder."),
    "results": (
        None,
        "Measure nothing: show the results in this folder, such as notebooks/results.",
    ),
    **{name: entry.OF_SEVERAL[name] for name in ("output", "again")},
}


@dataclasses.dataclass(frozen=True)
class Published:
    """A table of committed results, for the console and for a page.

    Attributes:
      results: names of the files in notebooks/results for ``make``, without .json.
      make: a function of the documents in these files, in this order.
    """

    results: Sequence[str]
    make: Callable[..., Table]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """The definition of a study.

    Attributes:
      question: the question of the study, in one sentence.
      measure: returns the result as JSON (dataclasses allowed); it is given the options and a
        function that shows progress.
      tables: the tables of committed results, by their names in pages.
      options: default and help of its flags, which have the type of the default; one whose default
        is None is a text that must be given.
      prepare: checks the options, and adds fields to them for the functions below.
      identity: returns the options that the result depends on, by default all options; a file of
        another identity is refused. Study and machine are always part of the identity.
      figures: functions that draw documents, by the name of their PNG file.
    """

    question: str
    measure: Callable[..., Any] | None = None
    tables: Mapping[str, Published] = dataclasses.field(default_factory=dict)
    options: Mapping[str, tuple[Any, str]] = dataclasses.field(default_factory=dict)
    prepare: Callable[[Any], None] = lambda options: None
    identity: Callable[[Any], Mapping[str, Any]] | None = None
    figures: Mapping[str, Published] = dataclasses.field(default_factory=dict)


def names() -> list[str]:
    """Returns the names of all studies."""
    files = sorted(STUDIES.glob("*.py"))
    return [path.stem for path in files if "\nSTUDY = " in path.read_text(encoding="utf-8")]


def load_study(name: str) -> Study:
    """Returns the study of a name; the error for an unknown name lists the closest names."""
    if name not in names():
        raise ValueError(f"no study {name!r}{meant(name, names())}")
    return importlib.import_module(f"launch.studies.{name}").STUDY


def run_study(study: Study, arguments: Sequence[str]) -> int:
    """Runs a study with the flags of the arguments, and returns the exit status."""
    described = OF_ALL | study.options
    defined = {name: entry.define(name, described) for name in described}

    def main() -> None:
        values = {name: flag.value for name, flag in defined.items()}
        _run(study, types.SimpleNamespace(**values), entry.make_console())

    text = "" if study.measure is None else sys.modules[study.measure.__module__].__doc__
    main.__doc__ = f"{study.question}\n\n{text}"
    return entry.status_of(main, None, arguments)


def _run(study: Study, options: types.SimpleNamespace, console: Console) -> None:
    """Prints the tables and draws the figures, of a measurement or of existing results."""
    if options.figures:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError(
                "--figures: there is no matplotlib, which draws them: pip install matplotlib"
            )
        entry.check_output(
            f"{options.figures}/{next(iter(study.figures), 'figure')}.png", "figures"
        )
    drawn = study.figures if options.figures else {}
    shown = {**study.tables, **drawn}
    if options.results is not None or study.measure is None:
        entry.refuse_flags(["output", "again"], "nothing is measured")
        folder = storage.place(options.results or RESULTS)
        found = {name: made(each, folder) for name, each in shown.items()}
    else:
        document = _measured(study, options, console)
        with entry.reading(options.output or "what was measured"):
            found = {name: each.make(document) for name, each in shown.items()}
    entry.show([table for name, table in found.items() if name in study.tables], console)
    for name in drawn:
        storage.write(f"{options.figures}/{name}.png", figures.to_png(found[name]))
        console.print(f"drawn: {options.figures}/{name}.png")
    entry.say_written(options.output, console)


def _measured(study: Study, options: types.SimpleNamespace, console: Console) -> Document:
    """Returns the document; measures it if the output lacks it."""
    entry.check_output(options.output)
    given = {name: getattr(options, name) for name in study.options}
    for name, (default, _) in study.options.items():
        if default is None and given[name] is None:
            raise ValueError(f"give --{name}: see --help")
    study.prepare(options)
    identity = {"study": study.measure.__module__.rpartition(".")[2], **machine_identity()}
    identity |= {"options": given} if study.identity is None else study.identity(options)
    results = grid.Results.open(options.output, identity)
    measure_missing(
        [{"key": {}}],
        lambda number, say: study.measure(options, say),
        results,
        options.again,
        console,
    )
    return whole(results.document)


def whole(document: Document) -> Document:
    """Returns a document for tables: the fields of a single cell are added to the fields of the
    header.
    """
    cells = document.get("cells", ())
    if len(cells) != 1 or cells[0].get("key") != {}:
        return document
    if "result" not in cells[0]:
        raise ValueError(f"out of memory: {cells[0]['out_of_memory']}; --again measures anew")
    return document.get("identity", {}) | document | cells[0]["result"]


def read_result(name: str, folder: pathlib.Path = RESULTS) -> Document:
    """Returns a result in a folder; "pair" is the record of the shipped pair."""
    return whole(storage.read_json(PAIR if name == "pair" else folder / f"{name}.json"))


def answers(document: Document) -> Iterator[tuple[Document, Any]]:
    """Yields key and result of each cell that did not run out of memory."""
    for cell in document["cells"]:
        if "result" in cell:
            yield cell["key"], cell["result"]


def cpu_of(document: Document) -> str:
    """Returns the machine of a result, "2 CPU cores (AMD EPYC)"; older files name no CPU."""
    environment = document["environment"]
    named = [environment.get("cpu"), *environment.get("instructions", ())]
    return f"{environment['cores']} CPU cores" + (f" ({', '.join(named)})" if named[0] else "")


def made(shown: Published, folder: pathlib.Path = RESULTS) -> Any:
    """Returns a table or a figure of the results of a folder."""
    with entry.reading(", ".join(shown.results)):
        return shown.make(*(read_result(name, folder) for name in shown.results))
