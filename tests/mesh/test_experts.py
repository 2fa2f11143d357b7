"""Experts over a mesh, split by expert or by width, have the logits of one device."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import NgramDrafter, Pair, TransformerLM, generate
from specsamp.mesh.layout import Layout, make_mesh, put
from specsamp.mesh.sharded import ShardedModel, shard, shard_model
from specsamp.models.config import ExpertsConfig, tiny
from specsamp.models.kernels.dispatch import PallasKernels
from support.enumeration import COMPILE_FAST
from support.extras import slow_but
from support.refusals import refusal
from support.weights import drawn_params, shapes_of

SLOTS = 48
on_mesh = jax.jit(ShardedModel.__call__, static_argnums=0, compiler_options=COMPILE_FAST)
on_one = jax.jit(TransformerLM.__call__, static_argnums=0, compiler_options=COMPILE_FAST)


def model_of(count, inner, weight_dtype=None, **changes):
    biased = dict(bias=True, limit=0.5) if inner in (12, 24) else {}
    experts = ExpertsConfig(num_experts=count, experts_per_token=2, width=inner, **biased)
    shape = dict(num_layers=1, num_heads=8, positions="rotary", gated=True, activation="silu")
    return TransformerLM(tiny(**shape, experts=experts, weight_dtype=weight_dtype, **changes))


SPLITS = [
    (8, 12, None, (1, 12, 32), 5, None),
    (16, 12, "int8", (2, 12, 32), 40, None),
    (6, 16, None, (6, 2, 32), 40, None),
    (4, 32, "int8", (1, 16, 32), 5, 2),
]


@pytest.mark.parametrize(
    "count, width, weight_dtype, part, length, inner", slow_but(SPLITS, *SPLITS[1:3])
)
def test_sharded_logits_equal_one_device(count, width, weight_dtype, part, length, inner):
    """Covers splits by expert, by width, and by both.

    One all-reduce sums over devices, and no weight moves. A call has few tokens, or so many that
    they are sorted in blocks.
    """
    model = model_of(count, width, weight_dtype)
    params = drawn_params(model, noise=0.1)
    tokens_BT = np.arange(2 * length, dtype=np.int32).reshape(2, length) % 64
    sharded = shard_model(model, Layout.tensor_parallel(make_mesh(1, 8, num_kv_heads=inner)))
    weights = sharded.fit_slots(
        sharded.prepare(put(params, sharded.param_shardings(params))), SLOTS
    )
    gate = weights["params"]["layer_0"]["experts"]["gate"]
    assert jax.tree.leaves(gate)[0].addressable_shards[0].data.shape == part
    arguments = (tokens_BT, jnp.zeros(2, jnp.int32))
    compiled = on_mesh.lower(sharded, weights, *arguments, sharded.init_cache(2, SLOTS)).compile()
    found = compiled(weights, *arguments, sharded.init_cache(2, SLOTS)).logits_BTV
    expected = on_one(
        model, model.prepare(params), *arguments, model.init_cache(2, SLOTS)
    ).logits_BTV
    np.testing.assert_allclose(found, expected, atol=1e-5)
    collectives = re.findall(
        r"= \S+ (all-reduce|all-gather|all-to-all|collective-permute)\(", compiled.as_text()
    )
    # Sums of embedding, attention and experts; gathered logits.
    assert sorted(collectives) == ["all-gather", "all-reduce", "all-reduce", "all-reduce"]


@pytest.mark.parametrize("count, inner, part", [(8, 24, (4, 24, 128)), (6, 32, (6, 16, 128))])
def test_kernels_of_devices_add_up(count, inner, part, monkeypatch):
    """A device has some whole experts, which it selects itself, or a part of the width of each."""
    model = model_of(count, inner, width=128, head_size=16)
    called = []
    params = drawn_params(model)
    tokens_BT = np.arange(10, dtype=np.int32).reshape(2, 5)
    mesh = make_mesh(1, 2, devices=jax.devices()[:2])
    sharded = shard_model(
        dataclasses.replace(model, kernels=PallasKernels(interpret=True)),
        Layout.tensor_parallel(mesh),
    )
    weights = sharded.fit_slots(sharded.prepare(params), SLOTS)
    start_B = jnp.zeros(2, jnp.int32)
    assert weights["params"]["layer_0"]["experts"]["up"].addressable_shards[0].data.shape == part
    monkeypatch.setattr(
        PallasKernels,
        "mix_experts",
        lambda *given, mix=PallasKernels.mix_experts: called.append(1) or mix(*given),
    )
    found = on_mesh(sharded, weights, tokens_BT, start_B, sharded.init_cache(2, SLOTS)).logits_BTV
    expected = on_one(
        model, model.prepare(params), tokens_BT, start_B, model.init_cache(2, SLOTS)
    ).logits_BTV
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert called


def test_rows_of_data_shards_choose_for_themselves():
    """A mesh with both axes decodes the tokens of one device."""
    model = model_of(4, 12)
    pair = Pair(target=model, target_params=drawn_params(model))
    call = dict(
        prompts=[[1, 2, 3, 1, 2], [4, 5, 4, 5]], max_new_tokens=6, drafter=NgramDrafter(K=2)
    )
    alone = generate(pair, **call)
    assert [one.tokens for one in generate(shard(pair, make_mesh(2, 4)), **call)] == [
        one.tokens for one in alone
    ]


def test_indivisible_experts_are_refused_with_a_fix():
    model = model_of(6, 12)
    layout = Layout.tensor_parallel(make_mesh(1, 8))
    with refusal("'experts' has 6 entries.* 8 devices.*--config.mesh.data=4 --config.mesh.model=2"):
        shard_model(model, layout).param_shardings(shapes_of(model))
