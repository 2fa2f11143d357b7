"""Votes of several drafters, and choices among drafters, are exact under the distribution that they
report. test_next_round.py compares their states with a text read anew.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import (
    Adaptive,
    BeamDrafter,
    ChoosingDrafter,
    CoupledRule,
    ModelDrafter,
    ModelTree,
    NgramDrafter,
    TokenRule,
    TreeShape,
    VotingDrafter,
)
from specsamp.decoding.drafters.collective import vote
from specsamp.decoding.method import make_method
from specsamp.decoding.state import Weights
from specsamp.sampling.rng import Purpose
from support.fakes import FALSE_ALARM, TableLM, decode, prefill, table_loop, table_pair
from support.loop_distributions import FAR, FULL, NEAR, TARGET, V, distribution_test, first_token
from support.refusals import refused_calls

FEW = dict(length=3, samples=20_000, powered=False)


def models(count, K=2, vocab_size=V):
    return (ModelDrafter(TableLM(vocab_size), K),) * count


# Votes.


def voted(proposals, weights):
    """Returns the vote over one row of proposals, lists of tokens, by definition."""
    elected, agree = [], range(len(proposals))
    while agree := [i for i in agree if len(proposals[i]) > len(elected)]:
        at = len(elected)
        token = {i: proposals[i][at] for i in agree}
        votes = {i: sum(weights[j] for j in agree if token[j] == token[i]) for i in agree}
        winner = max(agree, key=lambda i: (votes[i], -i))
        elected.append(token[winner])
        agree = [i for i in agree if token[i] == token[winner]]
    return elected


def test_votes_are_counted_token_by_token():
    rng = np.random.default_rng(0)
    proposed_BPK = rng.integers(3, size=(300, 4, 3))
    num_BP = rng.integers(4, size=(300, 4))
    weights_BP = rng.integers(3, size=(300, 4)).astype(np.float32)
    tokens_BK, num_drafted_B = vote(*map(jnp.asarray, (proposed_BPK, num_BP, weights_BP)))
    for row in range(300):
        lists = [proposed_BPK[row, i, : num_BP[row, i]].tolist() for i in range(4)]
        assert tokens_BK[row, : num_drafted_B[row]].tolist() == voted(lists, weights_BP[row])


# Distributions: test_pairs.py.

LOOKUP_OR_MODEL = ChoosingDrafter((NgramDrafter(2), *models(1)))


@pytest.mark.parametrize("drafter", [LOOKUP_OR_MODEL, VotingDrafter(LOOKUP_OR_MODEL.parts)])
def test_coupled_texts_equal_plain_decoding(drafter):
    def texts(drafter, weights):
        loop = table_loop(CoupledRule(), drafter)
        return decode(loop, TARGET, weights, [[2, 0, 1]], 30, FULL, samples=50).emitted(30)

    alone = texts(*models(1), FAR)
    np.testing.assert_array_equal(texts(drafter, (None, NEAR)), alone)


def test_shorter_drafts_keep_the_shape_of_the_state():
    """Adaptive lengths draft with narrower drafters, whose states go into the whole one."""
    adaptive = Adaptive(lengths=(1, 2), costs_ms=(1.0, 1.2))
    loop = table_loop(CoupledRule(), LOOKUP_OR_MODEL)
    weights, texts = (None, NEAR), ([[2, 0, 1]], 30, FULL)
    whole = decode(loop, TARGET, weights, *texts, samples=20).emitted(30)
    shorter = decode(loop, TARGET, weights, *texts, samples=20, adaptive=adaptive).emitted(30)
    np.testing.assert_array_equal(shorter, whole)


# Mistakes.


class JudgedByOnePart(VotingDrafter):
    """Reports the winner of a vote with the distribution of the first part."""

    def combine(self, state, drafts):
        law_BKV = drafts[0].log_probs_BRV
        return dataclasses.replace(super().combine(state, drafts), log_probs_BRV=law_BKV)


class LowerIdWins(JudgedByOnePart):
    """Elects the lower of the tokens of two parts."""

    def combine(self, state, drafts):
        tokens_BK = state.tokens_BPK.min(axis=1)
        return dataclasses.replace(super().combine(state, drafts), tokens_BK=tokens_BK)


class LowerIdIsCertain(LowerIdWins):
    """Reports the lower token as a one-hot proposal, which is correct."""

    def combine(self, state, drafts):
        return dataclasses.replace(super().combine(state, drafts), log_probs_BRV=None)


class KnowsTheNoise(ChoosingDrafter):
    """Chooses by the uniform number that will decide whether the first token is accepted."""

    def propose(self, weights, state, prefix, cache, sample):
        offsets_B1 = jnp.zeros_like(prefix.lengths_B)[:, None]
        uniforms_B = sample.keys.uniforms(Purpose.ACCEPT, offsets_B1)[:, 0, 0]
        expected_BP = jnp.stack([uniforms_B, 1 - uniforms_B], axis=1)
        state = dataclasses.replace(state, expected_BP=expected_BP)
        return super().propose(weights, state, prefix, cache, sample)


@pytest.mark.slow
def test_winner_judged_as_drawn_is_caught():
    tables = (0.7, 0.3), (0.5, 0.5)
    two = models(2, 1, 2)
    assert first_token(LowerIdIsCertain(two), *tables, parts=2)[0] == pytest.approx(0.7, abs=0.01)
    assert first_token(LowerIdWins(two), *tables, parts=2)[0] == pytest.approx(0.85, abs=0.01)
    loop = table_loop(TokenRule(), JudgedByOnePart(models(3, 1)))
    assert distribution_test(loop, (FAR,) * 3, FULL, **FEW) < FALSE_ALARM * 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind, is_exact", [(ChoosingDrafter, True), (KnowsTheNoise, False)])
def test_choice_by_target_noise_is_caught(kind, is_exact):
    loop = table_loop(TokenRule(), kind(models(2, 1)))
    found = distribution_test(loop, (FAR, NEAR), FULL, **FEW)
    assert found > FALSE_ALARM if is_exact else found < FALSE_ALARM * 1e-6


def test_parts_draw_with_noise_of_their_own():
    loop = table_loop(TokenRule(), VotingDrafter(models(2, 1)))
    draft = (FAR, FAR)
    state = prefill(loop, TARGET, draft, [[0]], 9, FULL, samples=200)
    drawn = loop.draft(Weights(target=TARGET, draft=draft), state.request, state)[1].tokens_BPK
    assert 50 < (drawn[:, 0, 0] == drawn[:, 1, 0]).sum() < 150


TWO = NgramDrafter(2), ModelDrafter(TableLM(12), 2)
OTHER = ModelDrafter(TableLM(12, max_positions=9), 2)
OTHER_VOCABULARY = ModelDrafter(TableLM(9), 2)
TREE = ModelTree(TableLM(12), tree=TreeShape((0, 0)))
PAIR = table_pair()
THREE_PARAMS = dataclasses.replace(PAIR, draft=None, draft_params=(None, PAIR.draft_params, None))

test_refused_collectives = refused_calls(
    {
        "beams must be an integer >= 1 and below 7; got 7": lambda: BeamDrafter(
            TableLM(6), 3, beams=7
        ),
        r"parts must be two .*, such as .*; got \(NgramDrafter": lambda: VotingDrafter(TWO[:1]),
        "has parts itself: make all": lambda: VotingDrafter((TWO[0], VotingDrafter(TWO))),
        "parts must be two .*, such as .*; got NgramDrafter": lambda: VotingDrafter(TWO[0]),
        r"K must be equal and at least 1; got \[2, 3\]: make": lambda: VotingDrafter(
            (NgramDrafter(2), NgramDrafter(3))
        ),
        "ModelTree drafts a tree: leave it out": lambda: VotingDrafter((TWO[0], TREE)),
        r"costs must be 2 numbers, .*; got \(1.0,\)": lambda: ChoosingDrafter(TWO, (1.0,)),
        r"costs\[1\] must be a number above 0; got 0": lambda: ChoosingDrafter(TWO, (1.0, 0)),
        "draft vocabulary 9 != target vocabulary 12: use": lambda: make_method(
            PAIR, drafter=VotingDrafter((TWO[0], OTHER_VOCABULARY))
        ),
        "3 drafters, 2 with different parameters: make draft_params a tuple of 3": lambda: (
            make_method(PAIR, drafter=VotingDrafter((*TWO, OTHER)))
        ),
        "2 drafters, 1 with different parameters: make draft_params a tuple of 2": lambda: (
            make_method(THREE_PARAMS, drafter=VotingDrafter(TWO))
        ),
    }
)
