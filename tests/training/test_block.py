"""Training of block heads: a block has the inputs of decoding, and its losses are as published."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from numpy.testing import assert_allclose

from specsamp import TransformerLM, chain, temperature
from specsamp.decoding.state import Weights
from specsamp.evaluation.audit.readers import FirstTokenReader
from specsamp.mesh.layout import make_mesh
from specsamp.models.block_corrections import DSparkConfig
from specsamp.models.config import tiny
from specsamp.models.dflash import BlockConfig
from specsamp.training.block_heads import TrainBlock, pace_weights
from specsamp.training.trainer import TrainConfig, init_state, state_shardings, train_step
from support.refusals import refused_arguments
from support.weights import drawn_params

V, LENGTH, LAYERS, SIZE, ANCHORS = 16, 14, 2, 4, 3
TARGET = TransformerLM(
    tiny(vocab_size=V, width=16, num_layers=LAYERS, num_heads=2, positions="rotary")
)
LAYER = dataclasses.replace(
    TARGET.config,
    num_layers=2,
    num_kv_heads=1,
    gated=True,
    tied=False,
    query_key_norm=True,
    window=3,
    global_layers=(1,),
)
SHAPE = dict(
    target_layers=LAYERS, layer=LAYER, hidden_layers=(0, 1), block_size=SIZE, mask_id=V - 1
)
DFLASH = BlockConfig(**SHAPE).head()
DSPARK = DSparkConfig(**SHAPE, markov="recurrent", markov_rank=6).head()
TOKENS = jax.random.randint(jax.random.key(0), (2, LENGTH + 1), 0, V - 1)
KEY = jax.random.key(3)
one_step = jax.jit(train_step, static_argnums=(0, 1))


@pytest.fixture(scope="module")
def target_params():
    return drawn_params(TARGET, 5)


@functools.partial(jax.jit, static_argnums=0)
def decoded_rows(head, weights, target_params, tokens_T, anchor):
    """Returns the rows of one block, as the drafter calls the head."""
    target_weights = TARGET.prepare(target_params)
    output = TARGET.forward(target_params, tokens_T[None, :-1], hidden_layers=head.hidden_layers)
    caches = head.init_cache(1, LENGTH + SIZE)
    # Also rows past the anchor, which are stale.
    caches = head.read(weights, head.fuse(weights, output.hidden), jnp.zeros(1, jnp.int32), caches)
    at_B = jnp.asarray(anchor)[None]
    embedded = head.embed_blocks(weights, TARGET, target_weights, tokens_T[at_B], at_B)
    return head(weights, embedded, at_B[:, None], at_B[:, None], caches)[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("head", [DFLASH, DSPARK])
def test_training_block_has_the_inputs_of_decoding(head, target_params):
    """Its rows are decoding's, and are compared with the target's rows of the same tokens."""
    task = TrainBlock(head=head, target=TARGET, test_steps=head.config.max_tokens, anchors=ANCHORS)
    weights = head.training_weights(drawn_params(head, 1), None)
    anchors = task._choose_anchors(TOKENS, KEY)
    assert anchors.min() >= 1
    assert anchors.max() + SIZE <= LENGTH
    assert len(set(anchors[0].tolist())) == ANCHORS
    rows, stream, _ = jax.jit(task._blocks)(weights, target_params, TOKENS, anchors)
    logits = TARGET.forward(target_params, TOKENS[:, :-1]).logits_BTV
    reader = FirstTokenReader(TARGET, head, corrected=False)
    pair_weights = Weights(target=TARGET.prepare(target_params), draft=weights)
    given = TOKENS[:, :-1], jnp.zeros(2, jnp.int32), reader.init_cache(2, LENGTH)
    # The first token, as the audit and the doctor read it.
    read = jax.jit(reader)(pair_weights, *given).logits_BTV[1, 1:]
    for i, anchor in enumerate(np.asarray(anchors[1])):
        expected = decoded_rows(head, weights, target_params, TOKENS[1], anchor)[
            head.config.first_row :
        ]
        assert_allclose(rows[1, i], expected, atol=1e-5)
        first = head.logits(
            weights,
            rows[1:, i, :1],
            lambda x: TARGET.unembed_normed(TARGET.prepare(target_params), x),
        )
        assert_allclose(read[anchor - 1], first[0, 0], atol=1e-5)
        predicted = TARGET.read_out(target_params, stream[1:, i])[0]
        assert_allclose(predicted, logits[1, anchor : anchor + head.config.max_tokens], atol=1e-5)


def by_hand(task, params, target_params):
    """Returns the loss of a task with evenly spread anchors, from distributions in NumPy."""
    head, anchors = task.head, task._choose_anchors(TOKENS, None)
    weights = head.training_weights(params, None)
    rows, stream, _ = jax.jit(task._blocks)(weights, target_params, TOKENS, anchors)
    q = np.asarray(
        jax.nn.softmax(TARGET.read_out(target_params, stream.reshape(2, -1, 16)))
    ).reshape(-1, SIZE, V)
    rows, tokens = rows.reshape(-1, SIZE, 16), np.asarray(TOKENS)
    before = np.stack([tokens[b, a : a + SIZE] for b in range(2) for a in np.asarray(anchors[b])])
    unembed = functools.partial(TARGET.unembed_normed, TARGET.prepare(target_params))
    state = head.begin(weights, len(rows))
    expected = 0.0
    reached = []
    accepted_so_far = 1.0
    for k in range(SIZE):
        base = head.logits(weights, rows[:, k : k + 1], unembed)[:, 0]
        logits, state = head.correct(weights, base, rows[:, k], before[:, k], state)
        p, marginal = (np.asarray(jax.nn.softmax(x), np.float64) for x in (logits, base))
        c = np.asarray(
            jax.nn.sigmoid(head.confidence(weights, rows[:, k], before[:, k])), np.float64
        )
        accepted = np.minimum(p, q[:, k]).sum(-1)
        losses = [
            0.1 * (q[:, k] * np.log(q[:, k] / x)).sum(-1) + 0.9 * np.abs(q[:, k] - x).sum(-1)
            for x in (p, marginal)
        ]
        sure = -(accepted * np.log(c) + (1 - accepted) * np.log(1 - c))
        if task.pace is None:
            expected += 0.7**k * (losses[0] + 0.5 * losses[1] + sure).mean() / SIZE
            continue
        expected += sure.mean() / SIZE
        accepted_so_far = accepted_so_far * ((1 - task.pace) * accepted + task.pace)
        # The weight counts for each token before it, and for itself.
        for of_token in [*reached, losses := losses[0] + 0.5 * losses[1]]:
            expected += (of_token * accepted_so_far).mean() / SIZE
        reached.append(losses)
    return expected


def test_weights_equal_d_pace():
    found = pace_weights(jnp.array([0.9, 0.8, 0.5, 0.5])[:, None], 0.5)[:, 0]
    assert_allclose(found, [2.927187, 1.977187, 1.122187, 0.480938], rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("pace, chunk", [(None, None), (0.3, 1)])
def test_loss_equals_dspark(target_params, pace, chunk):
    """The losses agree up to the constant between cross-entropy and KL, for any measured warp, also
    with logits in chunks.
    """
    options = dict(decay=0.7, marginals=0.5, pace=pace, chunk=chunk, objective="dspark")
    task = TrainBlock(head=DSPARK, target=TARGET, test_steps=SIZE, anchors=ANCHORS, **options)
    params = drawn_params(DSPARK, 1, noise=0.1)
    given = params, task.teacher(target_params), TOKENS, chain(temperature(0.3))
    measured = jax.jit(task.measure)(*given)
    assert_allclose(measured["loss"], by_hand(task, params, target_params), rtol=1e-5)


@pytest.mark.slow
def test_a_mesh_of_eight_learns_the_same(target_params):
    """DSpark, with anchors drawn in every step, has the losses and parameters of one device."""
    layer = dataclasses.replace(LAYER, num_layers=1, global_layers=(0,))
    head = dataclasses.replace(DSPARK, config=dataclasses.replace(DSPARK.config, layer=layer))
    task = TrainBlock(head=head, target=TARGET, test_steps=2, anchors=2, objective="dspark")
    config = TrainConfig(steps=4, batch=8, warmup_steps=1, learning_rate=1e-2)
    teacher = task.teacher(target_params)
    rows = jnp.tile(TOKENS, (4, 1))[None]

    def trained(mesh):
        shardings = state_shardings(task, config, mesh)
        state = jax.device_put(init_state(task, config, teacher_params=teacher), shardings)
        spread = jax.device_put(rows, NamedSharding(mesh, PartitionSpec(None, "data")))
        losses = []
        for _ in range(config.steps):
            state, numbers = one_step(task, config, state, teacher, spread)
            losses.append(numbers["loss"])
        return state.params, losses

    alone, losses = trained(make_mesh(1, 1, devices=jax.devices()[:1]))
    params, again = trained(make_mesh(4, 2))
    assert_allclose(again, losses, rtol=1e-4)
    assert losses[-1] < losses[0] and "model" in params["correction"]["output"].sharding.spec
    jax.tree.map(functools.partial(assert_allclose, atol=1e-3), params, alone)


def choose_anchors(**fields):
    given = dict(head=DSPARK, target=TARGET, test_steps=SIZE, anchors=ANCHORS)
    TrainBlock(**given | fields)._choose_anchors(TOKENS, None)


test_refused_block_trainings = refused_arguments(
    choose_anchors,
    {
        "have room for 10 blocks of 4, fewer than test_time.anchors 14": dict(anchors=LENGTH),
        "test_time.chunk 2 does not divide test_time.anchors 3": dict(chunk=2),
        "test_time.test_steps is 5, but the head drafts 4 tokens at most": dict(test_steps=5),
        "test_time.marginals": dict(marginals=-1),
        "test_time.pace must be .*got 1.5": dict(pace=1.5),
        "objective must be one of .*dspark; got 'cross_entropy'": dict(objective="cross_entropy"),
    },
)
