"""Names and axes of parameters are those of checkpoints: they may not change with the modules that declare them."""

import pathlib

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

GOLDEN = pathlib.Path(__file__).with_name("golden_parameters.txt").read_text(encoding="utf-8").splitlines()


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
    assert described(tiny(num_layers=1, num_kv_heads=2, **EVERYTHING)) == GOLDEN
