"""Drafts of an assistant are judged by the distribution that their tokens are drawn from."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import BlockRule, TokenRule, chain, generate
from specsamp.decoding.drafters import AssistantDrafter, FeatureTree
from specsamp.decoding.trees import TreeShape
from specsamp.tpu.lowering import sharded_head_model
from support import pairs
from support.drafters import DRAFTERS, K, with_errors
from support.fakes import FALSE_ALARM
from support.heads import LayeredTable, assistant
from support.refusals import refused_calls
from support.weights import drawn_params

PROMPTS, SAMPLES = [[0], [2, 0, 1, 1]], 4000
TARGET = pairs.Case(cache="windowed").target


class Argmax(TokenRule):
    def sample(self, log_probs_BV, keys, offset):
        return jnp.argmax(log_probs_BV, axis=-1).astype(jnp.int32)


class JudgesArgmaxAsDrawn(AssistantDrafter):
    """Drafts the most probable tokens, and says that they were drawn."""

    def propose(self, weights, state, prefix, cache, sample):
        chosen = dataclasses.replace(sample, rule=Argmax())
        return super().propose(weights, state, prefix, cache, chosen)


def p_value(kind, rule):
    """Returns the p-value of the joint distribution of texts, and how many drafts were accepted."""
    pair = with_errors(DRAFTERS["assistant"].pair(TARGET))
    pair = dataclasses.replace(pair, target_params=drawn_params(TARGET))
    found = generate(
        pair,
        PROMPTS,
        pairs.LENGTH,
        num_samples=SAMPLES,
        seed=0,
        drafter=kind(pair.target, pair.head, K),
        rule=rule,
        sampling=chain(),
    )
    values = []
    for index, prompt in enumerate(PROMPTS):
        texts_ST = np.array([one.tokens for one in found if one.prompt_index == index])
        expected = pairs.enumerated("windowed", "none", index, tuple(prompt), "none")
        values.append(pairs.p_value(texts_ST, expected))
    accepted = sum(one.stats.accepted for one in found) / sum(one.stats.drafted for one in found)
    return len(values) * min(values), accepted


@pytest.mark.parametrize("rule", [TokenRule(), BlockRule()])
def test_texts_have_the_joint_distribution_of_the_target(rule):
    value, accepted = p_value(AssistantDrafter, rule)
    assert value > FALSE_ALARM and 0.05 < accepted < 0.9


def test_argmax_drafts_verified_as_drawn_are_caught():
    assert p_value(JudgesArgmaxAsDrawn, TokenRule())[0] < FALSE_ALARM


test_refused_assistants = refused_calls(
    {
        "an assistant drafts chains": lambda: FeatureTree(
            LayeredTable(4), assistant(4), tree=TreeShape.of_widths(2, 1)
        ),
        "an assistant reads the target's": lambda: sharded_head_model(TARGET, assistant(4), None),
    }
)
