"""The catalogue of slices: what it holds, and what it refuses with the closest names."""

import math

import pytest

from specsamp.mesh import slices


@pytest.mark.parametrize(
    "name, topology, chips, hosts, runtime_version",
    [
        ("v4-32", "2x2x4", 16, 4, "tpu-ubuntu2204-base"),
        ("v5litepod-1", "1x1", 1, 1, "v2-alpha-tpuv5-lite"),
        ("v5p-1152", "4x12x12", 576, 144, "v2-alpha-tpuv5"),
        ("v6e-8", "2x4", 8, 1, "v2-alpha-tpuv6e"),
        ("tpu7x-18432", "16x24x24", 9216, 2304, None),
    ],
)
def test_slices_are_those_of_the_documentation(name, topology, chips, hosts, runtime_version):
    found = slices.find(name)
    assert (found.name, found.topology, found.chips, found.hosts) == (name, topology, chips, hosts)
    assert found.runtime_version == runtime_version


def test_every_slice_agrees_with_itself():
    known = slices.all_slices()
    assert len(known) == sum(len(each["topologies"]) for each in slices.GENERATIONS.values()) == 220
    for name, found in known.items():
        assert slices.find(name) == found
        shape = [int(size) for size in found.topology.split("x")]
        assert math.prod(shape) == found.chips == found.hosts * found.chips_per_host
        assert sorted(shape) == shape or found.topology == "2x2x1"
        assert int(name.rpartition("-")[2]) in (found.chips, 2 * found.chips)


def test_names_that_people_use_are_understood():
    assert slices.find("v5e-16").name == slices.find(" V5LITEPOD-16 ").name == "v5litepod-16"
    assert slices.find("ironwood-8").name == "tpu7x-8"
