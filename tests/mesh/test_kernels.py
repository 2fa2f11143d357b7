"""Kernels over a mesh: each device calls them for its own heads, within shards of a batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from specsamp import Pair, TransformerLM
from specsamp.decoding.data_shards import BY_ROWS, REPLICATED, DataShards
from specsamp.mesh import sharded as mesh_sharded
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard, shard_model, with_attention
from specsamp.models.cache import PairedKVCache
from specsamp.models.config import tiny
from specsamp.models.heads import kernel_tables
from specsamp.models.kernels.dispatch import PallasKernels
from specsamp.models.mtp import MTPConfig
from specsamp.sampling.warp import (
    chain,
    for_rows,
    log_probs,
    temperature,
    top_k,
    top_p,
    with_kernels,
)
from support.enumeration import COMPILE_FAST
from support.extras import slow_but
from support.weights import drawn_params

SLOTS = 128
# Norms and rotations are kernels, too.
NORMED = dict(width=128, positions="rotary", query_key_norm=True, attention_sinks=True)
# Mesh, heads, kv heads, size of a head, further changes.
MESHES = {
    "a kv head for two": (dict(data=2, model=4, num_kv_heads=2), 8, 2, 128, NORMED),
    "three for two": (
        dict(data=1, model=4, num_kv_heads=6),
        12,
        6,
        128,
        dict(attention_sinks=True),
    ),
    "global heads": (
        dict(data=1, model=4, num_kv_heads=2),
        4,
        4,
        128,
        dict(
            positions="rotary",
            window=50,
            global_layers=(0,),
            global_head_size=256,
            global_kv_heads=2,
            keys_as_values=True,
            value_norm=True,
        ),
    ),
    "copies": (dict(data=4, model=1), 2, 2, 128, {}),
    "in pairs": (dict(data=2, model=4, num_kv_heads=2), 8, 2, 64, {}),
}


@pytest.mark.parametrize("name", slow_but(MESHES, "a kv head for two", "in pairs"))
def test_a_call_over_a_mesh_equals_one_device(name):
    sizes, heads, kv_heads, size, more = MESHES[name]
    devices = jax.devices()[: sizes["data"] * sizes["model"]]
    mesh = make_mesh(**sizes, devices=devices)
    model = TransformerLM(
        tiny(num_heads=heads, num_kv_heads=kv_heads, head_size=size, num_layers=1, **more)
    )
    weights = model.fit_slots(model.prepare(drawn_params(model, noise=0.1)), SLOTS)
    layout = Layout.tensor_parallel(mesh) if sizes["model"] > 1 else Layout.replicated(mesh)
    sharded = shard_model(dataclasses.replace(model, kernels=PallasKernels(interpret=True)), layout)
    rng, batch = np.random.default_rng(0), 4
    cache = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), model.init_cache(batch, SLOTS)
    )
    tokens_BT = rng.integers(0, 64, (batch, 3), dtype=np.int32)
    start_B = jnp.asarray([0, 30, 63, 125], jnp.int32)
    expected = model(weights, tokens_BT, start_B, cache)
    warps = for_rows(
        chain(temperature([0.0, 0.5, 0.8, 1.0]), top_k(40), top_p([0.9, 0.5, 0.99, 1.0])), batch
    )

    tables = kernel_tables(jnp.where(jnp.arange(64) % 4, 16, jnp.arange(64) // 4), 16)

    def call(weights, warps, tokens_BT, start_B, cache):
        output = sharded(weights, tokens_BT, start_B, cache)
        return (
            output.logits_BTV,
            output.cache,
            log_probs(with_kernels(warps, sharded.kernels), output.logits_BTV),
            sharded.kernels.expand(output.logits_BTV[..., :16], *tables),
        )

    def for_kernels(layer):
        if size == 64:
            layer = PairedKVCache.of(layer.keys_BMSH, layer.values_BMSH)
        return dataclasses.replace(layer, kernels=sharded.model.kernels)

    split = DataShards(mesh).map(call, (REPLICATED, BY_ROWS, BY_ROWS, BY_ROWS, BY_ROWS))
    placed = jax.device_put(weights, sharded.weight_shardings(weights))
    made = jax.jit(split, compiler_options=COMPILE_FAST)(
        placed,
        warps,
        tokens_BT,
        start_B,
        dataclasses.replace(cache, layers=(for_kernels(cache.layers[0]),)),
    )
    assert sharded.kernels.layout == layout
    assert_allclose(made[0], expected.logits_BTV, atol=2e-5)
    assert_allclose(made[2], log_probs(warps, expected.logits_BTV), atol=5e-5)
    whole = jnp.take(made[0][..., :16], tables[0][0], axis=-1, mode="fill", fill_value=-jnp.inf)
    assert_array_equal(made[3], whole)
    for ours, theirs in zip(
        *map(jax.tree.leaves, (made[1].layers[0], for_kernels(expected.cache.layers[0]))),
        strict=True,
    ):
        assert_allclose(ours, theirs, atol=2e-5)


def test_kernels_follow_the_mesh_of_a_pair(monkeypatch):
    """Kernels have the mesh of their pair, also after the pair is sharded again."""
    model = TransformerLM(tiny(num_kv_heads=2))
    params = drawn_params(model)
    pair = Pair(target=model, target_params=params, draft=model, draft_params=params)
    layer = tiny(num_layers=1, positions="rotary")
    head = MTPConfig(layer=layer, target_layers=2, hidden_layers=(1,)).head()
    with_head = Pair(target=model, target_params=params, head=head, draft_params=drawn_params(head))
    meshes = [
        make_mesh(data=2, model=2, devices=jax.devices()[first : first + 4]) for first in (0, 4)
    ]
    monkeypatch.setattr(jax, "default_backend", functools.partial(str, "tpu"))
    for mesh in meshes:
        made = with_attention(shard(pair, mesh), "kernel")
        assert (
            made.target.model.kernels.layout == made.target.layout == Layout.tensor_parallel(mesh)
        )
        again = shard(made, meshes[1])
        assert again.draft.model.kernels.layout.mesh == meshes[1]
        assert with_attention(made, "plain").target.model.kernels is None
        made = with_attention(shard(with_head, mesh), "kernel").head
        assert made.kernels.layout == made.layout == Layout.tensor_parallel(mesh)
    assert with_attention(pair, "kernel").draft.kernels == PallasKernels()
    asked = []
    monkeypatch.setattr(
        mesh_sharded,
        "reason_for_plain",
        lambda *shape: asked.append(shape) or "one differs" * (len(asked) == 1),
    )
    found = with_attention(pair, "auto")
    assert (found.target.kernels, found.draft.kernels, asked) == (
        None,
        PallasKernels(),
        [(model.config, PallasKernels())] * 2,
    )
