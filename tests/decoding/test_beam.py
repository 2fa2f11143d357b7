"""Beam drafts equal a search by hand, are exact as one-hot proposals, and can be judged by their
joint probability. test_next_round.py compares their cache with the text.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from specsamp import BeamDrafter, JointThreshold, TokenRule, chain, greedy, penalties, temperature
from specsamp.decoding.state import Weights
from support.extras import slow_but
from support.fakes import FALSE_ALARM, ORDER, TableLM, prefill, random_table, table_loop
from support.loop_distributions import FAR, FULL, V, distribution_test

SIZE, K, TAU = 6, 3, 0.7
TABLE, OTHER = (random_table(seed, SIZE, scale=0.7) for seed in (7, 8))
PAIRS = [[i, j] for i in range(SIZE) for j in range(SIZE)]


def first_state(drafter, prompts, sampling, rule=TokenRule(), target=TABLE):
    """Returns a loop, its weights, and its state after prefill of these prompts."""
    loop = table_loop(rule, drafter, vocab_size=SIZE)
    state = prefill(loop, target, TABLE, prompts, 20, sampling)
    return loop, Weights(target=target, draft=TABLE), state


def after(table, prompt, text):
    return np.asarray(table, np.float64)[tuple(([SIZE] * ORDER + [*prompt, *text])[-ORDER:])]


def search(warp, prompt, beams):
    """Returns the best hypothesis of a beam search by definition: tokens and log-probabilities."""
    hypotheses = [((), ())]
    for _ in range(K):
        longer = [
            (text + (token,), scores + (score,))
            for text, scores in hypotheses
            for token, score in enumerate(warp(after(TABLE, prompt, text), text))
        ]
        hypotheses = sorted(longer, key=lambda one: -sum(one[1]))[:beams]
    return hypotheses[0]


def plain(logits, text):
    return log_softmax(logits)


def penalised(logits, text):
    return log_softmax(logits / 0.7 - 1.5 * np.isin(np.arange(SIZE), text))


def certain(logits, text):
    return np.where(np.arange(SIZE) == logits.argmax(), 0.0, -np.inf)


CASES = {
    "one beam": (FULL, plain, 1),
    "full": (FULL, plain, 4),
    "penalties": (chain(temperature(0.7), penalties(presence=1.5)), penalised, 4),
    "greedy": (greedy(), certain, 4),
}


@pytest.mark.parametrize("case", slow_but(CASES, "full", "penalties"))
def test_beam_draft_equals_a_search_by_hand(case):
    """Each row of a ragged batch has the tokens and warped probabilities of a search by hand; with
    one beam these are the greedy chain.
    """
    sampling, warp, beams = CASES[case]
    texts = [[0], [1, 2], [5, 5, 5], [0, 4, 2, 1], [3, 0, 1, 2, 4, 5, 0]]
    loop, weights, state = first_state(BeamDrafter(TableLM(SIZE), K, beams=beams), texts, sampling)
    draft = jax.jit(lambda state: loop.draft(weights, state.request, state)[0])(state)
    found = [search(warp, prompt, beams) for prompt in texts]
    assert draft.num_drafted_B.tolist() == [K] * len(texts) and draft.log_probs_BRV is None
    assert draft.tokens_BK.tolist() == [list(tokens) for tokens, _ in found]
    np.testing.assert_allclose(draft.scores_BK, [scores for _, scores in found], atol=1e-5)
    chains = [search(warp, prompt, 1) for prompt in texts]
    assert (chains != found) == (beams > 1 and warp is not certain), "the control"


class JudgedByItsScores(BeamDrafter):
    """Reports its most probable tokens as if it had drawn them."""

    def propose(self, *arguments):
        draft, state, cache = super().propose(*arguments)
        is_token_BKV = jax.nn.one_hot(draft.tokens_BK, V, dtype=bool)
        score_BK1 = draft.scores_BK[..., None]
        laws = jnp.where(is_token_BKV, score_BK1, jnp.log(-jnp.expm1(score_BK1) / (V - 1)))
        return dataclasses.replace(draft, log_probs_BRV=laws), state, cache


@pytest.mark.parametrize("kind, is_exact", [(BeamDrafter, True), (JudgedByItsScores, False)])
def test_the_text_has_the_distribution_of_the_target(kind, is_exact):
    loop = table_loop(TokenRule(), kind(TableLM(V), 2, beams=2))
    found = distribution_test(loop, FAR, FULL, length=3, samples=10_000, powered=False)
    assert found > FALSE_ALARM if is_exact else found < FALSE_ALARM * 1e-6


def test_the_joint_ratio_decides():
    """The ratio of joint probabilities sets the accepted length; the meter counts it as certain."""
    drafter = BeamDrafter(TableLM(SIZE), K, beams=3)
    counts = set()
    loop, weights, state = first_state(drafter, PAIRS, FULL, JointThreshold(TAU), OTHER)
    state = loop.run(weights, state, 1)
    for row, prompt in enumerate(PAIRS):
        tokens, scores = search(plain, prompt, 3)
        log_q = [plain(after(OTHER, prompt, tokens[:k]), ())[tokens[k]] for k in range(K)]
        ratios = np.exp(np.cumsum(log_q) - np.cumsum(scores))
        assert np.abs(ratios - TAU).min() > 1e-4, "a near-tie"
        count = int(np.cumprod(ratios > TAU).sum())
        assert state.lengths_B[row] - len(prompt) - 1 == count
        assert state.tokens_BS[row, 2 : 2 + count].tolist() == list(tokens[:count])
        spent = state.meter.variation[row, 2 : 2 + count]
        np.testing.assert_allclose(spent, -np.expm1(log_q[:count]), atol=1e-5)
        counts.add(count)
    assert counts == set(range(K + 1))
