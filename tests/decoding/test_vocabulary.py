"""A draft model with another tokenizer: texts are exact, and it reads them in its own ids."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import BlockRule, CoupledRule, Draft, Loop, TokenRule, chain, temperature, top_k
from specsamp.decoding.drafters.translating import (
    SharedVocabulary,
    TranslatingDrafter,
    TranslatingWeights,
    restrict,
)
from specsamp.decoding.state import Weights
from support.fakes import FALSE_ALARM, TableLM, decode, prefill, random_table, texts
from support.loop_distributions import FULL, TARGET, V, distribution_test
from support.refusals import refused_calls

DRAFT_SIZE = 4
# Target token 1 is the draft ids 3 and 1, each of which alone is no target token.
SHARED = SharedVocabulary([2, -1, 0], [[2, -1], [3, 1], [0, -1]], DRAFT_SIZE, begin=(1,))
ALL = SharedVocabulary([2, 1, 0], [[2], [1], [0]], DRAFT_SIZE)
DRAFT = random_table(3, DRAFT_SIZE)
SAMPLED = {"length": 3, "samples": 30_000, "powered": False}


def weights_of(vocabulary, table=DRAFT):
    drafter = TranslatingDrafter(TableLM(DRAFT_SIZE), vocabulary, 1)
    return drafter.prepare(table)


def loop_of(rule=TokenRule(), vocabulary=SHARED, K=2, drafter=TranslatingDrafter, **options):
    return Loop(
        target=TableLM(V), drafter=drafter(TableLM(DRAFT_SIZE), vocabulary, K, **options), rule=rule
    )


def test_the_text_has_the_distribution_of_the_target():
    loop, sampling = loop_of(BlockRule()), chain(temperature(1.3))
    assert distribution_test(loop, weights_of(SHARED), sampling, **SAMPLED) > FALSE_ALARM


@dataclasses.dataclass(frozen=True)
class OneToken(TranslatingDrafter):
    """A mutant: draws one token from a distribution, and reports a different one."""

    def propose(self, weights, state, prefix, cache, sample):
        of_model = dataclasses.replace(weights, draft=weights.draft.model)
        length_B = self._length(state, prefix.lengths_B)
        logits_BU, draft_cache = self._drafter.last_logits(
            of_model, state.cache, state.ids_BD, length_B, 3
        )
        drawn_BV, verified_BV = self.distributions(
            logits_BU, restrict(logits_BU, weights.draft.draft_ids_V)
        )
        draft = Draft(
            tokens_BK=sample(drawn_BV, 0)[0][:, None],
            num_drafted_B=jnp.ones_like(length_B),
            log_probs_BRV=verified_BV[:, None],
        )
        return draft, dataclasses.replace(state, cache=draft_cache), cache


class OtherIdsAreTokenZero(OneToken):
    """Reports token 0 with the probability of all ids without a target token added."""

    def distributions(self, logits_BU, logits_BV):
        log_probs_BV = restrict(
            jax.nn.log_softmax(logits_BU), jnp.asarray(self.vocabulary.draft_ids_V)
        )
        missing_B = 1 - jnp.exp(log_probs_BV).sum(axis=1)
        return logits_BV, log_probs_BV.at[:, 0].set(
            jnp.log(jnp.exp(log_probs_BV[:, 0]) + missing_B)
        )


class TwoIdsForOneToken(OneToken):
    """Draws target token 0 for draft ids 2 and 3, and reports the probability of id 2 alone."""

    def distributions(self, logits_BU, logits_BV):
        both_BV = logits_BV.at[:, 0].set(jnp.logaddexp(logits_BU[:, 2], logits_BU[:, 3]))
        return both_BV, jax.nn.log_softmax(logits_BV)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [OtherIdsAreTokenZero, TwoIdsForOneToken])
def test_another_distribution_than_the_drawn_one_is_caught(mutant):
    p_value = distribution_test(loop_of(drafter=mutant, K=1), weights_of(SHARED), FULL, **SAMPLED)
    assert p_value < FALSE_ALARM**2


# Input of the draft: its distributions equal the draft model's own on the same ids.

PROMPTS = [[0], [1, 1, 2, 1, 0], [2, 0, 1, 1]]
DRAWN = chain(temperature(1.0))


def alone(vocabulary, text):
    """Returns the draft model's own distribution after a text of the target, float ``[V]``."""
    reading = [[i for i in ids if i >= 0] for ids in np.asarray(vocabulary.reading_VM)]
    ids = [DRAFT_SIZE] * 3 + [
        *vocabulary.begin,
        *itertools.chain.from_iterable(reading[token] for token in text),
    ]
    logits_U = np.asarray(DRAFT)[tuple(ids[-3:])]
    ids_V = np.asarray(vocabulary.draft_ids_V)
    probs_V = np.where(ids_V >= 0, np.exp(logits_U)[np.maximum(ids_V, 0)], 0)
    return probs_V / probs_V.sum()


def worst_error(loop, rounds=6, state=None):
    """Returns the largest difference of drafted distributions from `alone`, over some rounds."""
    weights = Weights(target=TARGET, draft=weights_of(SHARED))
    state = (
        prefill(loop, TARGET, weights.draft, PROMPTS, 30, DRAWN, samples=4, slots=60)
        if state is None
        else state
    )
    worst, drafted = 0.0, 0
    draft_of = jax.jit(lambda request, state: loop.draft(weights, request, state)[0])
    for _ in range(rounds):
        draft = draft_of(state.request, state)
        for row, text in enumerate(texts(state)):
            for k in range(int(draft.num_drafted_B[row])):
                expected = alone(SHARED, [*text, *map(int, draft.tokens_BK[row, :k])])
                worst = max(worst, np.abs(np.exp(draft.log_probs_BRV[row, k]) - expected).max())
                drafted += 1
        state = loop.run(weights, state, 1)
    assert drafted > 20
    return worst


@pytest.mark.slow
def test_draft_reads_the_text_in_own_ids():
    """Chunks and pauses: test_next_round.py."""
    assert worst_error(loop_of(K=3)) < 1e-6


class OneIdShort(TranslatingDrafter):
    """A mutant: the first call of a round feeds one id, although more may be new."""

    first_window = 1


def test_other_bytes_and_short_cache_are_caught():
    other = SharedVocabulary(SHARED.draft_ids_V, [[2, -1], [1, 3], [0, -1]], DRAFT_SIZE, begin=(1,))
    loop = loop_of(K=3)
    assert (
        worst_error(dataclasses.replace(loop, drafter=OneIdShort(TableLM(DRAFT_SIZE), SHARED, 3)))
        > 0.05
    )
    draft = TranslatingWeights(
        model=DRAFT, draft_ids_V=SHARED.draft_ids_V, reading_VM=jnp.asarray(other.reading_VM)
    )
    state = prefill(loop, TARGET, draft, PROMPTS, 30, DRAWN, samples=4, slots=60)
    assert worst_error(loop, state=state) > 0.05


def test_row_beyond_draft_positions_continues_undrafted():
    """The draft has 20 positions; the target's text does not change."""
    short = Loop(
        target=TableLM(V),
        drafter=TranslatingDrafter(TableLM(DRAFT_SIZE, max_positions=20), SHARED, 2),
        rule=CoupledRule(),
    )
    run = decode(short, TARGET, weights_of(SHARED), PROMPTS, 40, FULL, samples=3)
    whole = decode(loop_of(CoupledRule()), TARGET, weights_of(SHARED), PROMPTS, 40, FULL, samples=3)
    assert texts(run.state) == texts(whole.state)
    assert 0 < run.state.stats.drafted_B.min() and run.state.stats.drafted_B.max() < 40
    assert whole.state.stats.drafted_B.min() > 40


def test_context_without_shared_token_ends_draft():
    table = DRAFT.at[..., 2].set(-jnp.inf).at[2, ..., 0].set(-jnp.inf).at[:, :, 0, 0].set(-jnp.inf)
    for sampling in (FULL, chain(temperature(1.0), top_k(2))):
        run = decode(
            loop_of(K=3), TARGET, weights_of(SHARED, table), PROMPTS, 12, sampling, samples=20
        )
        stats = run.state.stats
        assert 0 < stats.drafted_B.sum() < 3 * stats.rounds_B.sum()
        assert (run.state.finish_B == 2).all(), "all rows wrote their budget"


def share(draft_ids_V):
    return SharedVocabulary(draft_ids_V, SHARED.reading_VM, DRAFT_SIZE)


SHORT = TranslatingDrafter(TableLM(DRAFT_SIZE, max_positions=2), SHARED, 2)

test_refused_vocabularies = refused_calls(
    {
        "draft_ids_V has draft id 2 twice": lambda: share(draft_ids_V=[2, 2, 0]),
        "must hold ids below draft_size = 4; got -1 to 4": lambda: share(draft_ids_V=[4, -1, 0]),
        "has 3 target and 4 draft tokens, but the models 5 and 4": lambda: loop_of().drafter.check(
            TableLM(5), None, DRAFT
        ),
        "must be a SharedVocabulary": lambda: TranslatingDrafter(TableLM(DRAFT_SIZE), None, 2),
        "K = 2 does not fit the draft's 2 positions": lambda: SHORT.check(TableLM(3), None, DRAFT),
    }
)
