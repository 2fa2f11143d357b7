"""Builds meshes of TPU slices that are described, not present: `libtpu` has the whole compiler and
needs no TPU.

mesh = described_mesh("v4:2x2x4", data=1)       # 16 chips; for shapes with shardings only
"""

import dataclasses
import math
import os
import re
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from specsamp.jax_names import topologies
from specsamp.mesh import slices
from specsamp.mesh.layout import make_mesh
from specsamp.mesh.torus import wraps
from specsamp.tpu import schedules


@dataclasses.dataclass(frozen=True)
class Chip:
    """Speeds and sizes of one chip; memory as in `specsamp.mesh.slices`."""

    hbm_bytes: int
    hbm_bytes_per_second: float
    flops_per_second: float  # bfloat16; cloud.google.com/tpu/docs
    link_bytes_per_second: float  # of one link to a neighbour, one way; "How to Scale Your Model"
    # Of the TensorCore; Jouppi et al. (arXiv 2304.01433) for v4, "How to Scale Your Model" for
    # later chips.
    clock_hz: float
    devices: int = 1  # as JAX counts them
    options: tuple[tuple[str, object], ...] = ()  # that the description of the slice needs

    @property
    def has_clock(self) -> bool:
        """Returns whether cycles have a time; otherwise bounds are of streaming alone."""
        return math.isfinite(self.clock_hz)


def _cloud_chip(prefix: str, *rest: float, **options: object) -> Chip:
    """Takes the memory of a chip from the catalogue of slices."""
    generation = slices.GENERATIONS[prefix]
    return Chip(
        generation["hbm_gib"] * slices.GIB, generation["hbm_bytes_per_second"], *rest, **options
    )


CHIPS = {
    "v3": Chip(32 * slices.GIB, 900e9, 123e12, 1e11, 0.94e9, devices=2),  # no longer sold as slices
    # "megacore": the two cores of a chip are one device, as on a pod.
    "v4": _cloud_chip("v4", 275e12, 4.5e10, 1.05e9, options=(("chip_config_name", "megacore"),)),
    "v5e": _cloud_chip("v5litepod", 197e12, 4.5e10, 1.5e9),
    "v5p": _cloud_chip("v5p", 459e12, 9e10, 1.75e9),
    "v6e": _cloud_chip("v6e", 918e12, 9e10, 1.75e9),
    # No source for its clock: cycles have no time.
    "tpu7x": _cloud_chip("tpu7x", 2307e12, 9e10, math.inf, devices=2),
}
KINDS = {  # of chips, by the name that JAX gives their devices
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
FLAT = ("v3", "v5e", "v6e")  # chips whose slices have two axes
EXAMPLES = "v3:4x4, v4:2x2x4, v5e:4x4, v5p:2x2x4, v6e:4x4, tpu7x:2x2x1"


def parse(topology: str) -> tuple[Chip, tuple[int, ...]]:
    """Splits a topology such as "v4:2x2x4" into the chip and the number of chips along each axis,
    or raises ValueError.
    """
    match = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*){1,2})", topology, re.ASCII)
    if match is None or match[1] not in CHIPS:
        chips = ", ".join(CHIPS)
        raise ValueError(
            f"no TPU topology {topology!r}: give a chip ({chips}) and a shape, such as {EXAMPLES}"
        )
    sizes = tuple(map(int, match[2].split("x")))
    if (len(sizes) == 2) != (match[1] in FLAT):
        axes = "two axes" if match[1] in FLAT else "three axes"
        raise ValueError(f"slices of {match[1]} have {axes}; got {topology!r}: try {EXAMPLES}")
    return CHIPS[match[1]], sizes


def topology_of(devices: Sequence[Any]) -> str:
    """Returns the topology that TPU devices fill, such as "v5e:2x4"; ValueError for
    unknown chips.
    """
    kind = devices[0].device_kind
    if kind not in KINDS:
        raise ValueError(f"no TPU that is known here: {kind!r}; known are {', '.join(KINDS)}")
    chip = KINDS[kind]
    axes = zip(*(device.coords for device in devices))
    sizes = [max(places) - min(places) + 1 for places in axes]
    return f"{chip}:{'x'.join(map(str, sizes[:2] if chip in FLAT else sizes))}"


def described_mesh(
    topology: str,
    data: int = 1,
    *,
    draft_model_parallelism: int | None = None,
    num_kv_heads: int | None = None,
    rows: int | None = None,
) -> Mesh:
    """Builds a mesh over the devices of a slice that need not exist, for sharded shapes and
    compiled programs.

    Args:
      data: data shards; the devices of a shard hold one replica of the target together.
      draft_model_parallelism, num_kv_heads, rows: see `make_mesh`.

    Raises:
      ValueError: an unknown topology, ``data`` does not divide its devices, or this machine has no
        libtpu.
    """
    chip, sizes = parse(topology)
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # before libtpu looks for a TPU
    schedules.schedule_folder()
    options = dict(chip.options)
    if len(sizes) == 3:
        options |= {"chips_per_host_bounds": (2, 2, 1), "num_slices": 1, "wrap": wraps(sizes)}
    if math.prod(sizes) == 1:  # a host with one chip is not the usual one
        options |= {"chips_per_host_bounds": (1, 1, 1)}
    try:
        described = topologies.get_topology_desc(topology, platform="tpu", **options)
    except Exception as error:  # libtpu raises several kinds for shapes that it refuses
        if isinstance(error, RuntimeError) and (
            "not installed" in str(error) or "libtpu" in str(error)
        ):
            missing = "no libtpu here: pip install libtpu; it exists for Linux on x86-64 only"
            raise ValueError(missing) from error
        raise ValueError(
            f"the compiler refuses the topology {topology!r} ({error}): try one of {EXAMPLES}"
        ) from error
    count = math.prod(sizes) * chip.devices
    if len(described.devices) != count:
        raise ValueError(
            f"{topology!r} should have {count} devices, the compiler describes "
            f"{len(described.devices)}"
        )
    if data < 1 or count % data:
        raise ValueError(f"data {data} does not divide the {count} devices of {topology!r}")
    return make_mesh(
        data,
        count // data,
        draft_model_parallelism=draft_model_parallelism,
        num_kv_heads=num_kv_heads,
        rows=rows,
        devices=described.devices,
    )
