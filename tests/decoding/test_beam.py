"""Drafts by beam search: those of a search by hand, exact as one-hot proposals, with a cache of the emitted tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from specsamp import JointThreshold, TokenRule
from specsamp.decoding.drafter import Prefix
from specsamp.decoding.drafters import BeamDrafter
from specsamp.decoding.sampler import Sampler
from specsamp.decoding.state import Weights
from specsamp.sampling.penalties import penalties
from specsamp.sampling.warp import chain, greedy, temperature, top_p
from support.fakes import FALSE_ALARM, ORDER, TableLM, prefill, random_table, table_loop
from support.loop_distributions import FAR, FULL, V, distribution_test
from support.mutants import BeamJudgedByItsScores, BeamThatForgets

SIZE, K = 6, 3
TABLE = random_table(7, SIZE, scale=0.7)
LOGITS = np.asarray(TABLE, np.float64)
TEXTS = [[0], [1, 2], [5, 5, 5], [0, 4, 2, 1], [3, 0, 1, 2, 4, 5, 0]]
PAIRS = [[i, j] for i in range(SIZE) for j in range(SIZE)]
OTHER, TAU = random_table(8, SIZE, scale=0.7), 0.7  # a target that the draft is judged by


def first_state(drafter, draft, prompts, sampling, rule=TokenRule(), target=TABLE):
    """A loop that has read some prompts: itself, its weights, and its state."""
    loop = table_loop(rule, drafter, vocab_size=SIZE)
    return loop, Weights(target=target, draft=draft), prefill(loop, target, draft, prompts, 20, sampling)


def first_draft(*args):
    loop, weights, state = first_state(*args)
    return jax.jit(lambda state: loop.draft(weights, state.request, state)[0])(state)


def search(logits, warp, prompt, beams, length=K):
    """A beam search by its definition: the tokens of the best hypothesis and their log-probabilities.

    Args:
      logits: a table.
      warp: of logits ``[V]`` and the text after the prompt, for the log-probabilities.
    """
    hypotheses = [((), ())]
    for _ in range(length):
        longer = [
            (text + (token,), scores + (score,))
            for text, scores in hypotheses
            for token, score in enumerate(warp(logits[after(prompt, text)], text))
        ]
        hypotheses = sorted(longer, key=lambda one: -sum(one[1]))[:beams]
    return hypotheses[0]


def after(prompt, text):
    return tuple(([SIZE] * ORDER + [*prompt, *text])[-ORDER:])


def plain(logits, text):
    return log_softmax(logits)


def of_the_nucleus(logits, text):
    """Temperature .7 and top-p .8, by their definition."""
    probs = softmax(logits / 0.7)
    more_probable = np.array([probs[probs > one].sum() for one in probs])
    return log_softmax(np.where(more_probable < 0.8, logits / 0.7, -np.inf))


def penalised(logits, text):
    return log_softmax(logits - 1.5 * np.isin(np.arange(SIZE), text))


def certain(logits, text):
    return np.where(np.arange(SIZE) == logits.argmax(), 0.0, -np.inf)


@pytest.mark.parametrize(
    "sampling, warp, beams",
    [
        (FULL, plain, 1),
        (FULL, plain, 4),
        (chain(temperature(0.7), top_p(0.8)), of_the_nucleus, 4),
        (chain(penalties(presence=1.5)), penalised, 4),
        (greedy(), certain, 4),
    ],
    ids=["one beam", "full", "nucleus", "penalties", "greedy"],
)
def test_a_draft_is_what_a_search_by_hand_finds(sampling, warp, beams):
    """Searches every row of a ragged batch, with the draft's warped log-probabilities; one beam is the greedy chain."""
    draft, logits, differ = first_draft(BeamDrafter(TableLM(SIZE), K, beams=beams), TABLE, TEXTS, sampling), LOGITS, 0
    assert draft.num_drafted_B.tolist() == [K] * len(TEXTS) and draft.log_probs_BRV is None
    for row, prompt in enumerate(TEXTS):
        tokens, scores = search(logits, warp, prompt, beams)
        assert draft.tokens_BK[row].tolist() == list(tokens)
        np.testing.assert_allclose(draft.scores_BK[row], scores, atol=1e-5)
        text = ()
        for _ in range(K):
            text += (int(warp(logits[after(prompt, text)], text).argmax()),)
        differ += tokens != text
    assert (differ > 0) == (beams > 1 and warp is not certain), "the control: a wider beam finds others"


def test_the_text_has_the_distribution_of_the_target():
    """Verified as a certain token; by the draft's probability of it, which it was not drawn with, it is not."""
    few = dict(length=3, samples=10_000, powered=False)
    loop = table_loop(TokenRule(), BeamDrafter(TableLM(V), 2, beams=2))
    assert distribution_test(loop, FAR, FULL, **few) > FALSE_ALARM
    wrong = dataclasses.replace(loop, drafter=BeamJudgedByItsScores(TableLM(V), 2, beams=2))
    assert distribution_test(wrong, FAR, FULL, **few) < FALSE_ALARM * 1e-6


def test_the_joint_ratio_decides():
    """Counts how many tokens stay of each prompt's draft, by the probabilities of the target and of the draft."""
    drafter, target, counts = BeamDrafter(TableLM(SIZE), K, beams=3), np.asarray(OTHER, np.float64), []
    loop, weights, state = first_state(drafter, TABLE, PAIRS, FULL, JointThreshold(TAU), OTHER)
    state = loop.run(weights, state, 1)
    for row, prompt in enumerate(PAIRS):
        tokens, scores = search(LOGITS, plain, prompt, 3)
        log_q = [plain(target[after(prompt, tokens[:k])], ())[tokens[k]] for k in range(K)]
        ratios = np.exp(np.cumsum(log_q) - np.cumsum(scores))
        assert np.abs(ratios - TAU).min() > 1e-4, "a near-tie"
        accepted = max((k + 1 for k in range(K) if ratios[k] > TAU), default=0)
        assert state.lengths_B[row] - len(prompt) - 1 == accepted
        assert state.tokens_BS[row, 2 : 2 + accepted].tolist() == list(tokens[:accepted])
        np.testing.assert_allclose(state.meter.variation[row, 2 : 2 + accepted], -np.expm1(log_q[:accepted]), atol=1e-5)
        counts.append(accepted)
    assert set(counts) == set(range(K + 1))


@pytest.mark.parametrize("beam", [BeamDrafter, BeamThatForgets])
def test_its_cache_holds_the_text(beam):
    """Holds, after rounds of every length, all but the last two tokens, which the next round reads; a `TableLM` caches tokens."""
    loop, weights, state = first_state(beam(TableLM(SIZE), K, beams=3), TABLE, PAIRS, FULL, JointThreshold(TAU), OTHER)
    knows_all = True
    for _ in range(4):
        state = loop.run(weights, state, 1)
        is_known_BS = jnp.arange(state.tokens_BS.shape[1])[None, :] < state.lengths_B[:, None] - 2
        knows_all &= bool(jnp.all(jnp.where(is_known_BS, state.drafter_state == state.tokens_BS, True)))
    assert knows_all == (beam is BeamDrafter)


def test_a_row_searches_alone():
    """Searches with adaptive lengths as in a round of each row's length, though the round is wider."""
    drafter = BeamDrafter(TableLM(SIZE), K, beams=4)
    _, weights, state = first_state(drafter, TABLE, TEXTS, FULL)
    wanted = [K - 1, 1, K - 1, 2, K]
    prefix = Prefix(tokens_BS=state.tokens_BS, lengths_B=state.lengths_B)

    @jax.jit
    def propose(draft_lengths_B):
        sample = Sampler(warp=FULL, rule=TokenRule(), keys=None, draft_lengths_B=draft_lengths_B)
        return drafter.propose(weights, state.drafter_state, prefix, state.cache, sample)[0]

    draft = propose(jnp.asarray(wanted))
    for row, (prompt, length) in enumerate(zip(TEXTS, wanted)):
        tokens, scores = search(LOGITS, plain, prompt, 4, length)
        assert draft.tokens_BK[row, :length].tolist() == list(tokens)
        np.testing.assert_allclose(draft.scores_BK[row, :length], scores, atol=1e-5)
