"""The catalogue of slices: its entries, and names in common use."""

import math

from specsamp.mesh import slices


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
