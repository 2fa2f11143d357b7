"""Plausible mistakes, all of which the tests of the loop's distribution must catch.

Each test runs a broken rule, drafter or loop through the statistic that the correct one passes in
test_loop_distribution.py, and asserts that it fails by far.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import (
    Adaptive,
    BlockRule,
    Confidence,
    EarlyExitDrafter,
    Loop,
    ModelDrafter,
    TokenRule,
)
from specsamp.sampling.rng import RoundKeys
from support import mutants
from support.fakes import (
    FALSE_ALARM,
    LayeredTableLM,
    TableLM,
    decode,
    joint_distribution,
    p_value,
    table_loop,
)
from support.loop_distributions import (
    FAR,
    FULL,
    LIKELY,
    NEAR,
    PROMPTS,
    TARGET,
    V,
    cut_at_stop,
    distribution_test,
    first_token,
)

pytestmark = pytest.mark.slow  # the quick suite applies the statistic to correct code

K = 3
# Real mistakes have far smaller p-values; the factor of 1e6 excludes chance.
CAUGHT = FALSE_ALARM * 1e-6


# A mistake caught with these samples is also caught with the larger number of
# test_loop_distribution.py. Decoding so few in unoptimised code takes less time than optimising it.
FEWER = 20_000


def caught(loop, draft=FAR, sampling=FULL):
    return distribution_test(loop, draft, sampling, length=3, samples=FEWER, powered=False) < CAUGHT


def model_loop(rule, **options):
    return table_loop(rule, ModelDrafter(TableLM(V), K), **options)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ByPosition(RoundKeys):
    """Addresses noise by absolute position, so that a position drafted again has the same noise."""

    def uniforms(self, purpose, offsets_BT):
        nowhere = RoundKeys(rows_B=self.rows_B, starts_B=jnp.zeros_like(self.starts_B))
        return nowhere.uniforms(purpose, offsets_BT + self.starts_B[:, None])


def by_position(rule):
    class Mutant(rule):
        def sample(self, log_probs_BV, keys, offset):
            return super().sample(
                log_probs_BV, ByPosition(rows_B=keys.rows_B, starts_B=keys.starts_B), offset
            )

        def verify(self, draft, target, keys):
            return super().verify(
                draft, target, ByPosition(rows_B=keys.rows_B, starts_B=keys.starts_B)
            )

    return Mutant()


@pytest.mark.parametrize(
    "rule",
    [mutants.ResidualWithTheNoiseOfTheDraft(), by_position(BlockRule)],
    ids=lambda rule: type(rule).__name__,
)
def test_a_rule_with_a_mistake_is_caught(rule):
    """sampling/test_rules.py enumerates mistakes of another kind."""
    assert caught(model_loop(rule))


def test_draft_log_probs_before_warping():
    assert caught(
        table_loop(TokenRule(), mutants.DistributionBeforeWarping(TableLM(V), K)), sampling=LIKELY
    )


def test_stop_token_ignored_inside_a_block():
    class Mutant(Loop):
        def commit(self, request, state, draft, verdict, target):
            """Checks only the last emitted position for stop tokens."""
            last_B1 = jnp.take_along_axis(
                verdict.tokens_BT, verdict.num_accepted_B[:, None], axis=1
            )
            stops_B = jnp.any(last_B1 == request.stop_ids_BN, axis=1)
            nothing = dataclasses.replace(
                request, stop_ids_BN=jnp.full_like(request.stop_ids_BN, -1)
            )
            after = super().commit(nothing, state, draft, verdict, target)
            return dataclasses.replace(
                after, finish_B=jnp.where(stops_B & state.running_B, 1, after.finish_B)
            )

    def p_of(loop):
        run = decode(loop, TARGET, NEAR, [[1, 2]], 3, FULL, samples=FEWER, stop_ids=(0,))
        samples, distribution = cut_at_stop(run, joint_distribution(TARGET, FULL, [1, 2], 3), 0)
        return p_value([(samples, distribution)], powered=False)

    assert p_of(model_loop(TokenRule(), loop=Mutant)) < CAUGHT


def test_early_exit_over_scored_slots_is_caught():
    """Drafter and target share a cache, so that the draft's mistakes enter the text."""
    target = LayeredTableLM(V)
    layers = jnp.stack([FAR, TARGET - FAR])

    def loop(drafter):
        return dataclasses.replace(table_loop(TokenRule(), drafter(target, 1, K)), target=target)

    options = dict(target=layers, length=3, samples=FEWER, powered=False)
    assert distribution_test(loop(EarlyExitDrafter), None, FULL, **options) > FALSE_ALARM
    wrong = loop(mutants.WritesOverWhatWasScored)
    assert distribution_test(wrong, None, FULL, **options) < CAUGHT


def test_length_of_a_neighbour_while_scoring():
    assert caught(model_loop(TokenRule(), loop=mutants.ScoresWithANeighboursLength), draft=NEAR)


def test_noise_independent_of_the_round_is_caught():
    """All rounds of a row share one address, so that each of them draws with the same noise."""

    class Mutant(Loop):
        def _keys(self, request, state):
            return super()._keys(
                request, dataclasses.replace(state, lengths_B=jnp.full_like(state.lengths_B, 4))
            )

    assert caught(model_loop(TokenRule(), loop=Mutant), draft=FAR)


def test_length_of_a_neighbour_while_drafting():
    """Completions stay exact, but acceptance falls."""

    def acceptance(loop):
        state = decode(
            model_loop(TokenRule(), loop=loop), TARGET, TARGET, PROMPTS, 20, FULL, samples=1000
        ).state
        return float(state.stats.accepted_BT[:, -1].sum() / state.stats.rounds_B.sum())

    assert acceptance(Loop) == 1.0 and acceptance(mutants.DraftsWithANeighboursLength) < 0.8


def test_draft_clipped_by_the_budget_is_caught():
    """With the block rule, a draft clipped to the budget changes the prefix of a longer run."""

    class Clipped(Loop):
        def draft(self, weights, request, state):
            draft, drafter_state, cache = super().draft(weights, request, state)
            room_B = jnp.maximum(request.limits_B - state.lengths_B, 0)
            return (
                dataclasses.replace(draft, num_drafted_B=jnp.minimum(draft.num_drafted_B, room_B)),
                drafter_state,
                cache,
            )

    def prefixes(loop_type, budget):
        run = decode(
            model_loop(BlockRule(), loop=loop_type),
            TARGET,
            NEAR,
            PROMPTS,
            budget,
            FULL,
            samples=200,
            slots=32,
        )
        return run.emitted(4)

    assert np.array_equal(prefixes(Loop, 4), prefixes(Loop, 12))
    assert not np.array_equal(prefixes(Clipped, 4), prefixes(Clipped, 12))


def test_no_token_decides_whether_it_is_submitted():
    """Golden: submitting token 0 alone turns (.7, .3) into (.85, .15); dropping improbable tokens
    turns (.3, .7) into (.42, .58).
    """

    def written(drafter, target, draft, least):
        adaptive = Adaptive(lengths=(1,), stop=Confidence(least))
        return first_token(drafter, target, draft, adaptive=adaptive)[0]

    looks = mutants.SubmitsTheFirstTokenAlone(TableLM(2), 1)
    drops = mutants.StopsOneTokenEarly(TableLM(2), 1)
    assert written(looks, (0.7, 0.3), (0.5, 0.5), 0.0) == pytest.approx(0.85, abs=0.01)
    for drafter, expected in ((drops, 0.42), (ModelDrafter(TableLM(2), 1), 0.3)):
        assert written(drafter, (0.3, 0.7), (0.6, 0.4), 0.5) == pytest.approx(expected, abs=0.01)
