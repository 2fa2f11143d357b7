"""Gemma 4: forms of its config.json, models that are refused by name, and its heads on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import TransformerLM
from specsamp.checkpoints.architectures import parse_config
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard_model
from specsamp.models.int8 import decode_weights
from support import golden
from support.calls import call
from support.refusals import refused_arguments

GLOBAL = {"head_dim": 16, "num_key_value_heads": 1}
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def read(**changes):
    given = golden.read("gemma4").config | changes
    given = {key: value for key, value in given.items() if value != "absent"}
    return parse_config("config.json", given, "float32")[1]


def test_both_forms_of_global_heads_are_read_alike():
    newer = dict(global_head_dim="absent", num_global_key_value_heads="absent")
    assert read(**newer, per_layer_config={"1": GLOBAL, "3": GLOBAL}) == read()
    assert read(**newer).global_head_size == 512
    # Only layers whose keys are values have another number of heads.
    assert read(attention_k_eq_v=False).global_kv_heads is None
    plain = read(attention_k_eq_v=False, **newer, per_layer_config={"1": GLOBAL, "3": GLOBAL})
    assert plain.global_kv_heads == 1 and not plain.keys_as_values


def test_layers_and_rotations_by_default_as_in_transformers():
    found = read(layer_types="absent", num_hidden_layers=8, rope_parameters="absent")
    assert found.global_layers == (5, 7) and found.window_rotary_base == 1e4
    assert found.rotary_base == 1e6 and found.rotary_scaling.share == 0.25
    whole = read(layer_types=4 * ["full_attention"])
    assert whole.window is None and whole.of_layer(0).head_size == 16


@pytest.mark.slow
@pytest.mark.parametrize("weight_dtype", [None, "int8"])
def test_a_mesh_reads_and_scores_as_one_device(weight_dtype, tmp_path):
    """The global kv head does not divide over four devices: all hold copies."""
    folder = golden.read("gemma4").write_checkpoint(tmp_path)
    checkpoint = open_checkpoint(folder, dtype="float32", weight_dtype=weight_dtype)
    model = TransformerLM(checkpoint.config)
    tokens_BT = golden.read("gemma4").tokens_BT
    params = read_params(checkpoint, model)
    if weight_dtype:
        whole = read_params(open_checkpoint(folder, dtype="float32"), model)
        expected = decode_weights(jax.tree.map(np.asarray, whole), jnp.float32, "int8")
        jax.tree.map(np.testing.assert_array_equal, params, expected)
    sharded = shard_model(model, Layout.tensor_parallel(make_mesh(2, 4)))
    logits = []
    for one in (model, sharded):
        weights = one.fit_slots(one.prepare(read_params(checkpoint, one)), 32)
        cache = call(
            one, weights, tokens_BT[:, :16], jnp.zeros(2, jnp.int32), one.init_cache(2, 32)
        )
        logits.append(
            call(one, weights, tokens_BT[:, 16:], jnp.full(2, 16), cache.cache).logits_BTV
        )
    np.testing.assert_allclose(*logits, atol=2e-5)


test_refused_gemmas = refused_arguments(
    read,
    {
        "config.json.* = 256; of Gemma 4, embeddings per .*E2B, E4B": dict(
            hidden_size_per_layer_input="absent"
        ),
        "config.json.* = 2; of Gemma 4, layers that share caches": dict(num_kv_shared_layers=2),
        r"experts beside the dense layer \(26B-A4B\) are not": dict(enable_moe_block=True),
        "'all'": dict(use_bidirectional_attention="all"),
        "a window in its last layer": dict(layer_types=KINDS[1:] + KINDS[:1]),
        "per_layer_config = .* the same head_dim": dict(per_layer_config={"1": GLOBAL}),
        "config.json.* the same head_dim": dict(
            per_layer_config={"1": GLOBAL, "3": {"head_dim": 8}}
        ),
        "config.json.*neither gates nor biases": dict(attention_bias=True),
        "not a multiple of global_kv_heads 3": dict(num_global_key_value_heads=3),
    },
)
