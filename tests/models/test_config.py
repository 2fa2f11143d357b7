"""Counts, names, axes and shapes of parameters."""

import dataclasses
import functools
import json
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models.test_transformer import MODELS
from specsamp import TransformerLM
from specsamp.models.config import ExpertsConfig, TransformerConfig, tiny
from support.refusals import refused_arguments
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
    olmo=dict(pre_norms=False, post_norms=True, joint_norm=True, num_kv_heads=2),
)


def count(config):
    return sum(leaf.size for leaf in jax.tree.leaves(shapes_of(TransformerLM(config))))


CONFIGS = {name: tiny(**changes) for name, changes in SHAPES.items()} | MODELS


@pytest.mark.parametrize("name", CONFIGS)
def test_counts_axes_and_json(name):
    """All parameters are counted, each has its axes, and a config survives JSON."""
    config = CONFIGS[name]
    assert TransformerLM(config).num_parameters == count(config)
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


test_refused_model_configs = refused_arguments(
    tiny,
    {
        "width must be an integer >= 1.*got 0": dict(width=0),
        r"num_layers must be an integer >= 1.*got 2\.0": dict(num_layers=2.0),
        "width 34 is not a multiple of num_heads 4: set head_size": dict(width=34),
        "num_heads 4 is not a multiple of num_kv_heads 3": dict(num_kv_heads=3),
        "head_size must be even; got 7": dict(positions="rotary", head_size=7),
        "logit_cap must be a number above 0; got 0.0": dict(logit_cap=0.0),
        "begin with norms: set pre_norms=True": dict(parallel=True, pre_norms=False),
        "joint_norm takes the place": dict(joint_norm=True, query_key_norm=True),
        "set window": dict(global_layers=(1,)),
        r"global_layers\[0\] must be .* below 2; got 2": dict(window=4, global_layers=(2,)),
        "rotary_size is of rotary positions; these are 'relative'": dict(rotary_size=4),
        "at most head_size 8; got 3": dict(positions="rotary", rotary_size=3),
        "num_real_tokens must be .* below 65; got 65": dict(num_real_tokens=65),
        "one of linear, llama3, yarn, proportional, longrope; got 'ntk'": dict(
            positions="rotary", rotary_scaling=dict(kind="ntk", factor=2.0)
        ),
        "needs original_positions": dict(
            positions="rotary", rotary_scaling=dict(kind="llama3", factor=2.0)
        ),
        "weight_dtype must be one of None, int8; got 'int4'": dict(weight_dtype="int4"),
        "ngram_order must be an integer >= 2 and below 6; got 1": dict(ngram_order=1),
        "experts have a gate, and biases of their own: set gated=True": dict(experts=EXPERTS),
    },
)

test_refused_experts = refused_arguments(
    functools.partial(dataclasses.replace, EXPERTS),
    {
        "a token cannot have 9 experts of 8": dict(experts_per_token=9),
        "num_experts of experts must be an integer >= 1.*got 0": dict(num_experts=0),
        "normalised of experts must be True or False; got 1": dict(normalised=1),
        "limit of experts must be a number .*; got 0": dict(limit=0),
        r"dense_layers\[0\] must be an integer >= 0.*got -1": dict(dense_layers=(-1,)),
    },
)
