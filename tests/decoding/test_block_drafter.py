"""Blocks drafted in one call: completions are exact under every law of a draft, and a block reads
the whole context and no stale row.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from specsamp import (
    BlockDrafter,
    BlockRule,
    CoupledRule,
    Loop,
    TokenRule,
    ban,
    chain,
    greedy,
    temperature,
)
from specsamp.decoding.drafters import FeatureDrafter
from specsamp.decoding.sampler import Sampler
from specsamp.decoding.state import Weights, gather_tokens
from specsamp.models.kernels.dispatch import PallasKernels
from specsamp.sampling.rng import RoundKeys, row_keys
from support.extras import slow_but
from support.fakes import FALSE_ALARM, decode, prefill
from support.heads import (
    LayeredTable,
    ShowsTokens,
    TableBlock,
    block,
    dflash2,
    dspark,
    medusa,
    table_block,
    weights_of,
)
from support.loop_distributions import FULL, TARGET, V, distribution_test
from support.refusals import refused_calls

SAMPLED = {"length": 3, "samples": 30_000, "powered": False}


def p_value_of(head, rule=TokenRule(), sampling=FULL, drafter=BlockDrafter, K=3, **options):
    target = LayeredTable(V)
    loop = Loop(target=target, drafter=drafter(target, head, K, **options), rule=rule)
    return distribution_test(loop, weights_of(head), sampling, **SAMPLED)


REDUCED = block(V, from_anchor=True, draft_vocab_size=2, own_output=True)


LAWS = [(dspark(V), "conditional"), (REDUCED, "argmax")]


@pytest.mark.parametrize("head, law", slow_but(LAWS, LAWS[0]))
def test_block_head_text_has_the_target_distribution(head, law):
    """One prompt has a single token, and so no draft in its first round."""
    assert p_value_of(head, BlockRule(), chain(temperature(1.3)), law=law) > FALSE_ALARM


def plain(drafter, **changes):
    """Returns the drafter without its mistake."""
    return BlockDrafter(**(vars(drafter) | changes))


class MarginalsJudgedAsConditionals(BlockDrafter):
    """Draws the tokens of a block independently, but reports their conditional distributions."""

    def propose(self, weights, state, prefix, cache, sample):
        draft, state, cache = plain(self, law="marginals").propose(
            weights, state, prefix, cache, sample
        )
        head = self.head
        pending_B = gather_tokens(prefix.tokens_BS, prefix.lengths_B - 1, 1)[:, 0]
        rows, logits, _ = self._run_block(weights, state, prefix)
        correction = head.begin(weights.draft, len(pending_B))
        judged = []
        for k, token_B in enumerate([pending_B, *draft.tokens_BK.T[:-1]]):
            logits_BU, correction = head.correct(
                weights.draft, logits[:, k], rows[:, k], token_B, correction
            )
            judged.append(sample(logits_BU, k)[1])
        return dataclasses.replace(draft, log_probs_BRV=jnp.stack(judged, axis=1)), state, cache


@pytest.mark.slow
def test_marginals_that_are_judged_as_conditionals_are_caught():
    head = dspark(V, confidence=None)
    assert p_value_of(head, law="marginals") > FALSE_ALARM
    assert p_value_of(head, drafter=MarginalsJudgedAsConditionals) < FALSE_ALARM**2


# With a right context, the first token has the target's distribution; drawn in order, all have it.

WEIGHTS = Weights(target=TARGET, draft=TARGET)


def accepted_share(
    drafter=BlockDrafter, law="conditional", K=4, budget=20, slots=40, table=TARGET, chunk=None
):
    """Returns the acceptance rate by position, given that all earlier tokens were accepted."""
    vocab_size = table.shape[-1]
    target = ShowsTokens(vocab_size)
    loop = Loop(
        target=target, drafter=drafter(target, table_block(vocab_size), K, law), rule=TokenRule()
    )
    weights = Weights(target=table, draft=table)
    prompts = [[0], [1, 1, 0, 1], [1, 0, 1, 0, 0]]
    shape = dict(padded_length=5, slots=slots, samples=100, prompt_ids=(0, 1, 2))
    state = prefill(loop, table, table, prompts, budget, chain(temperature(1.0)), **shape)
    if chunk is not None:
        lengths_B = state.lengths_B
        state = loop.extend(
            weights, state.request, None, state.tokens_BS, 0 * lengths_B, lengths_B, chunk=chunk
        )
    state = loop.run(weights, state, 1000)
    return state.stats.accepted_BT[:, 1:].sum(0)[::-1].cumsum()[::-1] / state.stats.reached_BK.sum(
        0
    )


@pytest.mark.parametrize("law, chunk", [("conditional", None), ("marginals", 3)])
def test_a_right_context_is_accepted_always(law, chunk):
    """Covers the end of the longest text, where a block is longer than the loop's headroom."""
    shares = accepted_share(law=law, chunk=chunk, slots=5 + 20 + 4 + 1)
    assert shares[0] == 1 and ((shares == 1).all() or law == "marginals")


@pytest.mark.slow
@pytest.mark.parametrize("rule", [TokenRule(), CoupledRule()])
@pytest.mark.parametrize("warp", [temperature([0.7, 1.3]), greedy()])
def test_rows_drawn_at_once_equal_a_chain(rule, warp):
    logits_BKV = 3 * jax.random.normal(jax.random.key(1), (2, 4, 64))
    zeros_B = jnp.zeros(2, int)
    sample = Sampler(
        warp=chain(warp),
        rule=rule,
        keys=RoundKeys(rows_B=row_keys(3, jnp.arange(2), zeros_B), starts_B=zeros_B + 7),
        draft_lengths_B=jnp.asarray([4, 2]),
    )
    expected, _ = sample.chain(4, logits_BKV[:, 0], lambda at, *_: (logits_BKV[:, at], ()), ())
    found = sample.rows(logits_BKV)
    assert sample.takes_rows and (found.num_drafted_B == expected.num_drafted_B).all()
    is_drafted_BK = np.asarray(found.is_drafted_BK)
    assert_array_equal(*(np.asarray(one.tokens_BK)[is_drafted_BK] for one in (found, expected)))
    laws = (np.exp(one.laws(logits_BKV))[is_drafted_BK] for one in (found, expected))
    assert_allclose(*laws, atol=1e-6)


class KeepsBlockRows(BlockDrafter):
    def commit(self, weights, state, scored, cache):
        return state, cache


class ContextOneRowShort(BlockDrafter):
    """Its context begins one slot late."""

    def commit(self, weights, state, scored, cache):
        later = dataclasses.replace(scored.prefix, lengths_B=scored.prefix.lengths_B + 1)
        return super().commit(weights, state, dataclasses.replace(scored, prefix=later), cache)


class MasksSlot0(BlockDrafter):
    def _run_block(self, weights, state, prefix):
        masks_BS = jnp.full_like(prefix.tokens_BS, self.head.config.mask_id)
        masked = dataclasses.replace(prefix, tokens_BS=masks_BS)
        return super()._run_block(weights, state, masked)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [KeepsBlockRows, ContextOneRowShort, MasksSlot0])
def test_a_wrong_context_is_rejected_sometimes(drafter):
    assert accepted_share(drafter, K=1, slots=5 + 20 + 2)[0] < 0.99


class AsksAfterTheToken(BlockDrafter):
    """Submits its first token only if that token is 0, as a stop that has seen the token would."""

    def propose(self, *arguments):
        draft, state, cache = plain(self, threshold=0.0).propose(*arguments)
        return (
            dataclasses.replace(draft, num_drafted_B=jnp.where(draft.tokens_BK[:, 0] == 0, 1, 0)),
            state,
            cache,
        )


class Uncertain(TableBlock):
    """Drafts fair coins, and always submits the first token."""

    def correct(self, weights, logits_BU, x_BD, token_B, state):
        return jnp.zeros_like(logits_BU), state


@pytest.mark.parametrize("drafter, expected", [(BlockDrafter, 0.7), (AsksAfterTheToken, 0.85)])
def test_a_token_is_not_dropped_for_its_value(drafter, expected):
    """Golden: for (.7, .3) and a draft of (.5, .5), a stop that sees the token gives (.85, .15)."""
    q = jnp.broadcast_to(jnp.log(jnp.asarray([0.7, 0.3])), (3, 3, 3, 2))
    target = ShowsTokens(2)
    head = Uncertain(table_block(2).config)
    loop = Loop(target=target, drafter=drafter(target, head, 2, threshold=0.5), rule=TokenRule())
    run = decode(loop, q, q, [[0, 0]], 1, FULL, samples=40_000)
    assert abs(1 - run.emitted(1).mean() - expected) < 0.01


def draft_of(head, K, prompt=(2, 0, 1, 1), sampling=FULL, target=LayeredTable(V), **options):
    """Returns the first draft of fifty samples of a prompt."""
    drafter = BlockDrafter(target, head, K, **options)
    loop = Loop(target=target, drafter=drafter, rule=TokenRule())
    state = prefill(loop, TARGET, weights_of(head), [[*prompt]], 9, sampling, samples=50, slots=20)
    return loop.draft(Weights(target=TARGET, draft=weights_of(head)), state.request, state)[0]


def test_one_token_prompt_has_no_first_draft():
    """A single token has no context before it; a prompt of two tokens has a draft."""
    assert (draft_of(block(V), 3, [1]).num_drafted_B == 0).all()
    assert (draft_of(block(V), 3, [1, 2]).num_drafted_B == 3).all()


@dataclasses.dataclass(frozen=True)
class OnTPU(LayeredTable):
    """Its kernels compute in Pallas's interpreter."""

    kernels: PallasKernels = PallasKernels(interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ((1,), (2, 0, 1, 1)), ids=str)
def test_independent_tokens_drawn_at_once_are_the_same(prompt):
    """A block is drawn in one call with kernels, position by position without."""
    at_once, one_by_one = (
        draft_of(dspark(V), 3, prompt, target=target, law="marginals")
        for target in (OnTPU(V), LayeredTable(V))
    )
    assert (at_once.num_drafted_B == one_by_one.num_drafted_B).all()
    assert (at_once.tokens_BK == one_by_one.tokens_BK).all()
    assert jnp.allclose(at_once.log_probs_BRV, one_by_one.log_probs_BRV, atol=1e-5)


@pytest.mark.slow
def test_a_ban_of_all_candidates_ends_the_draft():
    """With one candidate, of probability 1, no banned token is drafted; completions are exact."""
    head = dflash2(V, selector_top_k=1)
    sampling = chain(temperature(1.0), ban([0]))
    draft = draft_of(head, 3, sampling=sampling)
    submitted = np.arange(3) < np.asarray(draft.num_drafted_B)[:, None]
    assert (np.asarray(draft.tokens_BK)[submitted] != 0).all() and not submitted.all()
    assert p_value_of(head, sampling=sampling) > FALSE_ALARM


def test_shorter_draft_begins_a_longer_one():
    """Another K changes no token and no distribution, since the block keeps its rows."""
    drafted = {K: draft_of(dspark(V), K) for K in (2, 4)}
    assert (drafted[4].tokens_BK[:, :2] == drafted[2].tokens_BK).all()
    assert jnp.allclose(drafted[4].log_probs_BRV[:, :2], drafted[2].log_probs_BRV, atol=1e-5)


SHOWN = ShowsTokens(V)

test_refused_block_drafters = refused_calls(
    {
        "K = 5, but the head drafts 4 tokens at most": lambda: BlockDrafter(SHOWN, dspark(V), 5),
        "law must be one of": lambda: BlockDrafter(SHOWN, dspark(V), 2, "both"),
        "threshold must be": lambda: BlockDrafter(SHOWN, dspark(V), 2, threshold=1.5),
        "law 'conditional' needs a head that corrects": lambda: BlockDrafter(
            SHOWN, block(V), 2, "conditional"
        ),
        "threshold = 0.5 needs a head with confidence": lambda: BlockDrafter(
            SHOWN, block(V), 2, threshold=0.5
        ),
        "K = 3, but the head drafts 2": lambda: FeatureDrafter(SHOWN, medusa(V, 2), 3),
    }
)
