"""Checkpoints are read, converted and written in int8: in blocks, with the bits of quantising all
at once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import TransformerLM
from specsamp.checkpoints import int8_tensors
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params, write_converted
from specsamp.checkpoints.public_pair import read_pair
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard_model
from specsamp.models.int8 import Int8, decode_weights, is_int8
from support import golden


def same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.fixture(scope="module")
def stored(params):
    return decode_weights(params, jnp.float32, "int8")


@pytest.mark.parametrize(
    "name, model",
    [(None, None), (None, 4), ("qwen3_moe", None), ("granite", None), ("olmo3", None)],
)
def test_a_checkpoint_is_quantised_while_it_is_read(original, name, model, tmp_path, monkeypatch):
    """With blocks of a kilobyte, no more is ever in float."""
    folder = golden.read(name).write_checkpoint(tmp_path) if name else original
    in_float = open_checkpoint(folder, dtype="float32")
    stored = decode_weights(
        read_params(in_float, TransformerLM(in_float.config)), jnp.float32, "int8"
    )
    most = []
    monkeypatch.setattr(int8_tensors, "BLOCK_BYTES", 1024)
    quantise = int8_tensors.quantise
    monkeypatch.setattr(
        int8_tensors, "quantise", lambda x, axes: most.append(x.nbytes) or quantise(x, axes)
    )
    checkpoint = open_checkpoint(folder, dtype="float32", weight_dtype="int8")
    reader = TransformerLM(checkpoint.config)
    if model:
        reader = shard_model(reader, Layout.tensor_parallel(make_mesh(2, model)))
    seen = []
    read = read_params(checkpoint, reader, lambda *told: seen.append(told))
    same(read, stored)
    assert max(most) <= 1024 and len(most) > 50
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(read))
    assert seen[-1][1:] == (size, size)
    if model:
        up = read["layer_0"]["mlp"]["up"]
        assert [x.addressable_shards[0].data.shape for x in (up.values, up.scale)] == [
            (32, 32),
            (1, 32),
        ]


def test_both_sides_of_a_pair(original, stored):
    pair = read_pair(str(original), str(original), dtype="float32", int8=Int8(weights=("target",)))
    assert [model.config.weight_dtype for model in (pair.target, pair.draft)] == ["int8", None]
    same(pair.target_params, stored)
    assert not any(map(is_int8, jax.tree.leaves(pair.draft_params, is_leaf=is_int8)))


def test_a_conversion_keeps_int8(original, stored, params, tmp_path):
    checkpoint = open_checkpoint(original, dtype="float32", weight_dtype="int8")
    write_converted(
        checkpoint, read_params(checkpoint, TransformerLM(checkpoint.config)), tmp_path / "int8"
    )
    again = open_checkpoint(tmp_path / "int8", dtype="float32")
    assert again.config.weight_dtype == "int8"
    same(read_params(again, TransformerLM(again.config)), stored)
    write_converted(open_checkpoint(original, dtype="float32"), params, tmp_path / "float")
    with pytest.raises(ValueError, match="--int8"):
        open_checkpoint(tmp_path / "float", weight_dtype="int8")
