"""The paths of collectives over boxes of chips, by which `specsamp.mesh.torus` chooses boxes."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specsamp.models.compiling import ON_TPU
from specsamp.tpu.topology import described_mesh
from support import extras

pytestmark = extras.needs("libtpu")
ROWS, WIDTH = 8, 8192  # activations of Chinchilla at batch 8


def cut(topology, box):
    """Returns a mesh whose axis ``model`` is a box of these sides, in row-major order, z first."""

    def key(device):
        return [place // side for place, side in zip(device.coords, box)], device.coords

    ordered = sorted(described_mesh(topology).devices.flat, key=key)
    return Mesh(np.array(ordered).reshape(-1, math.prod(box)), ("data", "model"))


def compiled(mesh, collective, split=PartitionSpec("data")):
    """Returns the compiler's configuration of a collective over the axis ``model``."""

    def body(x_RD):
        return collective(x_RD * jax.lax.axis_index("model").astype(x_RD.dtype))

    specs = {"in_specs": split, "out_specs": PartitionSpec("data")}
    over = jax.shard_map(body, mesh=mesh, check_vma=False, **specs)
    shape = (mesh.shape["data"] * ROWS, WIDTH)
    sharding = NamedSharding(mesh, split)
    x_RD = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
    program = jax.jit(over).lower(x_RD).compile(compiler_options=dict(ON_TPU))
    lines = program.as_text().splitlines()
    line = next(line for line in lines if "collective_algorithm_config" in line)
    config, _ = json.JSONDecoder().raw_decode(line.partition("backend_config=")[2])
    return config["collective_algorithm_config"]


def all_reduce(mesh):
    return compiled(mesh, lambda x_RD: jax.lax.psum(x_RD, "model"))["debug"]


def rings(mesh):
    """Returns the sizes of the successive rings of an all-reduce, in ascending order."""
    text = all_reduce(mesh)
    found = re.findall(r"\{([\d ]+)\}", text.partition("cores:")[2].partition(" nophase")[0])
    sizes = {tuple(sorted(map(int, part.split()))) for part in found}
    assert len(sizes) == 1  # all parts of the data take equal rings
    return sizes.pop()


@pytest.mark.parametrize(
    "topology, box, sizes",
    [
        ("v4:4x4x4", (4, 4, 1), (4, 4)),
        ("v5p:2x4x4", (1, 4, 4), (4, 4)),
        ("v4:4x4x8", (1, 4, 8), (4, 8)),
        ("v4:2x2x4", (2, 2, 4), (2, 2, 4)),
        ("v5e:16x16", (4, 4, 1), (16,)),
    ],
)
def test_rings_of_whole_axes_and_other_boxes(topology, box, sizes):
    assert rings(cut(topology, box)) == sizes


def test_rings_of_v4_and_v5p_follow_the_mesh():
    for topology, is_reordered in (("v4:4x4x4", 0), ("v5p:4x4x4", 0), ("v6e:8x8", 1)):
        assert f"has_reordering_map:{is_reordered}" in all_reduce(described_mesh(topology, 8))
