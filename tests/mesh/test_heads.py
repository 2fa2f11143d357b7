"""Heads on a mesh: tokens of one device, placement of all arrays, rows that enter a batch."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specsamp import BlockRule, Pair, TransformerLM, chain, generate, generate_many, temperature
from specsamp.checkpoints.hugging_face import placed
from specsamp.decoding import batch_rows
from specsamp.decoding.engine import Engine
from specsamp.decoding.method import Method, default_drafter
from specsamp.decoding.request import make_requests
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard, shard_head
from specsamp.models.config import ExpertsConfig, tiny
from specsamp.models.eagle import Eagle3Config
from specsamp.models.mtp import MTPConfig
from support.weights import drawn_params, shapes_of

LAYER = tiny(
    vocab_size=96,
    num_heads=8,
    width=64,
    num_kv_heads=2,
    num_layers=1,
    positions="rotary",
    gated=True,
    activation="silu",
)
SPARSE = dataclasses.replace(
    LAYER,
    gated=True,
    experts=ExpertsConfig(num_experts=4, experts_per_token=2, width=8, shared_width=16),
)
HEADS = {
    "eagle3": Eagle3Config(
        layer=LAYER, target_layers=2, hidden_layers=(0, 1, 2), draft_vocab_size=32, own_output=True
    ),
    "modules": MTPConfig(layer=LAYER, target_layers=2, hidden_layers=(1,), num_modules=3),
}
PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 1, 2, 3], [3]]
BUDGETS = [14, 5, 16, 9, 1]
SAMPLING = chain(temperature(1.0))
CALL = dict(rule=BlockRule(), sampling=SAMPLING, draft_length=3)


def noisy(model, seed):
    """Returns weights unlike their initial values, and spread ids of a reduced vocabulary."""
    return jax.tree.map(
        lambda x: x if x.dtype == jnp.float32 else 2 * x, drawn_params(model, seed, noise=0.1)
    )


@pytest.fixture(scope="module")
def pair(request):
    target = TransformerLM(
        tiny(vocab_size=96, num_heads=8, width=64, num_kv_heads=2, num_layers=2, positions="rotary")
    )
    head = HEADS[request.param].head()
    return Pair(
        target=target, target_params=noisy(target, 0), head=head, draft_params=noisy(head, 1)
    )


@pytest.fixture(scope="module")
def alone(pair):
    return generate(pair, PROMPTS, BUDGETS, **CALL)


def engine_of(pair):
    method = Method(drafter=default_drafter(pair, 3), rule=BlockRule(), sampling=SAMPLING)
    requests = make_requests(pair, method, PROMPTS, BUDGETS)
    return Engine.create(pair, method, requests), requests


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair, draft, decode",
    [("eagle3", 1, functools.partial(generate_many, rows=2)), ("modules", None, generate)],
    indirect=["pair"],
)
def test_tokens_of_one_device(pair, alone, draft, decode):
    """Further heads, on meshes of two devices: decoding/test_pairs.py."""
    sharded = shard(pair, make_mesh(2, 4), draft_model_parallelism=draft)
    made = decode(sharded, PROMPTS, BUDGETS, **CALL)
    tokens = {completion.prompt_index: completion.tokens for completion in made}
    assert tokens == {completion.prompt_index: completion.tokens for completion in alone}
    assert sum(completion.stats.accepted for completion in alone) > 0


def test_module_with_experts_equals_one_device():
    """Experts are split as in a target: one all-reduce sums over them, and no expert is moved."""
    head = MTPConfig(layer=SPARSE, target_layers=2, hidden_layers=(2,)).head()
    params = noisy(head, 1)
    layout = Layout.tensor_parallel(make_mesh(1, 8))
    x_BTD = jax.random.normal(jax.random.key(2), (2, 3, SPARSE.width))
    given = (x_BTD, x_BTD, jnp.zeros(2, jnp.int32))

    def features(head):
        weights = head.fit_slots(head.prepare(params), 8)
        call = jax.jit(lambda weights, *given: head(weights, *given, None)[0])
        return call(weights, *given), call.lower(weights, *given).compile().as_text()

    (expected, _), (found, text) = features(head), features(shard_head(head, layout))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    moved = {shape for kind, shape in collectives(text)}
    assert not any(shape.startswith("f32[4,") for shape in moved), moved


def collectives(text):
    """Returns the collectives of a program, except sums, with the shapes of their results."""
    kinds = "all-gather|all-to-all|collective-permute|reduce-scatter"
    return {
        (kind, shape) for shape, kind in re.findall(rf"= \(?(\w+\[[\d,]*\])[^=]* ({kinds})\(", text)
    }


@pytest.mark.slow
@pytest.mark.parametrize("pair, model", [("modules", 8), ("eagle3", 2)], indirect=["pair"])
def test_arrays_of_a_head_stay_in_place(pair, model):
    """Weights are split, features are on all devices of a shard, and only logits are gathered."""
    mesh = make_mesh(1, model, devices=jax.devices()[:model])
    engine, requests = engine_of(shard(pair, mesh))

    def check(array, *spec):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec)), array.ndim), (
            array.sharding.spec
        )

    params = engine.weights.draft["params"]
    params = params.get("module_0", params)
    check(params["fc"], "model")
    check(params["attention"]["query"], "model")
    check(params["mlp"]["up"], None, "model")
    if "output" in params:
        check(params["output"], "model")
        check(engine.weights.draft["ranks_V"])
    state = engine.prefill(requests)
    bare = dataclasses.replace(state, request=None)
    compiled = engine.loop.program.lower(engine.weights, state.request, bare, 9).compile()
    rows = len(state.lengths_B)
    tokens = 32 if "output" in params else 96
    # Gathered along a leading axis.
    shapes = f"f32[{model},{rows},1,{tokens // model}]", f"f32[{model},{rows},4,{96 // model}]"
    gathered = {("all-gather", shape) for shape in shapes}
    assert collectives(compiled.as_text()) == gathered
    for _ in range(2):
        for leaf in jax.tree.leaves(dataclasses.replace(state.drafter_state, cache=None)):
            check(leaf, "data")
        for leaf in jax.tree.leaves(state.drafter_state.cache):
            check(leaf, "data", "model" if model == 2 else None)
        state = engine.run(state, 1)


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["eagle3"], indirect=True)
def test_rows_enter_on_their_devices(pair):
    engine, requests = engine_of(shard(pair, make_mesh(2, 2, devices=jax.devices()[:4])))
    state = engine.run(engine.prefill(requests), 1)
    at_N = jnp.asarray([1, 2])
    bare = [
        dataclasses.replace(each, request=None) for each in (state, engine.prefill(requests[:2]))
    ]
    write = batch_rows._write_donated.lower(*bare, at_N, engine.loop.shards).compile().as_text()
    assert "dynamic-" in write and not collectives(write)


def test_head_parameters_are_placed_on_the_mesh():
    mesh = make_mesh(1, 2, devices=jax.devices()[:2])
    head = shard_head(HEADS["eagle3"].head(), Layout.tensor_parallel(mesh))
    places = placed(shapes_of(head), head)
    assert {place.sharding.mesh for place in jax.tree.leaves(places)} == {mesh}
