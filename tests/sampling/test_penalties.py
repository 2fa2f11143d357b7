"""Penalties and biases: formulas, bounds, and the enumerated distribution of texts under them."""

import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import (
    BlockRule,
    ModelDrafter,
    ban,
    bias,
    chain,
    generate,
    greedy,
    penalties,
    temperature,
)
from specsamp.sampling.rules import Draft, TargetDistributions
from specsamp.sampling.warp import log_probs
from support.fakes import FALSE_ALARM, TableLM, joint_distribution, table_loop, table_pair
from support.loop_distributions import NEAR, PROMPTS, TARGET, V, distribution_test
from support.refusals import refusal, refused_calls
from support.tree_mutants import StatesInOrder

REPETITION, PRESENCE, FREQUENCY = 1.4, 0.3, 0.4
SAMPLING = chain(penalties(REPETITION, PRESENCE, FREQUENCY), bias({1: 0.8}), temperature(1.2))


def penalised(logits, prompt, text):
    """Returns the penalised logits of one context, by the formulas."""
    logits = logits.copy()
    for token in range(len(logits)):
        if token in prompt or token in text:
            logits[token] = (
                logits[token] / REPETITION if logits[token] > 0 else logits[token] * REPETITION
            )
        logits[token] -= PRESENCE * (token in text) + FREQUENCY * text.count(token)
    logits[1] += 0.8
    return logits


def expected(changed):
    hot = chain(temperature(1.2))
    return [joint_distribution(TARGET, hot, prompt, 3, changed) for prompt in PROMPTS]


def test_texts_follow_the_penalised_distribution():
    """A drafted position depends on earlier drafted tokens, in the draft and in the target.
    decoding/test_pairs.py plants mistakes in that.
    """
    loop = table_loop(BlockRule(), ModelDrafter(TableLM(V), 2))
    found = distribution_test(loop, NEAR, SAMPLING, length=3, expected=expected(penalised))
    assert found > FALSE_ALARM


@pytest.mark.parametrize("kind, is_right", [(TargetDistributions, True), (StatesInOrder, False)])
def test_tree_node_is_penalised_for_its_path(kind, is_right):
    parents, tokens = [0, 0, 1, 2, 3], [1, 0, 2, 2, 1]
    draft = Draft(
        tokens_BK=jnp.asarray([tokens]),
        num_drafted_B=jnp.asarray([5]),
        parents_BK=jnp.asarray([parents]),
    )
    logits_BTV = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, V)), jnp.float32)
    begun = SAMPLING.init(jnp.asarray([[0, 2]]), jnp.asarray([2]), V)
    states, worst = [begun], 0.0
    for token, parent in zip(tokens, parents):
        states.append(SAMPLING.advance(states[parent], jnp.asarray([token])))
    found_BTV = kind(logits_BTV=logits_BTV, warp=SAMPLING, draft=draft, warp_state=begun).all()
    for row, state in enumerate(states):
        expected_BV = log_probs(SAMPLING, logits_BTV[:, row], state)
        worst = max(worst, float(jnp.abs(found_BTV[:, row] - expected_BV).max()))
    assert worst < 1e-5 if is_right else worst > 0.1


UNTIL = 2  # the length of drafts: a round begins before it and ends after it
EARLY = chain(bias({2: -np.inf}, until=UNTIL), bias({1: 0.8}, room=8), temperature(1.2))


def test_a_bias_ends_within_a_drafted_block():
    def biased(logits, prompt, text):
        return logits + [0, 0.8, -np.inf if len(text) < UNTIL else 0]

    loop = table_loop(BlockRule(), ModelDrafter(TableLM(V), 2))
    found = distribution_test(loop, NEAR, EARLY, length=3, expected=expected(biased))
    assert found > FALSE_ALARM


@pytest.mark.parametrize("repetition", [1e-10, 1e10])
def test_numbers_at_their_bounds_stay_finite(repetition):
    numbers = penalties(repetition, presence=1e20, frequency=-1e20)
    warp = chain(bias({0: 1e20}), numbers, temperature(1e-5))
    state = warp.init(jnp.asarray([[0, 1]]), jnp.asarray([2]), 3)
    for token in (0, 1):
        state = warp.advance(state, jnp.asarray([token]))
    probs = np.exp(log_probs(warp, jnp.asarray([[1.0, -2.0, 3.0]]), state))
    np.testing.assert_allclose(probs.sum(), 1, rtol=1e-6)


def test_biases_may_differ_by_row():
    logits_BTV = jnp.zeros((2, 2, 4))
    warp = bias({3: [-np.inf, 0.0], 0: [0.0, np.log(3)]})
    probs = np.exp(log_probs(warp, logits_BTV))
    np.testing.assert_allclose(
        probs[:, 0], [[1 / 3, 1 / 3, 1 / 3, 0], [1 / 2, 1 / 6, 1 / 6, 1 / 6]], rtol=1e-6
    )
    assert np.array_equal(probs[:, 0], probs[:, 1])


def test_the_number_of_biases_seldom_compiles():
    assert ban(range(5)).tokens.shape == (1, 8), "padded"


@pytest.mark.parametrize("sampling", [chain(greedy(), ban([0, 1, 2, 3])), chain(ban(range(12)))])
def test_row_of_banned_tokens_ends_empty(sampling):
    rows = generate(table_pair(), [[1, 2], [5]], 6, sampling=sampling, draft_length=2)
    assert all(token > 3 for row in rows for token in row.tokens)
    assert all(row.finish == "invalid" or len(row.tokens) == 6 for row in rows)
    assert rows[0].finish == "invalid"


def test_tokens_that_the_vocabulary_has_not_are_refused():
    for options in (dict(sampling=chain(ban([12]))), dict(draft_sampling=chain(bias({99: 1.0})))):
        with refusal("a biased token must be an id below 12; got"):
            generate(table_pair(), [[1]], 2, **options)


test_refused_penalties = refused_calls(
    {
        r"repetition must lie in \[1e-10, 1e[+]10\]; got 0.0": lambda: penalties(repetition=0.0),
        r"presence must lie in \[-1e[+]20, 1e[+]20\]; got nan": lambda: penalties(presence=np.nan),
        r"frequency must lie in \[-1e[+]20, 1e[+]20\]; got -1e": lambda: penalties(frequency=-1e38),
        "banned tokens must be a list of ids; got 5": lambda: ban(5),
        "biases must be a mapping from token ids to numbers": lambda: bias([1]),
        "a biased token must be an id >= 0; got -1": lambda: ban([-1]),
        "a bias must be at most 1e20; got inf": lambda: bias({2: np.inf}),
        "a bias must be at most 1e20; got 3e": lambda: bias({2: 3e38}),  # logits would be infinite
    }
)
