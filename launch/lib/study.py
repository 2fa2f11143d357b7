"""Runs studies: a file in launch/studies defines the measurements; flags, files and tables are
here.

A study is a module ``launch/studies/NAME.py`` with a `Study` named ``STUDY``. The runner adds
--output, which is written after each cell and from which the same command resumes; --again;
--figures; --results, which shows the tables of existing results and measures nothing; progress,
tables on the console, and the same tables as Markdown.
"""

import dataclasses
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags
from rich.console import Console

import specsamp
from launch.lib import entry
from launch.lib.cells import machine_identity, measure_missing
from launch.lib.config import CHECKOUT, meant
from specsamp import storage, validate
from specsamp.analysis import figures, grid, report
from specsamp.analysis.report import Table

STUDIES = pathlib.Path(__file__).parents[1] / "studies"
RESULTS = CHECKOUT / "notebooks/results"
PAIR = pathlib.Path(specsamp.__file__).parent / "checkpoints/assets/python/pair.json"

Document = Mapping[str, Any]  # a result, as its JSON holds it
Key = Mapping[str, Any]  # identifies a cell within its file
Say = Callable[[str], None]  # shows progress


@dataclasses.dataclass(frozen=True)
class Option:
    """A flag of a study: a text, or several, with commas between them, if the default is
    a tuple.
    """

    default: Any
    help: str
    choices: Sequence[str] = ()

    def define(self, name: str) -> flags.FlagHolder:
        """Defines the flag."""
        if isinstance(self.default, tuple):
            return flags.DEFINE_list(name, [*self.default], self.help)
        if self.choices:
            return flags.DEFINE_enum(name, self.default, list(self.choices), self.help)
        return flags.DEFINE_string(name, self.default, self.help)

    def read(self, name: str, value: Any) -> Any:
        """Returns the value of the flag; raises ValueError for a wrong element of a list."""
        if not isinstance(self.default, tuple):
            return value
        if self.default and not value:
            raise ValueError(f"--{name}= is empty: leave it out for {','.join(self.default)}")
        for element in value if self.choices else ():
            validate.choice(f"--{name}", element, self.choices)
        return tuple(value)


OF_ALL = {
    "figures": Option(None, "Draw the figures into this folder."),
    "results": Option(
        None, "Measure nothing: show the results in this folder, such as notebooks/results."
    ),
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
      options: its flags by name, in addition to the shared flags.
      prepare: checks the options, and adds fields to them for the functions below.
      cells: lists the keys of the cells; by default a single cell {}, whose fields are fields of
        the document.
      identity: returns the options that all cells of a file share, by default all options; a file
        of another identity is refused. Study and machine are always part of the identity.
      measure: returns the result of a cell as JSON (dataclasses allowed).
      tables: the tables of committed results, by their names in pages.
      figures: functions that draw documents, by the name of their PNG file.
    """

    question: str
    measure: Callable[[Any, Key, Say], Any] | None = None
    tables: Mapping[str, Published] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    prepare: Callable[[Any], None] = lambda options: None
    cells: Callable[[Any], Sequence[Key]] = lambda options: [{}]
    identity: Callable[[Any], Mapping[str, Any]] | None = None
    figures: Mapping[str, Published] = dataclasses.field(default_factory=dict)


def names() -> list[str]:
    """Returns the names of all studies."""
    files = {path.stem: path for path in STUDIES.glob("*.py")}
    files |= {path.parent.name: path for path in STUDIES.glob("*/__init__.py")}
    return sorted(
        name for name, path in files.items() if "\nSTUDY = " in path.read_text(encoding="utf-8")
    )


def load_study(name: str) -> Study:
    """Returns the study of a name; the error for an unknown name lists the closest names."""
    if name not in names():
        raise ValueError(f"no study {name!r}{meant(name, names())}")
    return importlib.import_module(f"launch.studies.{name}").STUDY


def run_study(study: Study, arguments: Sequence[str]) -> int:
    """Runs a study with the flags of the arguments, and returns the exit status."""
    described = OF_ALL | study.options
    options = {name: option.define(name) for name, option in described.items()}
    shared = {name: entry.define(name) for name in ("output", "again")}

    def main() -> None:
        values = {name: flag.value for name, flag in shared.items()}
        values |= {name: described[name].read(name, flag.value) for name, flag in options.items()}
        _run(study, types.SimpleNamespace(**values), entry.make_console())

    text = "" if study.measure is None else sys.modules[study.measure.__module__].__doc__
    main.__doc__ = f"{study.question}\n\n{text}"
    return entry.status_of(main, None, arguments)


def _run(study: Study, options: types.SimpleNamespace, console: Console) -> None:
    every = study.tables | study.figures
    if options.figures and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "--figures: there is no matplotlib, which draws them: pip install matplotlib"
        )
    if options.figures:
        entry.check_output(
            f"{options.figures}/{next(iter(study.figures), 'figure')}.png", "figures"
        )
    if options.results is not None or study.measure is None:
        entry.refuse_flags(["output", "again"], "nothing is measured")
        folder = storage.place(options.results or RESULTS)
        names = [*study.tables, *(study.figures if options.figures else ())]
        _show(study, {name: made(every[name], folder) for name in names}, options, console)
        return
    entry.check_output(options.output)
    study.prepare(options)
    document = _measured(study, options, console)
    shown = [name for name, each in every.items() if len(each.results) == 1]
    with entry.reading(options.output or "what was measured"):
        found = {
            name: every[name].make(document)
            for name in shown
            if name in study.tables or options.figures
        }
    _show(study, found, options, console)
    entry.say_written(options.output, console)


def _show(
    study: Study, found: Mapping[str, Any], options: types.SimpleNamespace, console: Console
) -> None:
    """Prints the tables and draws the figures."""
    entry.show([table for name, table in found.items() if name in study.tables], console)
    for name, figure in found.items():
        if name in study.figures:
            storage.write(f"{options.figures}/{name}.png", figures.to_png(figure))
            console.print(f"drawn: {options.figures}/{name}.png")


def _measured(study: Study, options: types.SimpleNamespace, console: Console) -> Document:
    """Returns the document with all cells; measures the cells that the output lacks."""
    keys = [report.as_json(key) for key in study.cells(options)]
    results = grid.Results.open(options.output, _identity(study, options))

    def measure(number: int, say: Say) -> Any:
        where = ", ".join(map(str, keys[number].values())) or "measuring"
        say(where)
        return study.measure(options, keys[number], lambda text: say(f"{where}: {text}"))

    measure_missing([{"key": key} for key in keys], measure, results, options.again, console)
    return whole(results.document | {"cells": list(filter(None, map(results.find, keys)))})


def _identity(study: Study, options: types.SimpleNamespace) -> dict[str, Any]:
    """Returns the identity of a study's file."""
    given = {name: value for name, value in vars(options).items() if name in study.options}
    known = {"study": study.measure.__module__.rpartition(".")[2], **machine_identity()}
    return known | ({"options": given} if study.identity is None else study.identity(options))


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


def answers(document: Document) -> Iterator[tuple[Key, Any]]:
    """Yields key and result of each measured cell; in older files both are in one object."""
    for cell in document["cells"]:
        if "name" in cell:
            yield cell["name"], cell
        elif "result" in cell:
            yield cell["key"], cell["result"]


def cpu_of(document: Document) -> str:
    """Returns the machine of a result, "2 CPU cores (AMD EPYC)"; older files name no CPU."""
    environment = (document if "environment" in document else document["cells"][0])["environment"]
    named = [environment.get("cpu"), *environment.get("instructions", ())]
    return f"{environment['cores']} CPU cores" + (f" ({', '.join(named)})" if named[0] else "")


def law(key: Key) -> str:
    """Returns the name of a distribution: "T = 0.8, top-p 0.95"."""
    return "T = {temperature:g}, top-p {top_p:g}".format(**key) if key["temperature"] else "greedy"


def made(shown: Published, folder: pathlib.Path = RESULTS) -> Any:
    """Returns a table or a figure of the results of a folder."""
    with entry.reading(", ".join(shown.results)):
        return shown.make(*(read_result(name, folder) for name in shown.results))
