"""Penalties and biases: their formulas and bounds; the distribution of texts is in test_penalised_texts.py."""

import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import ModelDrafter, chain, generate, greedy, temperature
from specsamp.sampling.penalties import ban, bias, penalties
from specsamp.sampling.warp import log_probs
from support.fakes import table_pair


def test_a_draft_that_follows_the_same_penalties_is_accepted():
    """A draft equal to the target is; one without its penalties is not always."""
    pair, prompts = table_pair(), [[1, 2, 3], [4]]
    sampling = chain(penalties(1.5, 0.5, [0.2, 1.0]), temperature(0.8))

    def accepted(**options):
        drafter = ModelDrafter(pair.target, 3)
        same = type(pair)(
            target=pair.target, target_params=pair.target_params, draft=pair.target, draft_params=pair.target_params
        )
        return [
            row.stats.acceptance_rate
            for row in generate(same, prompts, 24, sampling=sampling, drafter=drafter, **options)
        ]

    assert accepted() == [1, 1]
    assert min(accepted(draft_sampling=chain(temperature(0.8)))) < 1


def test_biases_exclude_and_favour():
    logits_BV = jnp.asarray([[1.0, 2.0, 3.0, 4.0]])
    probs = np.exp(np.asarray(log_probs(chain(ban([3, 0]), bias({1: 2.5})), logits_BV)))[0]
    np.testing.assert_allclose(probs[[1, 2]], [np.e**1.5 / (1 + np.e**1.5), 1 / (1 + np.e**1.5)], rtol=1e-6)
    assert probs[0] == probs[3] == 0
    assert len(ban(range(5)).warps) == 8, "padded, so that the number of biases seldom compiles"


@pytest.mark.parametrize("sampling", [chain(greedy(), ban([0, 1, 2, 3])), chain(ban(range(12)))])
def test_a_row_without_any_token_ends_and_emits_nothing_that_is_banned(sampling):
    rows = generate(table_pair(), [[1, 2], [5]], 6, sampling=sampling, draft_length=2)
    assert all(token > 3 for row in rows for token in row.tokens)
    assert all(row.finish == "invalid" or len(row.tokens) == 6 for row in rows) and rows[0].finish == "invalid"


def test_tokens_that_the_vocabulary_has_not_are_refused():
    for options in (dict(sampling=chain(ban([12]))), dict(draft_sampling=chain(bias({99: 1.0})))):
        with pytest.raises(ValueError, match="a biased token must be an id below 12; got"):
            generate(table_pair(), [[1]], 2, **options)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: penalties(repetition=0.0), "repetition must be > 0 and finite; got 0.0"),
        (lambda: penalties(presence=np.nan), "presence must be finite"),
        (lambda: ban(5), "banned tokens must be a list of ids; got 5"),
        (lambda: bias([1]), "biases must be a mapping from token ids to numbers"),
        (lambda: ban([-1]), "a biased token must be an id >= 0; got -1"),
        (lambda: bias({2: np.inf}), "a bias must be finite, or -inf; got inf"),
    ],
)
def test_numbers_that_are_none(make, message):
    with pytest.raises(ValueError, match=message):
        make()
