"""Heads on the target's features: completions are exact, and right features are accepted."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import FeatureDrafter, Loop, Pair, TokenRule, chain, temperature
from specsamp.decoding.method import make_method
from specsamp.decoding.state import Weights
from support import mutants
from support.fakes import FALSE_ALARM, prefill
from support.heads import LayeredTable, ShowsTokens, eagle3, medusa, table_head, weights_of
from support.loop_distributions import FULL, TARGET, V, distribution_test
from support.refusals import refused_arguments
from support.weights import drawn_params

K = 2
SAMPLED = {"length": 3, "samples": 30_000, "powered": False}  # enough to detect the mutants


def distribution_loop(head, rule, K=K, drafter=FeatureDrafter, **options):
    target = LayeredTable(V)
    return Loop(target=target, drafter=drafter(target, head, K, **options), rule=rule)


REDUCED = eagle3(V, draft_vocab_size=2)


def test_head_text_has_the_target_distribution():
    """One prompt has a single token, and so no draft in its first round. Medusa: test_pairs.py."""
    loop = distribution_loop(REDUCED, TokenRule())
    assert distribution_test(loop, weights_of(REDUCED), FULL, **SAMPLED) > FALSE_ALARM


@pytest.mark.slow
def test_target_reduced_like_its_head_is_caught():
    loop = distribution_loop(REDUCED, mutants.OfTheDraftVocabulary())
    assert distribution_test(loop, weights_of(REDUCED), FULL, **SAMPLED) < FALSE_ALARM**2


class ByOneHead(FeatureDrafter):
    """A mutant: reports the first Medusa head's distribution for the tokens of all heads."""

    def propose(self, *arguments):
        draft, state, cache = super().propose(*arguments)
        first_BRV = jnp.broadcast_to(draft.log_probs_BRV[:, :1], draft.log_probs_BRV.shape)
        return dataclasses.replace(draft, log_probs_BRV=first_BRV), state, cache


@pytest.mark.slow
def test_medusa_verified_by_first_head_is_caught():
    head = medusa(V, 2)
    assert (
        distribution_test(
            distribution_loop(head, TokenRule(), drafter=ByOneHead),
            weights_of(head),
            FULL,
            **SAMPLED,
        )
        < FALSE_ALARM**2
    )


# With right features, the head has the target's distribution.

PROMPTS_READ = [[0], [2, 1, 2, 1], [1, 2, 1, 2, 2]]
WEIGHTS = Weights(target=TARGET, draft=TARGET)
TABLE = chain(temperature(1.0))


def table_loop(drafter=FeatureDrafter, layer=0, K=3):
    target = ShowsTokens(V)
    drafter = drafter(target, table_head(V, layer), K)
    return Loop(target=target, drafter=drafter, rule=TokenRule())


def prefilled(loop, ids=(0, 1, 2), slots=40, samples=1):
    prompts = [PROMPTS_READ[i] for i in ids]
    shape = dict(padded_length=5, slots=slots, samples=samples)
    return prefill(loop, TARGET, TARGET, prompts, 20, TABLE, prompt_ids=ids, **shape)


def first_acceptance(loop):
    """Returns the acceptance rate of the first tokens of drafts."""
    state = loop.run(WEIGHTS, prefilled(loop, samples=50), 1000)
    return float(state.stats.accepted_BT[:, 1:].sum() / state.stats.reached_BK[:, 0].sum())


def test_right_features_are_accepted_always():
    loop = table_loop()
    assert first_acceptance(loop) == 1
    state = loop.run(WEIGHTS, prefilled(loop, samples=50), 1000)
    second = state.stats.accepted_BT[:, 2:].sum() / state.stats.reached_BK[:, 1].sum()
    assert second < 0.9, "or an entry made of an own feature would harm nothing"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [{"drafter": mutants.KeepsItsOwnOutputs}, {"layer": 1}], ids=str)
def test_wrong_features_cost_acceptance(mutant):
    """test_next_round.py has features of the wrong row, and features lost at a chunk's edge."""
    assert first_acceptance(table_loop(**mutant)) < 0.9


def test_one_token_prompt_has_no_first_draft():
    loop = table_loop()
    state = loop.run(WEIGHTS, prefilled(loop), 1)
    assert state.stats.drafted_B.tolist() == [0, 3, 3] and int(state.lengths_B[0]) == 2
    state = loop.run(WEIGHTS, state, 1)
    assert np.asarray(state.stats.drafted_B)[0] == 3


def test_default_draft_is_as_long_as_the_head():
    target, head = LayeredTable(V), medusa(V, 2)
    pair = Pair(target=target, target_params=TARGET, head=head, draft_params=drawn_params(head))
    assert make_method(pair).drafter.K == 2, "fewer than generate's own default"


test_refused_feature_drafters = refused_arguments(table_loop, {"K .*>= 1.*got 0": dict(K=0)})
