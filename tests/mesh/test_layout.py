"""The rules of a layout: splits of axes, and refusals."""

import jax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import draft_layout
from support.refusals import refusal, refused_arguments


def test_tensor_parallelism_splits_heads_feed_forward_and_vocabulary():
    layout = Layout.tensor_parallel(make_mesh(2, 4))
    assert layout.spec(P("heads", "embed", "head"), (8, 64, 8)) == P("model")
    assert layout.spec(P("embed", "mlp"), (64, 256)) == P(None, "model")
    assert layout.spec(P("mlp", "embed"), (256, 64)) == P("model")
    assert layout.spec(P("vocab", "embed"), (64, 64)) == P("model")
    assert layout.spec(P("batch", "kv_heads", "slots", "head"), (4, 8, 16, 8)) == P("data", "model")
    assert layout.spec(P("embed"), (64,)) == P()
    assert layout.spec(P(None, None, "vocab"), (1, 5, 64)) == P(None, None, "model")
    assert Layout.replicated(layout.mesh).spec(P("vocab", "embed"), (63, 64)) == P()


def test_few_key_heads_are_split_and_replicated():
    mesh = make_mesh(1, 8, draft_model_parallelism=2)
    assert dict(mesh.shape) == {"data": 1, "replica": 4, "model": 2}
    whole = Layout.tensor_parallel(mesh)

    def by_heads(heads):
        return whole.spec(P("kv_heads"), (heads,))

    assert [by_heads(n) for n in (8, 2, 1, 3)] == [P(("model", "replica")), P("model"), P(), P()]
    assert Layout.tensor_parallel(make_mesh(1, 8)).spec(P("kv_heads"), (4,)) == P()
    made_for_four = make_mesh(1, 8, num_kv_heads=4)
    assert dict(made_for_four.shape) == {"data": 1, "replica": 2, "model": 4}
    assert Layout.tensor_parallel(made_for_four).spec(P("kv_heads"), (4,)) == P("model")
    for heads in (1, 3, 8, 16):
        assert dict(make_mesh(1, 8, num_kv_heads=heads).shape) == {"data": 1, "model": 8}


def test_logit_rows_are_split_when_divisible():
    def shape(rows, **parts):
        return dict(make_mesh(1, 8, rows=rows, **parts).shape)

    assert shape(4) == shape(12) == {"data": 1, "replica": 2, "model": 4}
    assert shape(1) == shape(3) == shape(8) == shape(24) == {"data": 1, "model": 8}
    assert shape(4, num_kv_heads=2) == {"data": 1, "replica": 4, "model": 2}  # kv heads come first
    layout = Layout.tensor_parallel(make_mesh(1, 8, rows=4))
    over = [layout.spec(P("rows", None, None), (rows, 5, 64)) for rows in (1, 4, 8, 12, 6)]
    assert over == [P(), P("model"), P(("model", "replica")), P("model"), P()]
    assert Layout.replicated(layout.mesh).spec(P("rows"), (8,)) == P()


def test_a_draft_on_fewer_ways():
    mesh = make_mesh(2, 4, draft_model_parallelism=2)

    def heads(layout):
        return layout.spec(P("heads"), (8,))

    assert heads(Layout.tensor_parallel(mesh)) == P(("model", "replica"))
    assert [heads(draft_layout(mesh, ways)) for ways in (None, 4, 2, 1)] == [
        P(("model", "replica")),
        P(("model", "replica")),
        P("model"),
        P(),
    ]
    with refusal("draft_model_parallelism 8 needs a mesh made with it"):
        draft_layout(mesh, 8)


def test_too_large_mesh_suggests_a_fitting_one():
    """The heads of the paper's pair do not divide over the 256 chips of a v5e:16x16."""

    def axes(names):
        return {"axis_names": names, "axis_types": (AxisType.Auto,) * len(names)}

    layout = Layout.tensor_parallel(jax.sharding.AbstractMesh((1, 256), **axes(("data", "model"))))
    with pytest.raises(ValueError) as refused:
        layout.spec(P("heads"), (64,))
    assert str(refused.value) == (
        "'heads' has 64 entries, which do not divide over the 256 devices of model: split a target "
        "over 64 (--config.mesh.data=4 --config.mesh.model=64), a draft over 64 "
        "(--config.mesh.draft_model_parallelism=64), or pad the model"
    )
    mesh = jax.sharding.AbstractMesh((2, 4, 32), **axes(("data", "replica", "model")))
    with refusal(
        r"the 128 devices of model x replica: split a target over 64 \(--config.mesh.data"
    ):
        Layout.tensor_parallel(mesh).spec(P("heads"), (64,))
    with refusal("32 devices of model.*draft_model_parallelism=16"):
        Layout(mesh, ("model",)).spec(P("heads"), (16,))


@pytest.mark.parametrize(
    "names, kind, message",
    [
        ("data model", "Explicit", "Explicit axes"),
        ("x model", "Auto", "axis 'data'"),
        ("data tensor", "Auto", "nothing is split over the mesh axis 'tensor'"),
    ],
)
def test_mesh_without_make_mesh_is_refused(names, kind, message):
    mesh = jax.make_mesh((1, 8), names.split(), axis_types=(AxisType[kind],) * 2)
    with refusal(f"{message}.*use make_mesh"):
        draft_layout(mesh)


def test_mesh_needs_no_model_axis():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    assert draft_layout(mesh) == draft_layout(mesh, 1) == Layout.replicated(mesh)
    # Nor does an axis of one device split anything.
    mesh = jax.make_mesh((1, 1, 8), ("data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)
    assert Layout.tensor_parallel(mesh).over == ("model",)


def test_devices_that_are_no_tpus_keep_their_order():
    mixed = [jax.devices()[3 * i % 8] for i in range(8)]
    assert make_mesh(2, devices=mixed).devices.ravel().tolist() == mixed


def test_mesh_takes_all_devices_by_default():
    assert dict(make_mesh().shape) == {"data": 1, "model": 8}
    assert dict(make_mesh(2).shape) == dict(make_mesh(model=4).shape) == {"data": 2, "model": 4}
    assert dict(make_mesh(2, devices=jax.devices()[:4]).shape) == {"data": 2, "model": 2}
    assert make_mesh(1, 1, devices=jax.devices()[3:4]).devices.tolist() == [[jax.devices()[3]]]


test_refused_meshes = refused_arguments(
    make_mesh,
    {
        "'data' must be an integer >= 1.*got 0": dict(data=0),
        "data 1 x model 16 has 16 devices, but there are 8": dict(model=16),
        "num_kv_heads must be an integer.*got '2'": dict(num_kv_heads="2"),
        r"a list of devices, such as jax.devices\(\); got \[1\]": dict(devices=[1]),
        "each device once; got 2 with 1 different": dict(devices=jax.devices()[:1] * 2),
        "each device once; got 0 with 0 different": dict(devices=[]),
        "rows must be an integer >= 0.*got -1": dict(rows=-1),
    },
)
