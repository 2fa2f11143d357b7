"""Training of heads: the training-time test has the inputs of decoding and the paper's loss."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from specsamp import TransformerLM
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.models.config import tiny
from specsamp.models.eagle import Eagle3Config
from specsamp.models.heads import DRAFT_IDS, FeatureHead
from specsamp.models.medusa import MedusaConfig
from specsamp.models.mtp import MTPConfig
from specsamp.training.feature_heads import TrainHead, most_frequent
from specsamp.training.trainer import (
    TrainConfig,
    init_state,
    initial_state,
    state_shardings,
    train_step,
)
from support.heads import mtp
from support.refusals import refusal, refused_arguments
from support.weights import drawn_params

V, LENGTH, LAYERS, STEPS = 16, 12, 2, 3
TARGET = TransformerLM(
    tiny(vocab_size=V, width=16, num_layers=LAYERS, num_heads=2, positions="rotary")
)
LAYER = dataclasses.replace(
    TARGET.config, num_layers=1, num_kv_heads=1, gated=True, activation="silu", tied=False
)
SHAPE = dict(target_layers=LAYERS, layer=LAYER)
HEAD = FeatureHead(Eagle3Config(**SHAPE, hidden_layers=(0, 1, 2)))
REDUCED = FeatureHead(
    Eagle3Config(**SHAPE, hidden_layers=(0, 1, 2), draft_vocab_size=10, own_output=True)
)
MODULE = FeatureHead(MTPConfig(**SHAPE, hidden_layers=(LAYERS,)))
SINKS = FeatureHead(
    Eagle3Config(
        target_layers=LAYERS,
        layer=dataclasses.replace(LAYER, attention_sinks=True),
        hidden_layers=(0, 1, 2),
    )
)
MEDUSA = FeatureHead(
    MedusaConfig(**SHAPE, hidden_layers=(LAYERS,), num_heads=STEPS, own_output=True)
)
IDS = np.array([0, 1, 2, 4, 5, 7, 8, 11, 13, 15], np.int32)
TASK = TrainHead(head=HEAD, target=TARGET, test_steps=STEPS)
KEY = jax.random.key(0)


TOKENS = jax.random.randint(KEY, (2, LENGTH + 1), 0, V)
MEDUSA_TASK = TrainHead(head=MEDUSA, target=TARGET, test_steps=STEPS)
TRAIN = TrainConfig(steps=60, batch=8, warmup_steps=4, learning_rate=2e-2, weight_decay=0.0)
# Each token determines the next.
ROWS = jnp.asarray((np.arange(LENGTH + 1) + np.arange(8)[:, None]) * 3 % V, jnp.int32)
one_step = jax.jit(train_step, static_argnums=(0, 1))


@pytest.fixture(scope="module")
def target_params():
    return drawn_params(TARGET, 5)


forward = jax.jit(TARGET.forward)


@functools.partial(jax.jit, static_argnums=(0, 4))
def decoded_logits(head, params, target_params, tokens_T, row):
    """Returns the head's logits after the true features of rows up to ``row`` and 0, 1 ... of its
    own features.
    """
    weights = head.prepare(params)
    target_weights = TARGET.prepare(target_params)
    output = TARGET.forward(target_params, tokens_T[None, :-1], hidden_layers=head.hidden_layers)
    embedded = TARGET.embed(target_weights, tokens_T[None], jnp.zeros(1, jnp.int32), None)[0]
    features = head.fuse(weights, output.hidden)[:, : row + 1]
    cache = head.init_cache(1, 32)
    returned, cache = head(
        weights, embedded[:, 1 : row + 2], features, jnp.zeros(1, jnp.int32), cache
    )

    def of_target(x):
        return TARGET.unembed_normed(target_weights, x)

    logits = []
    for step in range(STEPS):
        logits.append(
            head.expand(weights, head.logits(weights, returned[:, -1:], of_target, step))[0, 0]
        )
        own, at = returned[:, -1:], row + 1 + step
        returned, cache = head(weights, embedded[:, at + 1 : at + 2], own, jnp.full(1, at), cache)
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("head, row", [(REDUCED, 7), (SINKS, 6), (MODULE, 5), (MEDUSA, 3)])
def test_training_step_has_the_logits_of_decoding(head, row, target_params):
    """Every step has the logits of the loop's calls, compared with the target's right row."""
    ids = IDS if head.config.draft_vocab_size else None
    params = drawn_params(head, 1)
    if ids is not None:
        params = params | {DRAFT_IDS: jnp.asarray(ids)}
    task = TrainHead(head=head, target=TARGET, test_steps=STEPS)
    trained = {name: leaf for name, leaf in params.items() if name != DRAFT_IDS}
    weights = head.training_weights(trained, None if ids is None else jnp.asarray(ids))
    stream, features = jax.jit(task._steps)(weights, target_params, TOKENS)

    def of_target(x):
        return TARGET.unembed_normed({"params": target_params}, x)

    expected = forward(target_params, TOKENS[:, :-1]).logits_BTV
    assert_allclose(TARGET.read_out(target_params, stream), expected, atol=1e-5)
    for step, wanted in enumerate(decoded_logits(head, params, target_params, TOKENS[1], row)):
        logits = head.expand(weights, head.logits(weights, features[step], of_target, step))[
            1, row + 1 + step
        ]
        assert_allclose(logits, wanted, atol=1e-5)


@pytest.mark.slow
def test_training_modules_have_the_features_of_decoding(target_params):
    """Each module is one position further, has its own cache, and never sees later rows."""
    head = MTPConfig(**SHAPE, hidden_layers=(LAYERS,), num_modules=STEPS).head()
    row = 6
    params = drawn_params(head)
    task = TrainHead(head=head, target=TARGET, test_steps=STEPS)
    _, trained = jax.jit(task._steps)(head.training_weights(params, None), target_params, TOKENS)
    weights = head.prepare(params)
    cache = head.init_cache(2, 16)
    start_B = jnp.zeros(2, jnp.int32)
    embedded = TARGET.embed(TARGET.prepare(target_params), TOKENS, start_B, None)[0]
    (features,) = TARGET.forward(
        target_params, TOKENS[:, :-1], hidden_layers=head.hidden_layers
    ).hidden
    features = features[:, : row + 1]
    for number in range(STEPS):
        after = embedded[:, number + 1 : number + 2 + row]
        features, cache = head(weights, after, features, start_B, cache, number)
        assert_allclose(trained[number][:, row + 1 + number], features[:, -1], atol=1e-5)


def loss_and_distributions(task, target_params, ids=None):
    """Returns a task's loss and numbers, the head's distributions after each step, and the
    target's.
    """
    params = {name: leaf for name, leaf in drawn_params(task.head, 1).items() if name != DRAFT_IDS}
    loss, metrics = jax.jit(task.loss)(params, task.teacher(target_params, ids), TOKENS, KEY)
    weights = task.head.training_weights(params, None if ids is None else jnp.asarray(ids))
    _, features = jax.jit(task._steps)(weights, target_params, TOKENS)

    def of_target(x):
        return TARGET.unembed_normed({"params": target_params}, x)

    logits = [
        task.head.logits(weights, features[step], of_target) for step in range(task.test_steps)
    ]
    drafted = [np.asarray(jax.nn.softmax(x), np.float64) for x in logits]
    return (
        loss,
        metrics,
        drafted,
        np.asarray(jax.nn.softmax(forward(target_params, TOKENS[:, :-1]).logits_BTV)),
    )


def test_the_loss_is_the_weighted_sum_over_steps(target_params):
    """A step counts its mean divergence from the target's rows that it predicts, and no rows
    beyond; logits are in chunks.
    """
    task = dataclasses.replace(TASK, chunk=4)
    loss, metrics, drafted, q = loss_and_distributions(task, target_params)
    expected = 0.0
    for step, p in enumerate(drafted):
        p, wanted = p[:, step + 1 :], q[:, step + 1 :]
        expected += 0.8**step * (wanted * np.log(wanted / p)).sum(-1).mean()
        accepted = np.minimum(wanted, p).sum(-1).mean()
        assert_allclose(metrics[f"acceptance/position_{step + 1}"], accepted, rtol=1e-5)
    assert_allclose(loss, expected, rtol=1e-5)


def test_reduced_vocabulary_learns_a_renormalised_target(target_params):
    task = TrainHead(head=REDUCED, target=TARGET, test_steps=1, objective="total_variation")
    loss, metrics, (p,), q = loss_and_distributions(task, target_params, IDS)
    p, q = p[:, 1:], q[:, 1:]
    kept = q[..., IDS]
    assert_allclose(metrics["acceptance/position_1"], np.minimum(kept, p).sum(-1).mean(), rtol=1e-5)
    counted = np.isin(q.argmax(-1), IDS)
    assert 0 < counted.mean() < 1
    distances = 0.5 * np.abs(kept / kept.sum(-1, keepdims=True) - p).sum(-1)
    assert_allclose(loss, distances[counted].mean(), rtol=1e-5)


def test_the_most_frequent_tokens_are_kept():
    assert_array_equal(most_frequent(np.array([5, 5, 2, 7, 7, 7, 0, 2]), 9, 3), [2, 5, 7])


def test_medusa_head_learns_from_its_own_offset(target_params):
    """The weight of an offset scales the gradient of its head."""
    params = drawn_params(MEDUSA_TASK)
    teacher = MEDUSA_TASK.teacher(target_params)
    of_decay = [dataclasses.replace(MEDUSA_TASK, decay=decay) for decay in (1.0, 0.5)]
    whole, half = (
        jax.jit(jax.grad(task.loss, has_aux=True))(params, teacher, ROWS, KEY)[0]
        for task in of_decay
    )
    assert whole.keys() == {f"head_{i}" for i in range(STEPS)}  # no parameters of the target
    assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(whole))
    for i in range(STEPS):
        pairs = zip(
            jax.tree.leaves(half[f"head_{i}"]), jax.tree.leaves(whole[f"head_{i}"]), strict=True
        )
        assert all(np.allclose(small, 0.5**i * large, atol=1e-6) for small, large in pairs)


@pytest.mark.parametrize(
    "of_target", ({}, {"norm": "layer"}, {"norm_offset": True}, {"logit_divisor": 8.0}), ids=str
)
def test_reduced_heads_begin_with_rows_of_the_target(of_target):
    """Compares the rows of the ids, and half of the norm's factor; another kind of norm stays."""
    target = TransformerLM(dataclasses.replace(TARGET.config, **of_target))
    target_params = drawn_params(target)
    task = TrainHead(head=REDUCED, target=target, test_steps=1)
    params = task.init(KEY, task.teacher(target_params, IDS))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, task.init(KEY))
    divisor = of_target.get("logit_divisor", 1.0)
    assert_array_equal(params["output"], target_params["embedding"][IDS] / divisor)
    scale = target_params["final_norm"]["scale"] + float("norm_offset" in of_target)
    halved = 1.0 if "norm" in of_target else scale / 2
    assert_allclose(params["final_norm"]["scale"], halved)


def medusa_losses(target_params, mesh):
    teacher = MEDUSA_TASK.teacher(target_params)
    state = init_state(MEDUSA_TASK, TRAIN, teacher_params=teacher)
    state = jax.device_put(state, state_shardings(MEDUSA_TASK, TRAIN, mesh))
    found = []
    for _ in range(TRAIN.steps):
        state, metrics = one_step(MEDUSA_TASK, TRAIN, state, teacher, ROWS[None])
        found.append(metrics)
    return {name: [float(one[name]) for one in found] for name in found[0]}


@pytest.mark.slow
def test_medusa_training_raises_acceptance_at_every_offset(target_params):
    """Heads that are split over devices, as the target's output is, have the same losses."""
    one, two = (
        medusa_losses(target_params, make_mesh(1, n, devices=jax.devices()[:n])) for n in (1, 2)
    )
    assert one["loss"][-1] < 0.5 * one["loss"][0]
    for i in range(1, STEPS + 1):
        accepted = one[f"acceptance/position_{i}"]
        assert accepted[-1] > accepted[0] + 0.1, accepted
    assert_allclose(two["loss"], one["loss"], rtol=1e-3)


def test_new_state_is_created_in_place():
    """Heads, which begin as the target's output, and their moments are never moved."""
    mesh = make_mesh(2, 4)
    target = dataclasses.replace(
        TARGET, config=dataclasses.replace(TARGET.config, vocab_size=2048, num_heads=4)
    )
    head = FeatureHead(
        dataclasses.replace(MEDUSA.config, layer=dataclasses.replace(LAYER, vocab_size=2048))
    )
    task = TrainHead(head=head, target=target, test_steps=STEPS)
    shardings = state_shardings(task, TRAIN, mesh)
    teacher = task.teacher(target.init(KEY))
    teacher = jax.device_put(
        teacher, Layout.tensor_parallel(mesh).shardings(task.teacher_axes(), teacher)
    )
    whole = init_state(task, TRAIN, teacher_params=teacher)
    nothing_saved = types.SimpleNamespace(latest=None)
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        made = initial_state(task, TRAIN, nothing_saved, shardings, teacher_params=teacher)
        # The control: a whole state is moved to its place.
        with pytest.raises(jax.errors.JaxRuntimeError):
            jax.block_until_ready(jax.device_put(whole, shardings))
    assert made.params["head_0"]["output"].sharding.shard_shape((2048, 16)) == (512, 16)
    jax.tree.map(assert_array_equal, made, whole)


def test_chunks_that_do_not_divide_the_windows(target_params):
    with refusal("test_time.chunk 5 does not divide windows of 12 tokens"):
        task = dataclasses.replace(TASK, chunk=5)
        jax.eval_shape(task.loss, task.init(KEY), TASK.teacher(target_params), TOKENS, KEY)


NARROW = TransformerLM(tiny(vocab_size=V, width=8))
MODULES = mtp(V, layer=LAYER, target_layers=LAYERS, hidden_layers=(0,), num_modules=4)

test_refused_head_trainings = refused_arguments(
    functools.partial(dataclasses.replace, TASK),
    {
        "one of forward_kl, .*cross_entropy.*got 'entropy'": dict(objective="entropy"),
        "test_steps must be an integer >= 1 .*; got 0": dict(test_steps=0),
        "decay must be a number above 0 to 1; got 0.0": dict(decay=0.0),
        "chunk must be an integer >= 1 .*; got 0": dict(chunk=0),
        "test_time.test_steps is 3, but each of the 4 modules is one step": dict(head=MODULES),
        "test_steps is 4, but the head drafts 3 tokens at most": dict(head=MEDUSA, test_steps=4),
        "made for another target: its width is 16": dict(target=NARROW),
    },
)
