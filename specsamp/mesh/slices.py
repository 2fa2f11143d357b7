"""Finds the Cloud TPU slices that Google sells, by name; slices.json is the catalogue.

    find("v4-32").topology        # "2x2x4"
    find("v5e-16").hosts          # 4

    python3 specsamp/mesh/slices.py v4-32                     # all fields
    python3 specsamp/mesh/slices.py v4-32 topology hosts      # 2x2x4 4
    python3 specsamp/mesh/slices.py --list                    # the names of all slices

This file imports the standard library only and runs on Python 3.9: the machine that orders a slice
may lack specsamp.

Sources: the pages v4, v5e, v5p, v6e, tpu7x and runtimes of cloud.google.com/tpu/docs (topologies,
memory, images), and the slices in xpk 1.16, Google's launcher for GKE. If a page gives only
examples, the catalogue has the sizes with a default topology in xpk, and v4-384, which Google's
MaxText runs on.
"""

import argparse
import dataclasses
import difflib
import json
import math
import pathlib
import sys

GIB = 2**30
# By the prefix of the name. ``cores_in_name``: what a chip adds to the number in the name, 2 if it
# counts TensorCores.
GENERATIONS = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips that are ordered together and share a network. A host is a virtual machine, with one
    JAX process.
    """

    name: str  # the accelerator type: "v4-32"
    topology: str  # chips along each axis of the network: "2x2x4"
    chips: int
    chips_per_host: int
    devices_per_chip: int  # as JAX counts devices
    # Image of the hosts; None where only GKE sells the slice, without queued resources.
    runtime_version: str | None
    hbm_bytes: int  # of one chip; programs can use about 98% of it
    hbm_bytes_per_second: float  # of one chip

    @property
    def hosts(self) -> int:
        """Returns the number of virtual machines."""
        return self.chips // self.chips_per_host

    @property
    def devices(self) -> int:
        """Returns the number of JAX devices."""
        return self.chips * self.devices_per_chip


def all_slices() -> dict[str, Slice]:
    """Returns all slices by name, each generation from small to large."""
    found = {}
    for prefix, generation in GENERATIONS.items():
        for topology in generation["topologies"]:
            chips = math.prod(map(int, topology.split("x")))
            # A flat slice of up to eight chips is one host; all other slices consist of hosts with
            # four chips.
            chips_per_host = chips if chips <= 8 and topology.count("x") == 1 else min(chips, 4)
            name = f"{prefix}-{chips * generation['cores_in_name']}"
            found[name] = Slice(
                name=name,
                topology=topology,
                chips=chips,
                chips_per_host=chips_per_host,
                devices_per_chip=generation["devices_per_chip"],
                runtime_version=generation["runtime_version"],
                hbm_bytes=generation["hbm_gib"] * GIB,
                hbm_bytes_per_second=generation["hbm_bytes_per_second"],
            )
    return found


def find(name: str) -> Slice:
    """Returns the slice with an accelerator type ("v4-32"); "v5e-16" means "v5litepod-16".

    Raises:
      ValueError: no slice has this name; the message lists the closest names.
    """
    slices, (prefix, _, size) = all_slices(), name.strip().lower().rpartition("-")
    prefix = next(
        (each for each, generation in GENERATIONS.items() if prefix == generation["alias"]), prefix
    )
    if (found := slices.get(f"{prefix}-{size}")) is not None:
        return found
    if prefix in GENERATIONS and size.isdecimal():
        sizes = [int(each.rpartition("-")[2]) for each in slices if each.startswith(f"{prefix}-")]
        nearest = sorted(sorted(sizes, key=lambda each: abs(each - int(size)))[:2])
        unit = "TensorCores, two per chip" if GENERATIONS[prefix]["cores_in_name"] == 2 else "chips"
        closest = ", ".join(f"{prefix}-{each}" for each in nearest) + f" (the number counts {unit})"
    else:
        closest = ", ".join(difflib.get_close_matches(f"{prefix}-{size}", slices, n=5, cutoff=0.0))
    raise ValueError(f"unknown TPU accelerator type {name!r}; closest matches: {closest}")


def print_slice() -> None:
    """Prints the fields of a slice, or the names of all slices; wrong arguments end with one line
    and status 2.
    """
    fields = [field.name for field in dataclasses.fields(Slice)] + ["hosts", "devices"]
    parser = argparse.ArgumentParser(description="Prints the fields of a Cloud TPU slice.")
    parser.add_argument(
        "name", nargs="?", help="accelerator type of the slice, such as v4-32 or v5e-16"
    )
    parser.add_argument(
        "field", nargs="*", help=f"fields to print in one line, out of: {', '.join(fields)}"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the names of all slices, one per line"
    )
    arguments = parser.parse_args()
    if arguments.list:
        print(*all_slices(), sep="\n")
        return
    unknown = [field for field in arguments.field if field not in fields]
    try:
        if unknown:
            raise ValueError(
                f"a TPU slice has no field {unknown[0]!r}: choose from {', '.join(fields)}"
            )
        found = find(arguments.name or "")
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    values = {
        field: "none" if getattr(found, field) is None else getattr(found, field)
        for field in fields
    }
    if arguments.field:
        print(*map(values.get, arguments.field))
    else:
        print(*(f"{field}: {value}" for field, value in values.items()), sep="\n")


if __name__ == "__main__":
    print_slice()
