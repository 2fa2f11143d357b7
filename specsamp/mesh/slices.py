"""The TPU slices that Google sells: names, topologies, hosts and memory.

    python3 specsamp/mesh/slices.py v4-32                  # all that is known of it
    python3 specsamp/mesh/slices.py v4-32 topology hosts   # 2x2x4 4

Run as a file it needs no installed package, no JAX and no newer Python than 3.9: launch/tpu asks it on the
machine that orders the slice.

Sources: the pages v4, v5e, v5p, v6e, tpu7x and runtimes of cloud.google.com/tpu/docs (topologies, memory,
images), plan-tpus of cloud.google.com/kubernetes-engine/docs/concepts (machine types, node labels), and the
table of slices in xpk 1.16, Google's launcher for GKE. Where the pages stop at examples, what is here are the
sizes whose names have a default topology in xpk, and v4-384, which Google's MaxText runs on.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import math
import sys
from collections.abc import Iterable

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips that are ordered together and joined by their own network.

    A host is one virtual machine of the slice, and one JAX process. (Google's pages also call the physical
    machine a host, which may hold two of these.)
    """

    name: str  # the accelerator type, "v4-32"
    topology: str  # chips along each axis, "2x2x4"
    chips: int
    chips_per_host: int
    devices_per_chip: int  # as JAX counts them
    runtime_version: str | None  # image of the hosts; None: GKE only, no queued resources
    gke_accelerator: str  # value of the node label cloud.google.com/gke-tpu-accelerator
    gke_machine_type: str
    hbm_bytes: int  # of one chip; about 2% of it is not for programs
    hbm_bytes_per_second: float  # of one chip

    @property
    def hosts(self) -> int:
        return self.chips // self.chips_per_host

    @property
    def devices(self) -> int:
        return self.chips * self.devices_per_chip

    @property
    def shape(self) -> tuple[int, ...]:
        return _shape(self.topology)


@dataclasses.dataclass(frozen=True)
class Generation:
    """What the slices of one kind of chip share."""

    prefix: str  # of the accelerator type
    alias: str  # what people also call it
    topologies: tuple[str, ...]
    counted: int  # of N in the name, per chip: two where N counts TensorCores, one where it counts chips
    devices_per_chip: int
    runtime_version: str | None
    gke_accelerator: str
    gke_machine_type: str  # with {} for the number of chips
    hbm_bytes: int
    hbm_bytes_per_second: float

    def slice(self, topology: str) -> Slice:
        chips = math.prod(_shape(topology))
        # Hosts of slices in a plane are cut to the chips of small slices; larger slices are made of fours.
        chips_per_host = chips if chips <= 8 and topology.count("x") == 1 else min(chips, 4)
        return Slice(
            name=f"{self.prefix}-{chips * self.counted}",
            topology=topology,
            chips=chips,
            chips_per_host=chips_per_host,
            devices_per_chip=self.devices_per_chip,
            runtime_version=self.runtime_version,
            gke_accelerator=self.gke_accelerator,
            gke_machine_type=self.gke_machine_type.format(chips_per_host),
            hbm_bytes=self.hbm_bytes,
            hbm_bytes_per_second=self.hbm_bytes_per_second,
        )


def _shape(topology: str) -> tuple[int, ...]:
    return tuple(int(edge) for edge in topology.split("x"))


def _cubes(counts: Iterable[int]) -> tuple[str, ...]:
    """Topologies made of so many cubes of 4x4x4 chips.

    A name stands for the shape nearest to a cube; no edge is longer than 256 chips.
    """
    topologies = []
    for count in counts:
        pairs = itertools.combinations_with_replacement(range(1, math.isqrt(count) + 1), 2)
        shapes = [(a, b, count // (a * b)) for a, b in pairs if count % (a * b) == 0]
        shapes = [(a, b, c) for a, b, c in shapes if b <= c <= 64]
        if shapes:
            topologies.append("x".join(str(4 * edge) for edge in min(shapes, key=sum)))
    return tuple(topologies)


_PART_OF_A_CUBE = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_PLANE = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")

GENERATIONS = (
    Generation(
        prefix="v4", alias="v4", counted=2, devices_per_chip=1,
        topologies=_PART_OF_A_CUBE + _cubes((1, 2, 3, 4, 8, 12, 16, 32)),
        runtime_version="tpu-ubuntu2204-base",
        gke_accelerator="tpu-v4-podslice", gke_machine_type="ct4p-hightpu-{}t",
        hbm_bytes=32 * GIB, hbm_bytes_per_second=1200e9,
    ),
    Generation(
        prefix="v5litepod", alias="v5e", counted=1, devices_per_chip=1,
        topologies=_PLANE,
        runtime_version="v2-alpha-tpuv5-lite",
        gke_accelerator="tpu-v5-lite-podslice", gke_machine_type="ct5lp-hightpu-{}t",
        hbm_bytes=16 * GIB, hbm_bytes_per_second=819e9,
    ),
    Generation(
        prefix="v5p", alias="v5p", counted=2, devices_per_chip=1,
        topologies=_PART_OF_A_CUBE + _cubes(range(1, 97)),  # the page: "the largest job is a 96 cube job"
        runtime_version="v2-alpha-tpuv5",
        gke_accelerator="tpu-v5p-slice", gke_machine_type="ct5p-hightpu-{}t",
        hbm_bytes=95 * GIB, hbm_bytes_per_second=2765e9,
    ),
    Generation(
        prefix="v6e", alias="trillium", counted=1, devices_per_chip=1,
        topologies=_PLANE,
        runtime_version="v2-alpha-tpuv6e",
        gke_accelerator="tpu-v6e-slice", gke_machine_type="ct6e-standard-{}t",
        hbm_bytes=32 * GIB, hbm_bytes_per_second=1638e9,
    ),
    Generation(
        # JAX sees the two halves of a chip as two devices; the page says that the Cloud TPU API, and with it
        # queued resources, does not know this generation.
        prefix="tpu7x", alias="ironwood", counted=2, devices_per_chip=2,
        topologies=_PART_OF_A_CUBE + _cubes((*range(1, 97), 108, 128, 140, 144)),
        runtime_version=None,
        gke_accelerator="tpu7x", gke_machine_type="tpu7x-standard-{}t",
        hbm_bytes=192 * GIB, hbm_bytes_per_second=7380e9,
    ),
)  # fmt: skip


def all_slices() -> dict[str, Slice]:
    """By name, small ones of a generation first."""
    slices = [generation.slice(topology) for generation in GENERATIONS for topology in generation.topologies]
    return {s.name: s for s in slices}


def find(name: str) -> Slice:
    """The slice with this accelerator type; "v5e-16" is taken for "v5litepod-16".

    Raises:
      ValueError: nobody sells it; the message has the nearest names.
    """
    slices, (prefix, _, size) = all_slices(), name.strip().lower().rpartition("-")
    generation = next((g for g in GENERATIONS if prefix in (g.prefix, g.alias)), None)
    if generation is None or not size.isdecimal():
        raise ValueError(f"nobody sells a TPU slice {name!r}; the nearest: {_alike(name, slices)}")
    if (known := slices.get(f"{generation.prefix}-{int(size)}")) is not None:
        return known
    sizes = [generation.slice(topology).chips * generation.counted for topology in generation.topologies]
    below, above = [n for n in sizes if n < int(size)], [n for n in sizes if n > int(size)]
    nearest = ", ".join(f"{generation.prefix}-{n}" for n in below[-1:] + above[:1])
    counts = "TensorCores, two to a chip" if generation.counted == 2 else "chips"
    raise ValueError(f"nobody sells a TPU slice {name!r}; the nearest: {nearest} (the number counts {counts})")


def _alike(name: str, slices: dict[str, Slice]) -> str:
    """Names that are spelled alike, or whose topology is."""
    spellings: dict[str, list[str]] = {}
    for s in slices.values():
        generation = s.name.rpartition("-")[0]
        for spelling in (s.name, s.topology, f"{generation}-{s.topology}", f"{generation}:{s.topology}"):
            spellings.setdefault(spelling, []).append(s.name)
    close = difflib.get_close_matches(name.strip().lower(), spellings, n=3, cutoff=0.0)
    names = dict.fromkeys(itertools.chain.from_iterable(spellings[spelling] for spelling in close))
    return ", ".join(list(names)[:5])


def main(arguments: list[str] | None = None) -> None:
    fields = [field.name for field in dataclasses.fields(Slice)] + ["hosts", "devices"]
    parser = argparse.ArgumentParser(description="What is known of a TPU slice.")
    parser.add_argument("name", help="the accelerator type, such as v4-32")
    parser.add_argument("field", nargs="*", help=f"print only the values of these: {', '.join(fields)}")
    parsed = parser.parse_args(arguments)
    if unknown := [field for field in parsed.field if field not in fields]:
        sys.exit(f"a TPU slice has no {unknown[0]!r}: choose from {', '.join(fields)}")
    try:
        found = find(parsed.name)
    except ValueError as error:
        sys.exit(str(error))
    value = lambda field: "none" if getattr(found, field) is None else getattr(found, field)
    if parsed.field:
        print(*(value(field) for field in parsed.field))
    else:
        print(*(f"{field}: {value(field)}" for field in fields), sep="\n")


if __name__ == "__main__":
    main()
