"""Training of Medusa heads: each begins as the target's output, and learns the token at its own offset."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp.mesh.layout import Layout, make_mesh
from specsamp.models.config import tiny
from specsamp.models.heads import FeatureHead
from specsamp.models.medusa import MedusaConfig
from specsamp.models.transformer import TransformerLM
from specsamp.training.eagle import TrainHead
from specsamp.training.trainer import TrainConfig, init_state, initial_state, new_state, state_shardings, train_step
from support.weights import drawn_params

V, LENGTH, NUM_HEADS = 8, 12, 2
TARGET = TransformerLM(tiny(vocab_size=V, width=16, num_layers=1, num_heads=2, positions="rotary"))
LAYER = dataclasses.replace(TARGET.config, num_layers=1, tied=False)
SHAPE = dict(layer=LAYER, target_layers=1, hidden_layers=(1,), own_output=True)
HEAD = FeatureHead(MedusaConfig(**SHAPE, num_heads=NUM_HEADS))
TASK = TrainHead(head=HEAD, target=TARGET, test_steps=NUM_HEADS)
TRAIN = TrainConfig(steps=60, batch=8, warmup_steps=4, learning_rate=2e-2, weight_decay=0.0)
KEY = jax.random.key(0)
ROWS = jnp.asarray((np.arange(LENGTH + 1) + np.arange(8)[:, None]) * 3 % V, jnp.int32)  # the next token is known

one_step = jax.jit(train_step, static_argnums=(0, 1))


@pytest.fixture(scope="module")
def target_params():
    return drawn_params(TARGET, 5)


def test_a_head_learns_from_the_loss_of_its_offset_alone(target_params):
    """And the weight of its offset is that of its gradient."""
    params, teacher = TASK.init(KEY), TASK.teacher(target_params)
    part = jax.jit(
        lambda p, decay: dataclasses.replace(TASK, decay=decay).loss(p, teacher, ROWS, KEY)[0], static_argnums=1
    )
    gradients = [jax.grad(part)(params, decay) for decay in (1.0, 0.5)]
    assert gradients[0].keys() == {"head_0", "head_1"}  # nothing of the target
    assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(gradients[0]))
    for name, share in (("head_0", 1.0), ("head_1", 0.5)):
        jax.tree.map(
            lambda half, whole: np.testing.assert_allclose(half, share * whole, atol=1e-6),
            gradients[1][name],
            gradients[0][name],
        )


def losses(target_params, mesh):
    teacher = TASK.teacher(target_params)
    state = init_state(TASK, TRAIN, teacher_params=teacher)
    state = jax.device_put(state, state_shardings(TASK, TRAIN, mesh))
    found = []
    for _ in range(TRAIN.steps):
        state, metrics = one_step(TASK, TRAIN, state, teacher, ROWS[None])
        found.append(metrics)
    return {name: [float(one[name]) for one in found] for name in found[0]}


def test_the_loss_falls_and_every_offset_is_accepted_more(target_params):
    """Its heads are split over devices as the target's output is, and learn the same."""
    one, two = (losses(target_params, make_mesh(1, n, devices=jax.devices()[:n])) for n in (1, 2))
    assert one["loss"][-1] < 0.5 * one["loss"][0]
    for i in (1, 2):
        accepted = one[f"acceptance/position_{i}"]
        assert accepted[-1] > accepted[0] + 0.2, accepted
    np.testing.assert_allclose(two["loss"], one["loss"], rtol=1e-3)


def test_a_new_state_is_made_where_it_belongs(target_params):
    """Heads, which begin as the target's output, and their moments: nothing is moved, and little is made beside them."""
    mesh = make_mesh(2, 4)
    target = dataclasses.replace(TARGET, config=dataclasses.replace(TARGET.config, vocab_size=2048, num_heads=4))
    layer = dataclasses.replace(LAYER, vocab_size=2048)
    head = FeatureHead(dataclasses.replace(HEAD.config, layer=layer))
    task = TrainHead(head=head, target=target, test_steps=NUM_HEADS)
    shardings = state_shardings(task, TRAIN, mesh)
    teacher = task.teacher(target.init(KEY))
    teacher = jax.device_put(teacher, Layout.tensor_parallel(mesh).shardings(task.teacher_axes(), teacher))
    whole = init_state(task, TRAIN, teacher_params=teacher)
    nothing_saved = types.SimpleNamespace(latest=None)
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        made = initial_state(task, TRAIN, nothing_saved, shardings, teacher_params=teacher)
        with pytest.raises(jax.errors.JaxRuntimeError):  # the control: made whole, and put in its place
            jax.block_until_ready(jax.device_put(whole, shardings))
    assert made.params["head_0"]["output"].sharding.shard_shape((2048, 16)) == (512, 16)
    jax.tree.map(np.testing.assert_array_equal, made, whole)
    sizes = new_state(shardings).lower(task, TRAIN, None, teacher).compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(whole))
    assert sizes.output_size_in_bytes + sizes.temp_size_in_bytes < 0.4 * size


def test_more_steps_than_heads_are_refused():
    with pytest.raises(ValueError, match="test_steps is 3, but the head drafts 2 tokens at most"):
        dataclasses.replace(TASK, test_steps=3)
