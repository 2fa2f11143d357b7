"""Meshes over described TPU slices: every split consists of boxes of neighbours."""

import functools
import importlib
import math
import random
import types

import jax
import numpy as np
import pytest

from configs import chinchilla, hf
from launch.lib.experiment import config_mesh
from launch.lib.fields import ExperimentConfig
from specsamp.jax_names import topologies
from specsamp.mesh import slices, torus
from specsamp.mesh.layout import make_mesh
from specsamp.mesh.sharded import draft_layout
from specsamp.tpu.topology import described_mesh
from support import extras
from support.refusals import refusal
from support.run_script import only_shared_flags
from support.training import quiet

pytestmark = extras.needs("libtpu")


def topology_of(found):
    chip = found.name.partition("-")[0].replace("v5litepod", "v5e")
    return f"{chip}:{found.topology}"


SOLD = {topology_of(found): found for found in slices.all_slices().values()}
SMALL = [topology for topology, found in SOLD.items() if found.chips <= 256]
SAMPLE = ["v4:8x8x12", "v5p:4x4x116", "v5p:12x16x20", "tpu7x:8x12x12"]
NOT_SOLD = ["v4:4x4x20", "v4:2x2x8", "v5e:2x8", "v6e:4x16"]


@functools.cache
def devices(topology):
    """Returns the devices of a described slice, shuffled."""
    found = described_mesh(topology).devices.ravel().tolist()
    random.Random(topology).shuffle(found)
    return found


@functools.cache
def place(device):
    return (*device.coords, device.core_on_chip)


def places(mesh):
    """Returns chips along x, y, z and devices of a chip, ``[..., 4]``."""
    return np.array([place(device) for device in mesh.devices.flat]).reshape(*mesh.devices.shape, 4)


def ids(mesh):
    return [device.id for device in mesh.devices.flat]


def are_boxes(parts_ND4):
    """Returns whether the devices of each part, all different, fill a box."""
    sides = parts_ND4.max(axis=1) - parts_ND4.min(axis=1) + 1
    return (sides.prod(axis=1) == parts_ND4.shape[1]).all()


def divisors(number):
    return [part for part in range(1, number + 1) if number % part == 0]


def splits(count):
    """Returns data, replica and model of all meshes with two and three axes."""
    copies = [(count // copy, copy) for copy in divisors(count)]
    two = [(data, 1, copy) for data, copy in copies]
    return two + [(d, copy // m, m) for d, copy in copies for m in divisors(copy) if 1 < m < copy]


def mesh_of(topology, data, replica, model):
    copy = {"draft_model_parallelism": model} if replica > 1 else {}
    return make_mesh(data, replica * model, **copy, devices=devices(topology))


def check_splits(topology, chosen):
    for data, replica, model in chosen:
        mesh = mesh_of(topology, data, replica, model)
        shape = (data, replica, model) if replica > 1 else (data, model)
        assert tuple(mesh.shape.values()) == shape
        assert set(ids(mesh)) == {device.id for device in devices(topology)}
        for size in (replica * model, model):
            assert are_boxes(places(mesh).reshape(-1, size, 4)), (topology, data, replica, model)


def test_splits_up_to_256_chips_have_neighbours():
    count = 0
    for topology in SMALL:
        chosen = splits(SOLD[topology].devices)
        check_splits(topology, chosen)
        count += len(chosen)
    print(f"{count} splits of {len(SMALL)} slices")
    assert (len(SMALL), count) == (40, 909)


@pytest.mark.parametrize("topology", [*SAMPLE, *NOT_SOLD])
def test_larger_and_unsold_slices_have_neighbours(topology):
    chosen = splits(len(devices(topology)))
    check_splits(topology, random.Random(topology).sample(chosen, min(6, len(chosen))))


@pytest.mark.parametrize(
    "topology, data, replica, model, copy_box, model_box",
    [
        ("v5e:16x16", 16, 1, 16, (4, 4, 1), (4, 4, 1)),  # not a line, see `specsamp.mesh.torus`
        ("v5e:16x16", 8, 1, 32, (16, 2, 1), (16, 2, 1)),  # 9 hops with wraparound, 8 x 4 has 10
        ("v6e:8x8", 1, 4, 16, (8, 8, 1), (4, 4, 1)),
        ("v4:4x4x4", 8, 1, 8, (2, 2, 2), (2, 2, 2)),
        ("v4:4x4x4", 4, 1, 16, (4, 4, 1), (4, 4, 1)),  # all-reduces over whole axes run at once
        ("v4:2x4x4", 2, 2, 8, (1, 4, 4), (1, 4, 2)),
        ("tpu7x:2x2x2", 4, 1, 4, (2, 1, 1), (2, 1, 1)),  # both devices of a chip first
    ],
)
def test_boxes_have_the_fewest_hops(topology, data, replica, model, copy_box, model_box):
    found = places(mesh_of(topology, data, replica, model))
    for size, box in ((replica * model, copy_box), (model, model_box)):
        first = found.reshape(-1, size, 4)[0, :, :3]
        assert tuple((first.max(axis=0) - first.min(axis=0) + 1).tolist()) == box


@pytest.mark.parametrize("topology", ["v4:4x4x8", "v5p:2x2x4", "v6e:4x8", "tpu7x:2x2x4"])
def test_mesh_ignores_the_order_of_devices(topology):
    given = devices(topology)
    for data in divisors(len(given)):
        meshes = [make_mesh(data, devices=order) for order in (given, given[::-1])]
        assert ids(meshes[0]) == ids(meshes[1]) == ids(described_mesh(topology, data))


def test_box_devices_follow_a_ring():
    for topology, data in (("v4:4x4x4", 8), ("v5p:4x4x8", 2), ("v5p:2x2x4", 1), ("v6e:8x8", 4)):
        parts = places(make_mesh(data, devices=devices(topology)))
        steps = np.abs(parts - np.roll(parts, 1, axis=1)).sum(axis=-1)
        assert (steps == 1).all(), topology


def test_closed_axes_are_in_row_major_order():
    for topology, data, box in (("v4:4x4x4", 4, (4, 4)), ("v5e:2x2", 1, (2, 2))):
        first = places(make_mesh(data, devices=devices(topology)))[0]
        expected = [(x, y) for y in range(box[1]) for x in range(box[0])]
        assert [tuple(place[:2]) for place in first.tolist()] == expected


@pytest.mark.parametrize(
    "topology, config, changes",
    [
        ("v6e:16x16", (chinchilla, "v6e-256"), {}),
        ("v6e:16x16", (chinchilla, "v6e-256"), dict(drafter="early_exit", exit_layer=10)),
        ("v5p:4x4x8", (chinchilla, "v5p-256"), {}),
        ("v6e:4x4", (hf, "llama-70b"), {}),
        ("v5e:2x2", (hf, "llama-8b-eagle3"), dict(mesh=dict(model=4, draft_model_parallelism=1))),
    ],
)
def test_configuration_has_the_mesh_of_its_report(topology, config, changes, monkeypatch):
    module, argument = config
    monkeypatch.setattr(jax, "devices", lambda: devices(topology))
    config = module.get_config(argument)
    config.update(changes)
    config = ExperimentConfig.from_config_dict(config)
    mesh, fields = config_mesh(config), config.mesh
    with only_shared_flags():
        report = importlib.import_module("launch.compile_report")
    for name, given in dict(_TOPOLOGY=topology, _SLOTS=2048).items():
        monkeypatch.setattr(report, name, types.SimpleNamespace(value=given))
    programs = report.programs_of(config, quiet())
    described = programs.mesh
    assert ids(mesh) == ids(described) and mesh.shape == described.shape
    of_draft = fields.draft_devices if config.word.draft else None
    assert programs.draft.layout.over == draft_layout(mesh, of_draft).over
    assert are_boxes(places(mesh).reshape(fields.data, fields.model, 4))


def test_several_slices_are_refused_naming_replicas():
    options = dict(chips_per_host_bounds=(2, 2, 1), num_slices=2)
    both = topologies.get_topology_desc("v5p:2x2x1", platform="tpu", **options).devices
    with pytest.raises(ValueError) as refused:
        make_mesh(2, 4, devices=both)
    assert str(refused.value) == (
        "8 devices lie in 2 TPU slices, and a mesh is of one: start each slice by itself, with "
        "--replica=0/2 to --replica=1/2"
    )
    for number in (0, 1):
        one = [device for device in both if device.slice_index == number]
        assert set(make_mesh(2, 2, devices=one).devices.flat) == set(one)


@pytest.mark.parametrize(
    "keep, message",
    [
        (lambda x, y: (x, y) != (1, 2), "15 TPU devices has 15 of the 16 in a box of 4 x 4 x 1"),
        (lambda x, y: x in (0, 2), "8 TPU devices has 8 of the 12 in a box of 3 x 4 x 1 chips"),
    ],
)
def test_incomplete_slice_is_refused_with_both_counts(keep, message):
    kept = [device for device in devices("v6e:4x4") if keep(*device.coords[:2])]
    with refusal(message):
        make_mesh(1, len(kept), devices=kept)


def test_boxes_that_do_not_divide_are_refused():
    with refusal("parts of 12 and 12 devices do not divide a slice of 16"):
        torus.find_boxes((1, 4, 4), 12, 12)


def test_part_of_a_slice_has_a_mesh():
    """The coordinates of a part need not begin at 0."""
    corner = [device for device in devices("v4:4x4x4") if min(device.coords) >= 2]
    mesh = make_mesh(2, 4, devices=corner)
    assert set(mesh.devices.flat) == set(corner)
    assert are_boxes(places(mesh)) and math.prod(mesh.devices.shape) == 8
