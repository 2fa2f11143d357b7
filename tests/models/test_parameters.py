"""Names and axes of parameters are those of checkpoints: they may not change with the modules that declare them."""

import jax
from jax.sharding import PartitionSpec

from specsamp.models.config import tiny
from specsamp.models.transformer import TransformerLM

EVERYTHING = dict(
    norm="layer",
    post_norms=True,
    gated=True,
    feedforward_bias=True,
    attention_bias=True,
    output_bias=True,
    query_key_norm=True,
    tied=False,
    ngram_rows=8,
)

GOLDEN = """
embedding vocab,embed 64,32
final_norm/bias embed 32
final_norm/scale embed 32
layer_0/attention/content_bias heads,head 4,8
layer_0/attention/distance_bias heads,head 4,8
layer_0/attention/key kv_heads,embed,head 2,32,8
layer_0/attention/key_bias kv_heads,head 2,8
layer_0/attention/key_norm/bias head 8
layer_0/attention/key_norm/scale head 8
layer_0/attention/output heads,head,embed 4,8,32
layer_0/attention/output_bias embed 32
layer_0/attention/query heads,embed,head 4,32,8
layer_0/attention/query_bias heads,head 4,8
layer_0/attention/query_norm/bias head 8
layer_0/attention/query_norm/scale head 8
layer_0/attention/relative kv_heads,embed,head 2,32,8
layer_0/attention/value kv_heads,embed,head 2,32,8
layer_0/attention/value_bias kv_heads,head 2,8
layer_0/attention_norm/bias embed 32
layer_0/attention_norm/scale embed 32
layer_0/attention_post_norm/bias embed 32
layer_0/attention_post_norm/scale embed 32
layer_0/mlp/down mlp,embed 128,32
layer_0/mlp/down_bias embed 32
layer_0/mlp/gate embed,mlp 32,128
layer_0/mlp/gate_bias mlp 128
layer_0/mlp/up embed,mlp 32,128
layer_0/mlp/up_bias mlp 128
layer_0/mlp_norm/bias embed 32
layer_0/mlp_norm/scale embed 32
layer_0/mlp_post_norm/bias embed 32
layer_0/mlp_post_norm/scale embed 32
ngrams_2 vocab,embed 8,32
ngrams_3 vocab,embed 8,32
output_embedding vocab,embed 64,32
"""


def described(config):
    """Lines of name, axes and shape, one for each parameter."""
    model = TransformerLM(config)
    shapes = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    axes = jax.tree.leaves_with_path(model.param_axes(), is_leaf=lambda x: isinstance(x, PartitionSpec))
    return [
        f"{'/'.join(key.key for key in path)} {','.join(spec)} {','.join(map(str, x.shape))}"
        for (path, spec), x in zip(axes, shapes, strict=True)
    ]


def test_names_axes_and_shapes():
    assert described(tiny(num_layers=1, num_kv_heads=2, **EVERYTHING)) == GOLDEN.split("\n")[1:-1]


def test_learned_positions_and_later_layers():
    lines = described(tiny(positions="learned"))
    assert "position_embedding slots,embed 512,32" in lines
    assert "layer_1/attention/query heads,embed,head 4,32,8" in lines
    assert len(lines) == 3 + 2 * 8
