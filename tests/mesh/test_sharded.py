"""Every mesh gives the tokens of one device, and has all arrays in their places."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

from specsamp import (
    Adaptive,
    BlockRule,
    Confidence,
    Method,
    ModelDrafter,
    NgramDrafter,
    Output,
    Pair,
    TokenRule,
    TransformerLM,
    chain,
    generate,
    temperature,
    top_p,
)
from specsamp.analysis.workload import Workload, decoders
from specsamp.decoding.engine import Engine
from specsamp.decoding.request import make_requests
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard, shard_model
from specsamp.models.config import tiny
from support.fakes import TableLM, random_table
from support.refusals import refusal, refused_calls
from support.weights import drawn_params

SAMPLING = chain(temperature(0.8), top_p(0.9))
PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 1, 2, 3], [3]]  # five: not a multiple of any shard count
BUDGETS = [20, 5, 30, 9, 1]


def make_engine(pair, prompts, budgets, sampling):
    method = Method(drafter=ModelDrafter(pair.draft, 3), rule=BlockRule(), sampling=sampling)
    requests = make_requests(pair, method, prompts, budgets)
    return Engine.create(pair, method, requests, keep_log_probs=True), requests


# One program for several tests.
CALL = {"rule": BlockRule(), "draft_length": 3, "return_log_probs": True}


@pytest.fixture(scope="module")
def table_pair():
    target, draft = TableLM(8), TableLM(8)
    return Pair(
        target=target,
        target_params=random_table(0, 8, 2.0),
        draft=draft,
        draft_params=random_table(0, 8, 2.0) + 0.7 * random_table(1, 8),
    )


@pytest.fixture(scope="module")
def transformer_pair():
    """Returns a pair of models with one layer each."""
    shape = {"num_heads": 8, "num_layers": 1}
    # Fewer kv heads than devices.
    target = TransformerLM.for_backend(tiny(width=64, num_kv_heads=2, **shape))
    draft = TransformerLM.for_backend(tiny(positions="rotary", ngram_rows=32, **shape))

    params = [drawn_params(model, seed, noise=0.1) for seed, model in enumerate((target, draft))]
    return Pair(target=target, target_params=params[0], draft=draft, draft_params=params[1])


@pytest.fixture(scope="module")
def alone(transformer_pair):
    """Returns completions of sampled and greedy rows in one batch, on one device."""
    return generate(transformer_pair, PROMPTS, BUDGETS, sampling=by_row(5), **CALL)


def by_row(rows):
    """Returns the sampling of five rows, repeated."""
    return chain(temperature((2 * [0.8, 0.0, 0.5, 0.8, 1.2])[:rows]), top_p(0.9))


def assert_same(made, expected):
    assert [c.tokens for c in made] == [c.tokens for c in expected]
    for on_mesh, on_one in zip(made, expected):
        assert_allclose(on_mesh.log_probs, on_one.log_probs, atol=1e-3)


PACED = Adaptive(
    lengths=(0, 3), costs_ms=(1, 2.3), usual=3, margin=0, pause=2, decay=0.5, stop=Confidence(0.2)
)  # shards take turns to pause


def test_tokens_of_table_models(table_pair):
    call = dict(num_samples=2, seed=7, sampling=SAMPLING, rule=TokenRule(), draft_length=PACED)
    expected = generate(table_pair, PROMPTS, BUDGETS, **call)
    assert len({tuple(c.tokens) for c in expected}) > 6
    assert all(sum(c.stats.lengths[n] for c in expected) > 5 for n in (0, 3))
    assert generate(shard(table_pair, make_mesh(4, 2)), PROMPTS, BUDGETS, **call) == expected


@pytest.mark.slow
def test_rows_are_sampled_apart(transformer_pair, alone):
    """Each device samples its rows of the logits; tokens equal one device's, and each shard has its
    state on all its devices.
    """
    rows = 4  # in each half of the mesh; rows 5 to 7 repeat rows 0 to 2
    prompts = PROMPTS + PROMPTS[:3]
    budgets = BUDGETS + BUDGETS[:3]
    ids = [0, 1, 2, 3, 4, 0, 1, 2]
    mesh = make_mesh(2, 4, rows=rows)
    pair = shard(transformer_pair, mesh)
    engine, requests = make_engine(pair, prompts, budgets, by_row(8))

    def call(weights):
        return pair.target(
            weights,
            jnp.zeros((rows, 4), jnp.int32),
            jnp.zeros(rows, jnp.int32),
            pair.target.init_cache(rows, engine.slots),
        )

    logits_BTV = jax.jit(call)(engine.weights.target).logits_BTV
    assert logits_BTV.addressable_shards[0].data.shape == (1, 4, 64)
    state = engine.run(engine.prefill(requests), 9)
    for leaf in jax.tree.leaves(dataclasses.replace(state, cache=None, drafter_state=None)):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), leaf.ndim)
    made = generate(pair, prompts, budgets, sampling=by_row(8), prompt_ids=ids, **CALL)
    assert_same(made, alone + alone[:3])


def test_sharded_model_in_parts_equals_one_call():
    """Embed, layers and unembed equal one call, with its hidden states and moved slots."""
    model = TransformerLM(tiny(num_heads=8, width=64, positions="rotary", ngram_rows=32))
    params = drawn_params(model)
    tokens_BT = jax.random.randint(jax.random.key(1), (8, 5), 0, 64)
    start_B = jnp.arange(8)
    rows_BT = jnp.broadcast_to(jnp.array([0, 2, 3]), (8, 3))

    def call(model, params):
        weights = model.fit_slots(model.prepare(params), 16)
        cache = model.init_cache(8, 16)
        whole = model(weights, tokens_BT, start_B, cache, hidden_layers=(0, 2))
        x_BTD, cache = model.embed(weights, tokens_BT, start_B, cache)
        x_BTD, cache, first = model.layers(weights, x_BTD, start_B, cache, 0, 1, hidden_layers=(0,))
        x_BTD, cache, second = model.layers(
            weights, x_BTD, start_B, cache, 1, 2, hidden_layers=(2,)
        )
        parts = Output(logits_BTV=model.unembed(weights, x_BTD), cache=cache, hidden=first + second)
        return [
            dataclasses.replace(o, cache=model.compact(o.cache, start_B, rows_BT, 5))
            for o in (whole, parts)
        ]

    expected, _ = jax.jit(call, static_argnums=0)(model, params)
    split = shard_model(model, Layout.tensor_parallel(make_mesh(2, 4)))
    placed = jax.device_put(params, split.param_shardings(params))
    for output in jax.jit(call, static_argnums=0)(split, placed):
        jax.tree.map(functools.partial(assert_allclose, atol=2e-5), output, expected)


@pytest.mark.slow
def test_arrays_of_a_pair_are_placed_correctly(transformer_pair, alone):
    """Parameters, weights and caches are in place before and after the loop, and tokens equal one
    device's. Four devices hold two drafts, and split the two key heads.
    """
    mesh = make_mesh(2, 4, draft_model_parallelism=2)
    pair = shard(transformer_pair, mesh, draft_model_parallelism=2)
    engine, requests = make_engine(pair, PROMPTS, BUDGETS, by_row(5))
    over_model = "model", "replica"

    def check(array, *spec):
        expected = NamedSharding(mesh, P(*spec))
        assert array.sharding.is_equivalent_to(expected, array.ndim), (array.sharding.spec, spec)

    for params in (pair.target_params, engine.weights.target["params"]):
        check(params["embedding"], over_model)
        layer = params["layer_0"]
        check(layer["attention"]["query"], over_model)
        check(layer["attention"]["key"], "model")
        check(layer["attention"]["output"], over_model)
        check(layer["mlp"]["up"], None, over_model)
        check(layer["mlp"]["down"], over_model)
        check(layer["mlp_norm"]["scale"])
    check(engine.weights.target["relative_keys"][0], "model")
    check(engine.weights.draft["params"]["embedding"], "model")
    check(engine.weights.draft["params"]["ngrams_2"], "model")
    state = engine.prefill(requests)
    for when in ("before", "after"):
        for keys in jax.tree.leaves(state.cache.layers):
            check(keys, "data", "model")
        for keys in jax.tree.leaves(state.drafter_state.layers):
            check(keys, "data", "model")
        check(state.drafter_state.tokens.tokens_BS, "data")
        for rows in (
            state.tokens_BS,
            state.lengths_B,
            state.finish_B,
            state.from_draft_BS,
            state.log_probs_BS,
        ):
            check(rows, "data")
        for counts in jax.tree.leaves(state.stats):
            check(counts, "data")
        if when == "before":
            state = engine.run(state)
    assert (np.asarray(state.finish_B) == 2).all()
    assert_same(generate(pair, PROMPTS, BUDGETS, sampling=by_row(5), **CALL), alone)


def test_random_parameters_do_not_depend_on_the_mesh():
    model = TransformerLM(tiny(num_heads=8, num_layers=1))
    expected = jax.jit(model.init)(jax.random.key(3))
    made = jax.jit(shard_model(model, Layout.tensor_parallel(make_mesh(2, 4))).init)(
        jax.random.key(3)
    )
    jax.tree.map(assert_array_equal, made, expected)
    assert "model" in str(made["layer_0"]["mlp"]["up"].sharding.spec)


def test_sharding_a_pair_again_moves_it(transformer_pair):
    first = shard(transformer_pair, make_mesh(2, 4))
    again = shard(first, make_mesh(1, 8))
    assert again.target.model == first.target.model
    query = again.target_params["layer_0"]["attention"]["query"]
    assert query.sharding.is_equivalent_to(NamedSharding(make_mesh(1, 8), P("model")), 3)


def test_rows_that_do_not_divide_in_a_benchmark(table_pair):
    pair = shard(table_pair, make_mesh(8, 1))
    with refusal("batch 1 does not divide over the 8 shards"):
        decoders(pair, {"x": Method(drafter=NgramDrafter(K=2))}, Workload())


def test_parameters_of_a_drafter_of_ones_own(table_pair):
    pair = dataclasses.replace(table_pair, draft=None, draft_params={"x": jnp.ones(3)})
    assert len(shard(pair, make_mesh(2, 4)).draft_params["x"].sharding.device_set) == 8


LAYOUT = Layout.tensor_parallel(make_mesh(1, 8))
TARGET = TransformerLM(tiny())
PAIR = Pair(target=TARGET, target_params=jax.eval_shape(TARGET.init, jax.random.key(0)))

test_refused_shards = refused_calls(
    {
        "'vocab' has 50257 entries.* 8 devices": lambda: LAYOUT.spec(P("vocab"), (50257,)),
        "no logical axis 'expert'.* batch, vocab": lambda: LAYOUT.spec(P("expert"), (8,)),
        "2 axis names": lambda: LAYOUT.spec(P("heads", "head"), (8,)),
        "'heads' has 4 .*mesh.data=2 --config.mesh.model=4": lambda: shard(PAIR, LAYOUT.mesh),
        r"mesh must be a Mesh, such as make_mesh\(.*got 8": lambda: shard(PAIR, 8),
        r"a Pair, such as load_pair\('python'\); got 'python'": lambda: shard(
            "python", LAYOUT.mesh
        ),
        "order 'cpu' cannot be split": lambda: TransformerLM(tiny(), "cpu").weight_axes(),
    }
)
