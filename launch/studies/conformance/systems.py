"""Holds the facts of each system (systems.json), and finds its files: a package, or a checkout that the reader names."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

from launch.studies.conformance.cases import Case

Emit = Callable[[int], Sequence[int]]  # the tokens of one round, or of a text, after the last token


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """A sampler of the table.

    Attributes:
      version: with which it was examined: of a package, or the beginning of a commit.
      place: its code, file and line.
      draws: what it verifies drafts against, above temperature 0.
      how: "whole loop", "function", "kernel", or "description": not Python, and implemented from what it is said to do.
      adapter: the function here, "module.function", that takes the folder of its files and a case, and returns the
        speculative and its own plain sampler; "" where nothing runs.
      given: further arguments of the adapter.
      package: the package or the folder of its checkout; "" if no files are needed.
      takes: the settings of cases that it knows: top_k, top_p, rows.
      says: what it says of itself, if it does not mean to be exact.
      note: what a reader must know.
      without: cases that it cannot run, or not within minutes, by name.
      read: what was found by reading, where it cannot run.
    """

    name: str
    version: str
    place: str
    draws: str
    how: str
    adapter: str = ""
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    package: str = ""
    takes: str = ""
    says: str = ""
    note: str = ""
    without: tuple[str, ...] = ()
    read: str = ""

    def samplers(self, files: pathlib.Path | None, case: Case) -> tuple[Emit, Emit]:
        """Calls the adapter, whose module is imported now, and may need packages that are missing."""
        module, _, function = self.adapter.partition(".")
        return getattr(importlib.import_module(f"launch.studies.conformance.{module}"), function)(
            files, case, **self.given
        )


_KNOWN = json.loads(pathlib.Path(__file__).with_name("systems.json").read_text(encoding="utf-8"))
SYSTEMS = {name: System(name=name, **fields) for name, fields in _KNOWN.items()}


def find_files(package: str, checkouts: str) -> tuple[pathlib.Path | None, str]:
    """Returns the folder of a system's files and its version; None if there is none."""
    folder = pathlib.Path(checkouts, package)
    if checkouts and folder.is_dir():
        packed = sorted(folder.parent.glob(f"{package}-*.dist-info"))  # a wheel that was unpacked
        if packed:
            return folder, packed[0].name.removesuffix(".dist-info").rpartition("-")[2]
        command = ["git", "-C", str(folder), "rev-parse", "--short=7", "HEAD"]
        return folder, subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None, ""
    return pathlib.Path(importlib.util.find_spec(package).submodule_search_locations[0]), version


def load_module(path: pathlib.Path, *roots: pathlib.Path, **stubs: Any) -> types.ModuleType:
    """Imports a file of a system; its own imports are found in ``roots``.

    ``stubs`` stand in for modules that are not needed here: objects, or None for one that accepts everything. Dots of
    their names are written as two underscores.
    """
    modules = {name.replace("__", "."): mock.MagicMock() if stub is None else stub for name, stub in stubs.items()}
    specification = importlib.util.spec_from_file_location(f"{path.parent.name}.conformance_{path.stem}", path)
    module = importlib.util.module_from_spec(specification)
    roots_first = [*map(str, roots), *sys.path]
    with (
        mock.patch.object(sys, "path", roots_first),
        mock.patch.dict(sys.modules, {specification.name: module} | modules),
    ):
        specification.loader.exec_module(module)
        imported = dict(sys.modules)
    kept = {
        name: each
        for name, each in imported.items()
        if name not in modules and not str(getattr(each, "__file__", "")).startswith(tuple(map(str, roots)) or " ")
    }
    sys.modules |= kept
    return module
