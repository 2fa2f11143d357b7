"""Counts, names, axes and shapes of parameters."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models.test_transformer import MODELS
from specsamp import TransformerLM
from specsamp.models.config import (
    ExpertsConfig,
    TransformerConfig,
    tiny,
)
from support.weights import shapes_of

EXPERTS = ExpertsConfig(num_experts=8, experts_per_token=2, width=12, dense_layers=(0,))
SHAPES = dict(
    multi_head={},
    grouped=dict(num_kv_heads=2),
    wide_head=dict(head_size=14),
    narrow=dict(feedforward_width=24, vocab_size=7, num_layers=3),
    ngrams=dict(ngram_rows=97),
    longer_ngrams=dict(ngram_rows=97, ngram_order=4),
    experts=dict(gated=True, experts=EXPERTS),
)


def count(config):
    return sum(leaf.size for leaf in jax.tree.leaves(shapes_of(TransformerLM(config))))


CONFIGS = {name: tiny(**changes) for name, changes in SHAPES.items()} | MODELS


@pytest.mark.parametrize("name", CONFIGS)
def test_counts_axes_and_json(name):
    """The formula counts the module's parameters, each has its axes, and a config survives JSON."""
    config = CONFIGS[name]
    assert config.num_parameters == count(config)
    axes = TransformerLM(config).param_axes()
    jax.tree.map(
        lambda spec, leaf: np.testing.assert_equal(len(spec), leaf.ndim),
        axes,
        shapes_of(TransformerLM(config)),
    )
    read = TransformerConfig(**json.loads(json.dumps(dataclasses.asdict(config))))
    assert read == config and hash(read) == hash(config)


# Checkpoints store names and axes: they may not change with the modules that declare them.


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

GOLDEN = pathlib.Path(__file__).with_name("golden_parameters.txt").read_text().splitlines()


def described(config):
    """Returns a line with name, axes and shape for each parameter."""
    model = TransformerLM(config)
    shapes = jax.tree.leaves(shapes_of(model))
    axes = jax.tree.leaves_with_path(
        model.param_axes(), is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    return [
        f"{'/'.join(key.key for key in path)} {','.join(spec)} {','.join(map(str, x.shape))}"
        for (path, spec), x in zip(axes, shapes, strict=True)
    ]


def test_names_axes_and_shapes():
    assert described(tiny(num_layers=1, num_kv_heads=2, **EVERYTHING)) == GOLDEN
