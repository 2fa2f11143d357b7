"""Counts and shapes of the presets, and what a wrong shape is told."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

from models.test_switches import MODELS
from specsamp.models.config import (
    ExpertsConfig,
    TransformerConfig,
    chinchilla_70b,
    draft_1m,
    draft_4b,
    target_38m,
    tiny,
)
from specsamp.models.transformer import TransformerLM

EXPERTS = ExpertsConfig(num_experts=8, experts_per_token=2, width=12, dense_layers=(0,))
SHAPES = dict(
    multi_head={},
    grouped=dict(num_kv_heads=2),
    multi_query=dict(num_kv_heads=1),
    wide_head=dict(head_size=14),
    narrow=dict(feedforward_width=24, vocab_size=7, num_layers=3),
    ngrams=dict(ngram_rows=97),
    longer_ngrams=dict(ngram_rows=97, ngram_order=4),
    experts=dict(gated=True, experts=EXPERTS),
)


@functools.cache
def shapes_of(config):
    return jax.eval_shape(TransformerLM(config).init, jax.random.key(0))


def count(config):
    return sum(leaf.size for leaf in jax.tree.leaves(shapes_of(config)))


@pytest.mark.parametrize(
    "config, published",
    [(chinchilla_70b(), 70.06e9), (draft_4b(), 4.12e9), (target_38m(), 39.9e6), (draft_1m(), 0.72e6)],
    ids=["chinchilla_70b", "draft_4b", "target_38m", "draft_1m"],
)
def test_presets_have_the_published_size(config, published):
    """Within 0.1% for the paper's two; within the digits given for ours."""
    tolerance = 1e-3 if published > 1e9 else 1e-2
    assert abs(count(config) / published - 1) < tolerance
    assert config.num_parameters == count(config)


CONFIGS = {
    f"{positions}, {name}": tiny(positions=positions, **changes)
    for positions in ("relative", "rotary")
    for name, changes in SHAPES.items()
} | MODELS


@pytest.mark.parametrize("name", CONFIGS)
def test_counts_axes_and_json(name):
    """The formula counts the parameters of the module; axes name each; a config comes back from JSON."""
    config = CONFIGS[name]
    assert config.num_parameters == count(config)
    axes = TransformerLM(config).param_axes()
    jax.tree.map(lambda spec, leaf: np.testing.assert_equal(len(spec), leaf.ndim), axes, shapes_of(config))
    read = TransformerConfig.from_json(json.loads(json.dumps(dataclasses.asdict(config))))
    assert read == config and hash(read) == hash(config)


def test_documents_from_before_a_field_had_its_name_are_read():
    fields = dataclasses.asdict(tiny(num_real_tokens=60))
    fields["num_tokens"] = fields.pop("num_real_tokens")
    assert TransformerConfig.from_json(fields, width=64) == tiny(
        num_real_tokens=60, width=64, head_size=8, feedforward_width=128
    )
    for wrong in (3, {"width": 32, "wdth": 3}):
        with pytest.raises(TypeError):
            TransformerConfig.from_json(wrong)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(width=0), "width must be an integer >= 1.*got 0"),
        (dict(num_layers=2.0), r"num_layers must be an integer >= 1.*got 2\.0"),
        (dict(width=34), "width 34 is no multiple of num_heads 4: set head_size"),
        (dict(num_kv_heads=3), "num_heads 4 is no multiple of num_kv_heads 3"),
        (dict(positions="absolute"), "positions must be one of relative, rotary, learned; got 'absolute'"),
        (dict(positions="rotary", head_size=7), "head_size must be even; got 7"),
        (dict(logit_cap=0.0), "logit_cap must be a number above 0; got 0.0"),
        (dict(global_layers=(1,)), "set window"),
        (dict(window=4, global_layers=(2,)), r"global_layers\[0\] must be an integer >= 0 and below 2; got 2"),
        (dict(rotary_size=4), "rotary_size is of rotary positions; these are 'relative'"),
        (dict(positions="rotary", rotary_size=3), "must be even and at most head_size 8; got 3"),
        (dict(num_real_tokens=65), "num_real_tokens must be an integer >= 1 and below 65; got 65"),
        (dict(positions="rotary", rotary_scaling=dict(kind="ntk", factor=2.0)), "linear, llama3, yarn; got 'ntk'"),
        (dict(positions="rotary", rotary_scaling=dict(kind="llama3", factor=2.0)), "needs original_positions"),
        (dict(weight_dtype="int4"), "weight_dtype must be one of None, int8; got 'int4'"),
        (dict(ngram_order=1), "ngram_order must be an integer >= 2 and below 6; got 1"),
        (dict(experts=EXPERTS), "experts have a gate and no biases: set gated=True"),
    ],
    ids=str,
)
def test_errors_name_the_value_and_the_fix(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)
