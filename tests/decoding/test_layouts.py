"""A transformer pair with n-gram memory: log-probabilities, and the loop in another program."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from specsamp import (
    BlockRule,
    Loop,
    Method,
    Pair,
    TransformerConfig,
    chain,
    generate,
    temperature,
    top_p,
)
from specsamp.models.compiling import FEW_ROWS, ON_TPU, options_on
from specsamp.models.transformer import TransformerLM
from support.weights import drawn_params

SAMPLING = chain(temperature(0.8), top_p(0.9))


@pytest.fixture(scope="module")
def pair():
    """Returns a pair with large weights, tables included, whose distributions are far from flat."""
    shape = dict(vocab_size=48, width=32, num_heads=4, num_kv_heads=2)
    target = TransformerLM(TransformerConfig(**shape, num_layers=2, positions="relative"), "cpu")
    draft = TransformerLM(
        TransformerConfig(**shape, num_layers=1, positions="rotary", ngram_rows=64, ngram_order=4),
        "cpu",
    )

    params = [drawn_params(model, seed, noise=0.2) for seed, model in enumerate((target, draft))]
    return Pair(target=target, target_params=params[0], draft=draft, draft_params=params[1])


def test_log_probs_equal_a_scorer(pair):
    """Reported log-probabilities equal the scores of the finished text without a cache."""
    prompt = [5, 4, 3]
    for row in generate(
        pair,
        [prompt],
        30,
        return_log_probs=True,
        num_samples=2,
        sampling=SAMPLING,
        rule=BlockRule(),
    ):
        text = jnp.asarray([prompt + row.tokens[:-1]])
        scored = jax.nn.log_softmax(pair.target.forward(pair.target_params, text).logits_BTV[0, 2:])
        expected = jnp.take_along_axis(scored, jnp.asarray(row.tokens)[:, None], axis=1)[:, 0]
        assert_allclose(row.log_probs, expected, atol=2e-5)


def test_the_loop_may_stand_inside_another_program(pair):
    """Compiler options apply to the outermost program alone."""
    from specsamp.analysis.workload import Workload, decoders
    from specsamp.decoding.drafters import ModelDrafter

    work = Workload(prompt_length=4, max_new_tokens=4, repeats=1)
    side = decoders(pair, {"": Method(drafter=ModelDrafter(pair.draft, 2))}, work)[""]

    def run(state):
        return side.engine.loop.run(side.engine.weights, state, 9).tokens_BS

    assert jax.eval_shape(run, side.prefill(side.requests(0))).shape == (1, side.engine.slots)
    inside = jax.jit(run)(side.prefill(side.requests(0)))
    by_name = Loop.run(
        self=side.engine.loop,
        weights=side.engine.weights,
        state=side.prefill(side.requests(0)),
        max_rounds=9,
    )
    assert_array_equal(inside, by_name.tokens_BS)
    assert_array_equal(inside[0, 4:8], jnp.asarray(side.decode(0).texts[0]))
    assert (
        dataclasses.replace(side.engine.loop.target, weight_order="default").compiler_options == ()
    )


def test_options_that_a_compiler_refuses_are_left_out():
    """Otherwise no program of a model could be compiled by a version without one of them."""
    options_on.cache_clear()
    known = FEW_ROWS[1]
    assert options_on("cpu", (("xla_no_such_option", "1"), known)) == (known,)
    assert options_on("tpu", (known, *ON_TPU)) == ()
