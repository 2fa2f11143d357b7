"""A draft model in one call: texts are exact, and its distributions are those of the model on text and masks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp.decoding.drafters.parallel import ParallelDrafter
from specsamp.decoding.sampler import Sampler
from specsamp.decoding.state import Prefix, Weights
from specsamp.models.config import tiny
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.rejection import BlockRule, TokenRule
from specsamp.sampling.rng import RoundKeys, row_keys
from specsamp.sampling.warp import chain, temperature
from support.fakes import FALSE_ALARM, TableLM, decode, table_loop
from support.loop_distributions import FULL, LIKELY, NEAR, PROMPTS, TARGET, V, distribution_test
from support.weights import drawn_params


def drafter(K=3, model=TableLM(V), **options):
    return ParallelDrafter(model, K, mask_id=1, **options)


@pytest.mark.parametrize(
    "rule, sampling, options",
    [(TokenRule(), FULL, {}), pytest.param(BlockRule(), LIKELY, dict(law="argmax", K=2), marks=pytest.mark.slow)],
)
def test_the_text_has_the_distribution_of_the_target(rule, sampling, options):
    loop = table_loop(rule, drafter(**options))
    assert distribution_test(loop, NEAR, sampling, length=3, samples=30_000, powered=False) > FALSE_ALARM


class ReadsTwoTokens(ParallelDrafter):
    """Reads only two known tokens, as a model that drafts token by token: accepted tokens remain masks in the cache."""

    first_window = 2


@pytest.mark.parametrize("kind, perfect", [(ParallelDrafter, True), (ReadsTwoTokens, False)])
def test_the_first_token_of_a_perfect_draft_is_accepted_always(kind, perfect):
    loop = table_loop(TokenRule(), kind(TableLM(V), 3, mask_id=1))
    run = decode(loop, TARGET, TARGET, PROMPTS, 20, chain(temperature(1.0)), samples=100)
    accepted = int(run.state.stats.accepted_BT[:, 1:].sum())
    assert (accepted == int(run.state.stats.reached_BK[:, 0].sum())) == perfect


@pytest.mark.parametrize("length", [2, 9])
def test_one_call_gives_the_distributions_of_text_and_masks(length):
    """Holds at the beginning of a text, too, where fewer than K + 1 tokens are known."""
    model, K, mask = TransformerLM(tiny(vocab_size=16, positions="rotary")), 4, 15
    params, tokens = drawn_params(model), jax.random.randint(jax.random.key(0), (1, 16), 0, 15)
    one = dataclasses.replace(drafter(K, model), mask_id=mask)
    weights = Weights(target=None, draft=model.prepare(params))
    lengths = jnp.array([length])
    keys = RoundKeys(rows_B=row_keys(0, *2 * [jnp.zeros(1, jnp.int32)]), starts_B=lengths)
    sample = Sampler(warp=chain(), rule=TokenRule(), keys=keys)
    state = model(weights.draft, tokens[:, : length - 1], jnp.zeros(1, jnp.int32), one.init(1, 16)).cache
    draft, _, _ = one.propose(weights, state, Prefix(tokens_BS=tokens, lengths_B=lengths), None, sample)
    text = jnp.concatenate([tokens[:, :length], jnp.full((1, K - 1), mask)], axis=1)
    expected = jax.nn.log_softmax(model.forward(params, text).logits_BTV[:, length - 1 :])
    np.testing.assert_allclose(draft.log_probs_BRV, expected, atol=1e-5)
