"""Prints what the catalogue in specsamp/mesh/slices.py knows about a Cloud TPU slice.

    python3 launch/tpu/slices.py v4-32                     # all fields
    python3 launch/tpu/slices.py v4-32 topology hosts      # 2x2x4 4
    python3 launch/tpu/slices.py --list                    # the names of all slices

It needs Python 3.9 or newer and no installed package.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import pathlib
import sys
from types import ModuleType
from typing import NoReturn

CATALOGUE = pathlib.Path(__file__).resolve().parents[2] / "specsamp" / "mesh" / "slices.py"


def load_catalogue() -> ModuleType:
    """Loads the catalogue from its file: importing it from specsamp would import JAX."""
    spec = importlib.util.spec_from_file_location("tpu_slices", CATALOGUE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up the module that they are defined in
    spec.loader.exec_module(module)
    return module


def end_with(message: str) -> NoReturn:
    """Ends the script with one line and exit status 2."""
    print(message, file=sys.stderr)
    sys.exit(2)


def main() -> None:
    catalogue = load_catalogue()
    fields = [field.name for field in dataclasses.fields(catalogue.Slice)] + ["hosts", "devices"]
    parser = argparse.ArgumentParser(description="Prints what is known about a Cloud TPU slice.")
    parser.add_argument("name", nargs="?", help="accelerator type of the slice, such as v4-32 or v5e-16")
    parser.add_argument("field", nargs="*", help=f"fields to print in one line, out of: {', '.join(fields)}")
    parser.add_argument("--list", action="store_true", help="print the names of all slices, one per line")
    arguments = parser.parse_args()
    if arguments.list:
        print(*catalogue.all_slices(), sep="\n")
        return
    if arguments.name is None:
        end_with("no accelerator type: give one, such as v4-32, or --list")
    for field in arguments.field:
        if field not in fields:
            end_with(f"a TPU slice has no field {field!r}: choose from {', '.join(fields)}")
    try:
        found = catalogue.find(arguments.name)
    except ValueError as error:
        end_with(str(error))
    values = {field: "none" if getattr(found, field) is None else getattr(found, field) for field in fields}
    if arguments.field:
        print(*(values[field] for field in arguments.field))
    else:
        print(*(f"{field}: {value}" for field, value in values.items()), sep="\n")


if __name__ == "__main__":
    main()
