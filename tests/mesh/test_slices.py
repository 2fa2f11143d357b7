"""The catalogue of slices: its entries, and names in common use."""

import math

from specsamp.mesh import slices
from support.refusals import refused_calls


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


test_refused_slices = refused_calls(
    {
        r"type 'v4-30'; closest matches: v4-16, v4-32 \(.* TensorCores": lambda: slices.find(
            "v4-30"
        ),
        r"'v5e-2'; .*: v5litepod-1, v5litepod-4 \(.* chips\)": lambda: slices.find("v5e-2"),
        "unknown TPU accelerator type 'v5p'; closest matches: v5p-": lambda: slices.find("v5p"),
    }
)
