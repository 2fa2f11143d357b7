"""A text that a string ends, at any place, has the tokens and counts of a run that ends there."""

import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import (
    BlockRule,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    RowStats,
    chain,
    generate,
    temperature,
)
from support.fakes import TableLM, counting_pair, decode, table_loop
from support.loop_distributions import NEAR, TARGET, V


def test_stop_string_begins_inside_a_drafted_block():
    (row,) = generate(counting_pair(), ["c"], 20, draft_length=4, stop=["gh", "zz"])
    assert (row.text, row.tokens, row.finish) == ("def", list(b"defgh"), "stop")
    assert (row.stats.rounds, row.stats.emitted, row.stats.accepted) == (1, 5, 4)
    assert row.dropped == 5, "the look came after two rounds of five tokens"
    (other,) = generate(counting_pair(), ["c"], 20, draft_length=3, stop=["gh"])
    assert (other.text, other.tokens, other.stats.rounds, other.stats.accepted) == (
        "def",
        list(b"defgh"),
        2,
        4,
    )


@pytest.mark.parametrize("drafter", [ModelDrafter(TableLM(V), 3), NgramDrafter(K=2), NoDrafter()])
def test_cut_text_has_counts_of_a_shorter_run(drafter):
    """A run of n tokens has the counts of a text cut after n tokens, with drafts of any length."""
    loop = table_loop(BlockRule(), drafter, keep_rounds=True)
    draft = NEAR if drafter.K == 3 else None

    def run(budget):
        return decode(
            loop, TARGET, draft, [[1, 2], [0]], budget, chain(temperature(0.9)), samples=4, slots=40
        ).state

    whole = run(20)
    for budget in (20, 11, 7, 1):
        state = run(budget)
        for row in range(8):
            start = (2, 1)[row // 4]
            rounds, from_draft = (
                np.asarray(x[row, start : start + budget])
                for x in (whole.rounds_BS, whole.from_draft_BS)
            )
            counted = RowStats.of_rounds(rounds.tolist(), from_draft.tolist(), loop.depth)
            assert counted == RowStats.of(state.stats, row), (budget, row)
    assert jnp.any(whole.stats.drafted_B > 0) == (drafter.K > 0)
