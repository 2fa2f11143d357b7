"""The target drafts with its own first layers; completions are exact for every kind of model."""

import dataclasses
import functools

import jax.numpy as jnp
import pytest

from specsamp import (
    CoupledRule,
    EarlyExitDrafter,
    NoDrafter,
    Pair,
    TokenRule,
    TransformerLM,
    chain,
    generate,
    temperature,
    top_p,
)
from specsamp.evaluation.audit.readers import WholeTargetDrafter
from specsamp.models.config import tiny
from support.extras import slow_but
from support.fakes import LayeredTableLM, TableLM, decode, table_loop
from support.loop_distributions import FAR, FULL, PROMPTS, TARGET, V
from support.refusals import refused_calls
from support.weights import drawn_params

TABLES = LayeredTableLM(V)
LAYERS = jnp.stack([FAR, TARGET - FAR])


def loop_of(drafter):
    return dataclasses.replace(table_loop(TokenRule(), drafter), target=TABLES)


def test_with_all_layers_everything_is_accepted():
    """A hole in the cache, a slot off by one or a wrong layer would show in no other test."""
    loop = loop_of(WholeTargetDrafter(TABLES, 2, 3))
    stats = decode(loop, LAYERS, None, PROMPTS, 20, FULL, samples=100).state.stats
    assert jnp.all(stats.rounds_B == 5) and jnp.all(stats.accepted_BT[:, 3] == 5)


# A model for each kind of positions and memory in checkpoints, in both layouts.
SHAPE = dict(num_layers=2, num_kv_heads=2)
MODELS = {
    "rotary": TransformerLM(
        tiny(
            num_layers=3,
            num_kv_heads=2,
            positions="rotary",
            window=4,
            global_layers=(1,),
            gated=True,
        ),
        "cpu",
    ),
    "relative, cpu": TransformerLM(tiny(**SHAPE, logit_cap=5.0), "cpu"),
    "learned": TransformerLM(
        tiny(**SHAPE, positions="learned", max_positions=40, norm="layer", tied=False), "default"
    ),
    "n-grams": TransformerLM(
        tiny(**SHAPE, positions="rotary", ngram_rows=64, ngram_order=4), "cpu"
    ),
}
TEXTS = [[1, 2, 3], [4], [6, 7, 8, 9, 1, 5]]
TOKENS = 24
SAMPLING = chain(temperature([0.0, 0.8, 1.2]), top_p(0.9))  # one greedy row, two sampled rows


@functools.cache
def pair_of(name):
    """Returns a pair with large weights, whose distributions are far from flat."""
    model = MODELS[name]
    return Pair(target=model, target_params=drawn_params(model, noise=0.2))


def tokens(completions):
    return [completion.tokens for completion in completions]


@functools.cache
def plain(name):
    """Returns completions without drafts, which no draft changes: greedy or of the coupled rule."""
    return tokens(drafted(name, lambda target: NoDrafter()))


def drafted(name, drafter, pair=None):
    """Returns completions with the drafter that ``drafter`` makes for the target."""
    pair = pair or pair_of(name)
    options = dict(sampling=SAMPLING, rule=CoupledRule(), seed=3)
    return generate(pair, TEXTS, TOKENS, drafter=drafter(pair.target), **options)


@pytest.mark.parametrize("name", slow_but(MODELS, "n-grams"))
def test_text_equals_plain_decoding(name):
    made = drafted(name, lambda target: EarlyExitDrafter(target, target.num_layers - 1, 3))
    assert tokens(made) == plain(name)
    assert 0 < sum(row.stats.accepted for row in made) < sum(row.stats.drafted for row in made)


make = functools.partial(EarlyExitDrafter, model=MODELS["rotary"], exit_layer=1, K=3)

test_refused_early_exits = refused_calls(
    {
        "not the pair's target": lambda: generate(pair_of("learned"), TEXTS, 4, drafter=make()),
        "exit_layer .*below 3; got 0": lambda: make(exit_layer=0),
        "exit_layer .*below 3; got 3": lambda: make(exit_layer=3),
        "K .*>= 1.*got 0": lambda: make(K=0),
        "LayeredModel; got TableLM": lambda: make(model=TableLM(3)),
    }
)
