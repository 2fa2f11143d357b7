"""Token-by-token equality on table models, whose logits do not depend on how they were computed.

Texts of transformers are compared in test_early_exit.py.
"""

import numpy as np
import pytest

from specsamp import (
    BlockRule,
    CoupledRule,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    TokenRule,
    chain,
    greedy,
    temperature,
    top_p,
)
from support.extras import slow_but
from support.fakes import TableLM, decode, near, random_table, table_loop

V = 8
TARGET = random_table(10, V)
NEAR = near(TARGET, 11, 0.4)
PROMPTS = [[0], [1, 2, 3], [4, 5, 6, 7, 0, 1, 2], [3, 3]]
DRAFTERS = [
    ModelDrafter(TableLM(V), 1),
    ModelDrafter(TableLM(V), 5),
    ModelDrafter(TableLM(V), 16),
    NgramDrafter(4),
]


# Full, nucleus, greedy, cold.
ROWS_APART = chain(temperature([1.0, 0.4, 0.0, 0.4]), top_p([1.0, 0.9, 1.0, 1.0]))


@pytest.mark.parametrize("drafter", slow_but(DRAFTERS, *DRAFTERS[1::2]))
def test_coupled_stream_is_the_autoregressive_stream(drafter):
    """For one seed, tokens are equal under every temperature, K and drafter."""

    def run(drafter):
        loop = table_loop(CoupledRule(), drafter, V)
        return decode(loop, TARGET, NEAR, PROMPTS, [40, 7, 25, 60], ROWS_APART, samples=8)

    speculative, plain = run(drafter), run(NoDrafter())
    assert np.array_equal(speculative.state.lengths_B, plain.state.lengths_B)
    for row, length in enumerate(np.asarray(plain.state.lengths_B)):
        assert np.array_equal(
            speculative.state.tokens_BS[row, :length], plain.state.tokens_BS[row, :length]
        )


PAIRS = list(zip(DRAFTERS, (TokenRule(), CoupledRule(), BlockRule(), TokenRule())))


@pytest.mark.parametrize("drafter, rule", slow_but(PAIRS, *PAIRS[::2]))
def test_greedy_speculative_is_greedy(drafter, rule):
    def run(drafter, rule):
        return decode(table_loop(rule, drafter, V), TARGET, NEAR, PROMPTS, 50, greedy())

    assert np.array_equal(run(drafter, rule).emitted(50), run(NoDrafter(), TokenRule()).emitted(50))


# The token rule draws as the block rule does.
@pytest.mark.parametrize("rule", [BlockRule(), CoupledRule()])
def test_sample_depends_on_its_address_only(rule):
    """Tokens do not depend on other rows, their number, padding, slots, slices or the budget."""
    loop = table_loop(rule, ModelDrafter(TableLM(V), 4), V)
    warp, length = chain(temperature(0.9)), 24

    def run(prompts, ids, budget=length, **options):
        return decode(
            loop, TARGET, NEAR, prompts, budget, warp, prompt_ids=ids, seed=5, **options
        ).emitted(length)

    def many(ids, prompts=PROMPTS, budgets=(length,) * 4, **options):
        """Decodes two samples of each prompt five times, in more rows than are written one by one,
        and returns the first samples.
        """
        shape = {"samples": 2, "padded_length": 7, "slots": 96}  # shapes of one program
        return run(prompts * 5, ids * 5, budgets * 5, **shape, **options)[::2].reshape(5, 4, length)

    ids = [100, 7, 2, 55]
    rows = many(ids)
    together = rows[0]
    assert np.array_equal(rows, np.broadcast_to(together, rows.shape)), "rows"
    for i, prompt in enumerate(PROMPTS):
        alone = run([prompt], [ids[i]], padded_length=31, slots=200)
        assert np.array_equal(alone[0], together[i]), (
            "alone, with other padding, slots and number of samples"
        )
    assert np.array_equal(many(ids[::-1], PROMPTS[::-1])[0, ::-1], together), "order"
    assert np.array_equal(many(ids, slice_rounds=1)[0], together), "slices of one round"
    assert np.array_equal(many(ids, slice_rounds=3)[0], together), "slices of three rounds"
    assert np.array_equal(many(ids, budgets=(24, 30, 61, 26))[0], together), "budget"
    assert not np.array_equal(many([100, 7, 2, 56])[0, 3], together[3]), "another id must change it"
