"""Runs studies: what a study asks and measures is its own file in launch/studies; flags, files and tables are here.

A study is a module ``launch/studies/NAME.py`` with a `Study` named ``STUDY``. The runner brings --output, which is
written after each cell and from which the same command goes on; --again; --figures; --results, which shows the tables
of results that exist and measures nothing; progress, tables on the console, and the same tables as Markdown.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import flags
from rich.console import Console

import specsamp
from launch.lib import entry
from launch.lib.config import CHECKOUT, ConfigFlag, meant
from launch.lib.fields import ExperimentConfig
from specsamp import machine, storage, validate
from specsamp.analysis import figures, grid, report
from specsamp.analysis.report import Table

STUDIES = pathlib.Path(__file__).parents[1] / "studies"
RESULTS = CHECKOUT / "notebooks/results"
NUMBERS = {int: "whole numbers", float: "numbers"}
PAIR = pathlib.Path(specsamp.__file__).parent / "checkpoints/assets/python/pair.json"

Document = Mapping[str, Any]  # a result, as its JSON holds it
Key = Mapping[str, Any]  # identifies a cell within its file
Say = Callable[[str], None]  # shows what is going on


@dataclasses.dataclass(frozen=True)
class Option:
    """Describes a flag of a study; its type is that of the default, and of a tuple's first element."""

    default: Any
    help: str
    choices: Sequence[str] = ()
    least: float | None = None

    def define(self, name: str) -> flags.FlagHolder:
        """Defines the flag."""
        if isinstance(self.default, tuple):
            return flags.DEFINE_list(name, [str(each) for each in self.default], self.help)
        if self.choices:
            return flags.DEFINE_enum(name, self.default, list(self.choices), self.help)
        if isinstance(self.default, bool):
            return flags.DEFINE_bool(name, self.default, self.help)
        if isinstance(self.default, (int, float)):
            define = flags.DEFINE_integer if isinstance(self.default, int) else flags.DEFINE_float
            return define(name, self.default, self.help, lower_bound=self.least)
        return flags.DEFINE_string(name, self.default, self.help)

    def read(self, name: str, value: Any) -> Any:
        """Returns the value that a flag gives; raises ValueError for a wrong element of a list."""
        if not isinstance(self.default, tuple):
            return value
        kind, given = type(next(iter(self.default), "")), f"--{name}={','.join(map(str, value))}"
        try:
            elements = tuple(map(kind, value))
        except ValueError as error:
            raise ValueError(f"{given} must be {NUMBERS[kind]} with commas between them") from error
        if self.default and not elements:
            raise ValueError(f"{given} is empty: leave it out for {','.join(map(str, self.default))}")
        for element in elements:
            if self.choices:
                validate.choice(f"--{name}", element, self.choices)
            if self.least is not None:
                validate.number(f"--{name}", element, self.least)
        return elements


@dataclasses.dataclass(frozen=True)
class Published:
    """Makes a table of committed results, for the console and for a page.

    Attributes:
      results: names of the files in notebooks/results that ``make`` takes, without .json.
      make: takes their documents in this order.
    """

    results: Sequence[str]
    make: Callable[..., Table]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Describes a study.

    Attributes:
      question: what it asks, in one sentence.
      options: its flags by name, in addition to the shared ones.
      config: the default of --config, for a study of a configuration; its value is ``options.config``.
      prepare: checks the options and loads what all cells share, before anything is written. What it returns is
        handed to the functions below; by default the options themselves.
      cells: lists the keys of the cells; by default there is one, {}, and its result's fields are the document's.
      identity: says what all cells of a file share, by default the options; a file of another identity is refused.
      measure: returns the result of a cell as JSON (dataclasses allowed).
      tables: the tables of committed results, by the names that pages have them under.
      figures: draw documents, as tables are made of them; each is a PNG file of that name.
      shown: names the tables and figures that are made of what was just measured, of that document alone. None: all
        that are made of a single result.
    """

    question: str
    measure: Callable[[Any, Key, Say], Any] | None = None
    tables: Mapping[str, Published] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    config: str | None = None
    prepare: Callable[[Any], Any] = lambda options: options
    cells: Callable[[Any], Sequence[Key]] = lambda prepared: [{}]
    identity: Callable[[Any], Mapping[str, Any]] | None = None
    figures: Mapping[str, Published] = dataclasses.field(default_factory=dict)
    shown: Callable[[Any], Sequence[str]] | None = None


def names() -> list[str]:
    """Returns the names of all studies."""
    return sorted(path.stem for path in STUDIES.glob("*.py") if "\nSTUDY = " in path.read_text(encoding="utf-8"))


def load_study(name: str) -> Study:
    """Returns the study of a name; for an unknown name, the error has the closest."""
    if name not in names():
        raise ValueError(f"no study {name!r}{meant(name, names())}")
    return importlib.import_module(f"launch.studies.{name}").STUDY


def run_study(study: Study, arguments: Sequence[str]) -> int:
    """Runs a study with the flags that the arguments set, and returns the exit status."""
    config = None if study.config is None else ConfigFlag(study.config, ExperimentConfig)
    options = {option: described.define(option) for option, described in study.options.items()}
    shared = {
        "output": entry.define_output(),
        "again": flags.DEFINE_bool("again", False, "Measure cells again that --output holds already."),
        "figures": flags.DEFINE_string("figures", None, "Draw the figures into this folder."),
        "results": flags.DEFINE_string(
            "results", None, "Measure nothing: show what the files of this folder hold, such as notebooks/results."
        ),
    }

    def main() -> None:
        values = {name: flag.value for name, flag in shared.items()}
        values |= {name: study.options[name].read(name, flag.value) for name, flag in options.items()}
        _run(study, types.SimpleNamespace(config=config, **values), entry.make_console())

    text = "" if study.measure is None else sys.modules[study.measure.__module__].__doc__
    main.__doc__ = f"{study.question}\n\n{text}"
    return entry.status_of(main, config, arguments)


def _run(study: Study, options: types.SimpleNamespace, console: Console) -> None:
    if options.figures and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--figures: there is no matplotlib, which draws them: pip install matplotlib")
    every = study.tables | study.figures
    if options.results is not None or study.measure is None:
        folder = storage.place(options.results or RESULTS)
        names = [*study.tables, *(study.figures if options.figures else ())]
        _show(study, {name: made(every[name], folder) for name in names}, options, console)
        return
    entry.check_output(options.output)
    if options.figures:
        entry.check_output(f"{options.figures}/{next(iter(study.figures), 'figure')}.png", "figures")
    prepared = study.prepare(options)
    document = _measured(study, prepared, options, console)
    shown = study.shown(prepared) if study.shown else [name for name, each in every.items() if len(each.results) == 1]
    with entry.reading(options.output or "what was measured"):
        found = {name: every[name].make(document) for name in shown if name in study.tables or options.figures}
    _show(study, found, options, console)
    entry.say_written(options.output, console)


def _show(study: Study, found: Mapping[str, Any], options: types.SimpleNamespace, console: Console) -> None:
    """Prints the tables and draws the figures."""
    entry.show([table for name, table in found.items() if name in study.tables], console)
    for name, figure in found.items():
        if name in study.figures:
            storage.write(f"{options.figures}/{name}.png", figures.to_png(figure))
            console.print(f"drawn: {options.figures}/{name}.png")


def _measured(study: Study, prepared: Any, options: types.SimpleNamespace, console: Console) -> Document:
    """Returns the document with all cells; those that the output lacks are measured now."""
    identity = _asked(study, options) if study.identity is None else study.identity(prepared)
    results = grid.Results.open(options.output, identity)
    keys = [report.as_json(key) for key in study.cells(prepared)]
    missing = [key for key in keys if options.again or results.find(key) is None]
    if len(missing) < len(keys):
        there = f"{len(keys) - len(missing)} of {len(keys)} cells are in {options.output} already"
        console.print(f"{there}; --again measures them anew")
    kept = f"the cells measured so far are in {options.output}; the same command goes on"
    with entry.keeps(kept if options.output else "nothing was written"), entry.progress(console, "starting") as say:
        for number, key in enumerate(missing, 1):
            where = ", ".join([f"cell {number} of {len(missing)}", *map(str, key.values())])
            say(where)
            start = time.perf_counter()
            outcome = grid.outcome_of(
                functools.partial(study.measure, prepared, key, lambda text, where=where: say(f"{where}: {text}"))
            )
            if number % grid.KEPT_PROGRAMS == 0:
                jax.clear_caches()
            results.add({"key": key, "seconds": round(time.perf_counter() - start, 1), **outcome}, entry.header())
    return whole(results.document | {"cells": list(filter(None, map(results.find, keys)))})


def _asked(study: Study, options: types.SimpleNamespace) -> dict[str, Any]:
    """Returns the name of a study and what was asked of it."""
    given = {name: value for name, value in vars(options).items() if name in study.options}
    config = {} if options.config is None else {"config": options.config.value.recorded}
    return {"study": study.measure.__module__.rpartition(".")[2], "options": given, **config}


def whole(document: Document) -> Document:
    """Returns a document as tables read it: the fields of a single cell stand beside the header."""
    cells = document.get("cells", ())
    if len(cells) != 1 or cells[0].get("key") != {}:
        return document
    if "result" not in cells[0]:
        raise ValueError(f"out of memory: {cells[0]['out_of_memory']}; --again measures anew")
    return document | cells[0]["result"]


def here() -> dict[str, Any]:
    """Returns the part of an identity that times depend on: the machine and the version of JAX."""
    return {"machine": machine.host_facts(), "jax": jax.__version__}


def read_result(name: str, folder: pathlib.Path = RESULTS) -> Document:
    """Returns a result of a folder; "pair" is the record of the shipped pair."""
    return whole(storage.read_json(PAIR if name == "pair" else folder / f"{name}.json"))


def answers(document: Document) -> Iterator[tuple[Key, Any]]:
    """Yields key and result of each cell that was measured; older files hold both side by side."""
    for cell in document["cells"]:
        if "name" in cell:
            yield cell["name"], cell
        elif "result" in cell:
            yield cell["key"], cell["result"]


def law(key: Key) -> str:
    """Returns a distribution in words, with its top-p: "T = 0.8, top-p 0.95"."""
    return "T = {temperature:g}, top-p {top_p:g}".format(**key) if key["temperature"] else "greedy"


def made(shown: Published, folder: pathlib.Path = RESULTS) -> Any:
    """Returns a table or a figure of the results of a folder."""
    with entry.reading(", ".join(shown.results)):
        return shown.make(*(read_result(name, folder) for name in shown.results))
