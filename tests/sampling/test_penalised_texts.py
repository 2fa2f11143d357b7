"""The distribution of whole texts under penalties and biases, by enumeration."""

import functools

import numpy as np
import pytest

from specsamp import BlockRule, CoupledRule, ModelDrafter, NoDrafter, TokenRule, chain, temperature
from specsamp.sampling.penalties import Penalties, bias, penalties
from specsamp.sampling.warp import register_warp
from support.fakes import FALSE_ALARM, TableLM, decode, joint_distribution, table_loop
from support.loop_distributions import NEAR, PROMPTS, TARGET, V, distribution_test

REPETITION, PRESENCE, FREQUENCY = 1.4, 0.3, 0.4
SAMPLING = chain(penalties(REPETITION, PRESENCE, FREQUENCY), bias({1: 0.8}), temperature(1.2))


def penalised(logits, prompt, text):
    """Returns the logits of one context, by the formulas."""
    logits = logits.copy()
    for token in range(len(logits)):
        if token in prompt or token in text:
            logits[token] = logits[token] / REPETITION if logits[token] > 0 else logits[token] * REPETITION
        logits[token] -= PRESENCE * (token in text) + FREQUENCY * text.count(token)
    logits[1] += 0.8
    return logits


@functools.cache
def expected(length=3):
    return [joint_distribution(TARGET, chain(temperature(1.2)), prompt, length, penalised) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "rule, drafter", [(TokenRule(), ModelDrafter(TableLM(V), 2)), (BlockRule(), ModelDrafter(TableLM(V), 2))], ids=str
)
def test_texts_follow_the_penalised_distribution(rule, drafter):
    """A drafted position depends on the drafted tokens before it, in the draft and in the target."""
    assert distribution_test(table_loop(rule, drafter), NEAR, SAMPLING, length=3, expected=expected()) > FALSE_ALARM


def test_coupled_texts_are_those_of_no_draft():
    """Their distribution is that of plain decoding; the control is a draft whose penalties the target does not have."""

    def texts(drafter, sampling=SAMPLING):
        loop = table_loop(CoupledRule(), drafter)
        return decode(loop, TARGET, NEAR, PROMPTS, 20, sampling, samples=100).emitted(20)

    plain = texts(NoDrafter())
    assert np.array_equal(texts(ModelDrafter(TableLM(V), 2)), plain)
    assert not np.array_equal(texts(NoDrafter(), chain(bias({1: 0.8}), temperature(1.2))), plain)


@register_warp
class ForgetsDrafts(Penalties):
    """The control: what was drafted or emitted is not counted."""

    def advance(self, state, tokens_B):
        return state


def test_the_control_is_seen():
    numbers = (np.float32(x) for x in (REPETITION, PRESENCE, FREQUENCY))
    forgetful = chain(ForgetsDrafts(*numbers), bias({1: 0.8}), temperature(1.2))
    loop = table_loop(TokenRule(), ModelDrafter(TableLM(V), 3))
    few = dict(length=3, samples=50_000, powered=False)
    assert distribution_test(loop, NEAR, forgetful, expected=expected(), **few) < FALSE_ALARM
