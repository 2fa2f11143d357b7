"""The paper's experiment as a configuration."""

import jax
import pytest
from jax.sharding import AxisType

from configs import chinchilla
from launch.lib.fields import ExperimentConfig
from specsamp.mesh.layout import Layout
from specsamp.mesh.sharded import shard_model


def test_the_paper():
    config = chinchilla.get_config()
    assert (config.target.preset, config.draft.preset) == ("chinchilla_70b", "draft_4b")
    assert (config.draft_length, config.batch, config.rule) == (4, 1, "token")
    assert (config.sampling.temperature, config.sampling.top_p) == (1.0, 0.8)
    assert (config.mesh.data, config.mesh.model, config.mesh.draft_model_parallelism) == (1, 16, 0)
    greedy = chinchilla.get_config("v4-32,greedy").sampling
    assert (greedy.temperature, greedy.top_p) == (0.0, 1.0)
    wide = chinchilla.get_config("v4-256")  # more devices than heads
    assert (wide.mesh.data, wide.mesh.model, wide.batch) == (2, 64, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "argument, devices, draft_model_parallelism, batch",
    [("v5p-64,batch=8", 32, 16, 8), ("batch=2,v4-16", 8, 0, 2), ("v6e-64", 64, 16, 1), ("tiny", 1, 0, 1)],
)
def test_other_slices_and_batches(argument, devices, draft_model_parallelism, batch):
    """Both models divide over the mesh: the draft, with 48 heads, over a part of it."""
    config = ExperimentConfig.from_config_dict(chinchilla.get_config(argument))
    assert (config.mesh.model, config.batch) == (devices, batch)
    assert config.mesh.draft_model_parallelism == draft_model_parallelism
    ways = draft_model_parallelism or devices
    names = ("data", "replica", "model")
    mesh = jax.sharding.AbstractMesh((1, devices // ways, ways), names, axis_types=(AxisType.Auto,) * 3)
    over = {"target": ("model", "replica"), "draft": ("model",)}
    for side, axes in over.items():
        model = shard_model(getattr(config, side).model(), Layout.tensor_parallel(mesh, axes))
        model.param_shardings(jax.eval_shape(model.model.init, jax.random.key(0)))


@pytest.mark.parametrize(
    "argument, message",
    [
        ("v4-33", "unknown TPU accelerator type 'v4-33'; closest matches: v4-32, v4-64"),
        ("batch=0", "batch must be a positive integer; got '0'"),
        ("v4-32,v4-64", "more than one slice"),
        ("v5litepod-8", "v5litepod-8 cannot hold 148 GB of weights in 8 x 16 GiB: take a larger slice"),
        ("v4-256,batch=1", "batch 1 does not divide over 2 copies of the target"),
    ],
)
def test_bad_arguments(argument, message):
    with pytest.raises(ValueError, match=message):
        chinchilla.get_config(argument)
