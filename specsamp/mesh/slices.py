"""The catalogue of Cloud TPU slices that Google sells: names, topologies, hosts and memory.

    find("v4-32").topology        # "2x2x4"
    find("v5e-16").hosts          # 4

This file imports the standard library only and runs on Python 3.9: launch/tpu/slices.py prints it on the machine
that orders a slice, where specsamp need not be installed.

Sources: the pages v4, v5e, v5p, v6e, tpu7x and runtimes of cloud.google.com/tpu/docs (topologies, memory,
images), plan-tpus of cloud.google.com/kubernetes-engine/docs/concepts (machine types, node labels), and the
table of slices in xpk 1.16, Google's launcher for GKE. Where those pages give only examples, the catalogue has
the sizes whose names have a default topology in xpk, and v4-384, which Google's MaxText runs on.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterable

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips that are ordered together and share a network of their own.

    A host is one virtual machine of the slice and runs one JAX process. (Google's pages also call the physical
    machine a host; it may hold two of these virtual machines.)
    """

    name: str  # the accelerator type, such as "v4-32"
    topology: str  # chips along each axis of the network, such as "2x2x4"
    chips: int
    chips_per_host: int
    devices_per_chip: int  # as JAX counts devices
    runtime_version: str | None  # image of the hosts; None where only GKE sells the slice, without queued resources
    gke_accelerator: str  # value of the node label cloud.google.com/gke-tpu-accelerator
    gke_machine_type: str
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

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the number of chips along each axis."""
        return parse_topology(self.topology)


@dataclasses.dataclass(frozen=True)
class Generation:
    """Facts that all slices of one kind of chip have in common."""

    prefix: str  # of the accelerator type, such as "v5litepod"
    alias: str  # another name in use, such as "v5e"
    topologies: tuple[str, ...]
    cores_in_name: int  # what a chip adds to the number in the name: 2 if it counts TensorCores, 1 if it counts chips
    devices_per_chip: int
    runtime_version: str | None
    gke_accelerator: str
    gke_machine_type: str  # with {} for the chips of a host
    hbm_bytes: int
    hbm_bytes_per_second: float

    def slice(self, topology: str) -> Slice:
        """Returns the slice of this generation with a topology such as "2x2x4"."""
        chips = math.prod(parse_topology(topology))
        # A flat slice of up to eight chips is one host; all other slices consist of hosts with four chips.
        chips_per_host = chips if chips <= 8 and topology.count("x") == 1 else min(chips, 4)
        return Slice(
            name=f"{self.prefix}-{chips * self.cores_in_name}",
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


def parse_topology(topology: str) -> tuple[int, ...]:
    """Parses "2x2x4" to (2, 2, 4)."""
    return tuple(int(edge) for edge in topology.split("x"))


def _cubes(counts: Iterable[int]) -> tuple[str, ...]:
    """Returns one topology for each count of 4x4x4 cubes: the shape that is nearest to a cube.

    No edge is longer than 256 chips; a count that has no such shape is left out.
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
        prefix="v4",
        alias="v4",
        cores_in_name=2,
        devices_per_chip=1,
        topologies=_PART_OF_A_CUBE + _cubes((1, 2, 3, 4, 8, 12, 16, 32)),
        runtime_version="tpu-ubuntu2204-base",
        gke_accelerator="tpu-v4-podslice",
        gke_machine_type="ct4p-hightpu-{}t",
        hbm_bytes=32 * GIB,
        hbm_bytes_per_second=1200e9,
    ),
    Generation(
        prefix="v5litepod",
        alias="v5e",
        cores_in_name=1,
        devices_per_chip=1,
        topologies=_PLANE,
        runtime_version="v2-alpha-tpuv5-lite",
        gke_accelerator="tpu-v5-lite-podslice",
        gke_machine_type="ct5lp-hightpu-{}t",
        hbm_bytes=16 * GIB,
        hbm_bytes_per_second=819e9,
    ),
    Generation(
        prefix="v5p",
        alias="v5p",
        cores_in_name=2,
        devices_per_chip=1,
        topologies=_PART_OF_A_CUBE + _cubes(range(1, 97)),  # the page: "the largest job is a 96 cube job"
        runtime_version="v2-alpha-tpuv5",
        gke_accelerator="tpu-v5p-slice",
        gke_machine_type="ct5p-hightpu-{}t",
        hbm_bytes=95 * GIB,
        hbm_bytes_per_second=2765e9,
    ),
    Generation(
        prefix="v6e",
        alias="trillium",
        cores_in_name=1,
        devices_per_chip=1,
        topologies=_PLANE,
        runtime_version="v2-alpha-tpuv6e",
        gke_accelerator="tpu-v6e-slice",
        gke_machine_type="ct6e-standard-{}t",
        hbm_bytes=32 * GIB,
        hbm_bytes_per_second=1638e9,
    ),
    Generation(
        # JAX sees the two halves of a chip as two devices; the page says that the Cloud TPU API, and with it
        # queued resources, does not know this generation.
        prefix="tpu7x",
        alias="ironwood",
        cores_in_name=2,
        devices_per_chip=2,
        topologies=_PART_OF_A_CUBE + _cubes((*range(1, 97), 108, 128, 140, 144)),
        runtime_version=None,
        gke_accelerator="tpu7x",
        gke_machine_type="tpu7x-standard-{}t",
        hbm_bytes=192 * GIB,
        hbm_bytes_per_second=7380e9,
    ),
)


def all_slices() -> dict[str, Slice]:
    """Returns all slices by name, each generation from small to large."""
    slices = [generation.slice(topology) for generation in GENERATIONS for topology in generation.topologies]
    return {s.name: s for s in slices}


def find(name: str) -> Slice:
    """Returns the slice with an accelerator type such as "v4-32"; "v5e-16" means "v5litepod-16".

    Raises:
      ValueError: there is no such slice; the message lists the closest names.
    """
    slices, (prefix, _, size) = all_slices(), name.strip().lower().rpartition("-")
    generation = next((g for g in GENERATIONS if prefix in (g.prefix, g.alias)), None)
    if generation is None or not size.isdecimal():
        raise ValueError(f"unknown TPU accelerator type {name!r}; closest matches: {_similar_names(name, slices)}")
    if (known := slices.get(f"{generation.prefix}-{int(size)}")) is not None:
        return known
    sizes = [generation.slice(topology).chips * generation.cores_in_name for topology in generation.topologies]
    below, above = [n for n in sizes if n < int(size)], [n for n in sizes if n > int(size)]
    closest = ", ".join(f"{generation.prefix}-{n}" for n in below[-1:] + above[:1])
    unit = "TensorCores, two per chip" if generation.cores_in_name == 2 else "chips"
    raise ValueError(f"unknown TPU accelerator type {name!r}; closest matches: {closest} (the number counts {unit})")


def _similar_names(name: str, slices: dict[str, Slice]) -> str:
    """Lists up to five slices whose name or topology is spelled like ``name``."""
    spellings: dict[str, list[str]] = {}
    for s in slices.values():
        generation = s.name.rpartition("-")[0]
        for spelling in (s.name, s.topology, f"{generation}-{s.topology}", f"{generation}:{s.topology}"):
            spellings.setdefault(spelling, []).append(s.name)
    close = difflib.get_close_matches(name.strip().lower(), spellings, n=3, cutoff=0.0)
    names = dict.fromkeys(itertools.chain.from_iterable(spellings[spelling] for spelling in close))
    return ", ".join(list(names)[:5])
