"""One of several drafters is chosen: exact by the distribution it is verified by, and no part falls behind."""

import dataclasses

import jax.numpy as jnp
import pytest

from specsamp import BlockRule, ChoosingDrafter, Pair, TokenRule, generate
from specsamp.decoding.drafter import Prefix
from specsamp.decoding.drafters import EarlyExitDrafter, FeatureDrafter, ModelDrafter, NgramDrafter
from specsamp.decoding.method import make_method
from specsamp.decoding.state import Weights
from specsamp.evaluation.audit.readers import with_models
from specsamp.models.interface import Output
from support import mutants
from support.fakes import FALSE_ALARM, LayeredTableLM, TableLM, decode, near, table_loop, table_pair
from support.heads import ShowsTokens, table_head
from support.loop_distributions import FAR, FULL, NEAR, NUCLEUS, RESTLESS, TARGET, V, distribution_test, first_token

TABLE = TableLM(V)


def models(count, K=2):
    return (ModelDrafter(TABLE, K),) * count


# Golden numbers: drafts from (.5, .5) for a target of (.7, .3).


def test_two_wrong_ways_in_numbers():
    two = (ModelDrafter(TableLM(2), 1),) * 2
    tables = (0.7, 0.3), (0.5, 0.5)
    assert first_token(ChoosingDrafter(two), *tables, parts=2) == pytest.approx((0.7, 0.8), abs=0.01)
    assert first_token(mutants.ChosenByItsTokens(two), *tables, parts=2)[0] == pytest.approx(0.85, abs=0.01)
    assert first_token(two[0], *tables, rule=mutants.KeepsTheBestOfTwo())[0] == pytest.approx(0.64, abs=0.01)


# The loop.


def on_target(target, rule, drafter):
    return dataclasses.replace(table_loop(rule, drafter), target=target)


EXITS, HEADS = LayeredTableLM(V), ShowsTokens(V)
EXIT_LAYERS = dict(target=jnp.stack([FAR, TARGET - FAR]))
LOOKUP_OR_MODEL = ChoosingDrafter((NgramDrafter(2), *models(1)))
MODELS_OR_LOOKUP = ChoosingDrafter((*models(2), NgramDrafter(2)))
LOOKUP_OR_EXIT = ChoosingDrafter((NgramDrafter(2), EarlyExitDrafter(EXITS, 1, 2)))
TWO_HEADS = ChoosingDrafter(tuple(FeatureDrafter(HEADS, table_head(V, layer), 2) for layer in (0, 3)))


@pytest.mark.parametrize(
    "loop, weights, sampling, options",
    [
        (on_target(TABLE, BlockRule(), LOOKUP_OR_MODEL), (None, NEAR), NUCLEUS, {}),
        (on_target(TABLE, TokenRule(), MODELS_OR_LOOKUP), (FAR, NEAR, None), FULL, dict(adaptive=RESTLESS)),
        (on_target(EXITS, BlockRule(), LOOKUP_OR_EXIT), (None, None), FULL, EXIT_LAYERS),
        (on_target(HEADS, TokenRule(), TWO_HEADS), (TARGET, FAR), FULL, {}),
    ],
    ids=["lookup or model", "models or lookup", "lookup or early exit", "heads of two layers"],
)
def test_the_text_has_the_distribution_of_the_target(loop, weights, sampling, options):
    assert distribution_test(loop, weights, sampling, length=3, samples=20_000, powered=False, **options) > FALSE_ALARM


def test_a_part_that_is_chosen_by_its_tokens_is_caught():
    loop = table_loop(TokenRule(), mutants.ChosenByItsTokens(models(2, 1)))
    few = dict(length=3, samples=20_000, powered=False)
    assert distribution_test(loop, (FAR, FAR), FULL, **few) < FALSE_ALARM * 1e-6


def test_each_part_is_handed_its_own_features():
    head = table_head(V, 3)
    drafter = ChoosingDrafter(
        (FeatureDrafter(ShowsTokens(V), table_head(V, 5), 1), FeatureDrafter(ShowsTokens(V), head, 1))
    )
    output = Output(
        logits_BTV=jnp.zeros((1, 1, V)), cache=(), hidden=(jnp.full((1, 1, 1), 3.0), jnp.full((1, 1, 1), 5.0))
    )
    assert [float(drafter._output_of(i, output).hidden[0][0, 0, 0]) for i in (0, 1)] == [5, 3]


# States of the parts.


@dataclasses.dataclass(frozen=True)
class TurnByTurn(ChoosingDrafter):
    """Chooses the first part for three rounds, then the second for three, and so on."""

    def choose(self, state):
        return (state.rounds_BP.sum(axis=1) // 3 % 2).astype(jnp.int32)

    decay = 1.0


def of_the_second_part(drafter, first, second):
    """Counts how many tokens of the second part were written per proposal."""
    run = decode(table_loop(TokenRule(), drafter), TARGET, (first, second), [[2, 0, 1, 1]], 60, FULL, samples=50)
    state = run.state.drafter_state
    assert state.rounds_BP.min() > 5
    return float(state.accepted_BP[:, 1].sum() / state.rounds_BP[:, 1].sum())


@pytest.mark.parametrize("model, knows_all", [(ModelDrafter, True), (mutants.NeverCatchesUp, False)])
def test_a_part_that_was_left_out_catches_up(model, knows_all):
    """A draft that is the target is accepted whole, unless its cache has holes."""
    chosen = of_the_second_part(TurnByTurn((ModelDrafter(TABLE, 3), model(TABLE, 3))), FAR, TARGET)
    assert chosen == 3 if knows_all else chosen < 2.95


def test_what_a_part_knows_grows_without_holes():
    drafter = ChoosingDrafter(models(1))
    state = dataclasses.replace(drafter.init(3, 16), seen_BP=jnp.asarray([[2], [6], [9]]))
    tokens_BT, start_B, output = jnp.zeros((3, 4), jnp.int32), jnp.full(3, 4), Output(logits_BTV=None, cache=())
    weights = Weights(target=TARGET, draft=(NEAR,))
    after, _ = drafter.read(weights, state, tokens_BT, start_B, jnp.asarray([9, 9, 7]), output, ())
    assert after.seen_BP.tolist() == [[2], [8], [7]]


# Calls.


def test_models_of_their_own():
    """A pair without a draft, whose parameters are those of each part."""
    table = table_pair().target_params
    pair = Pair(target=TableLM(12), target_params=table, draft_params=(near(table, 1, 0.5), None, table))
    drafter = ChoosingDrafter((ModelDrafter(TableLM(12), 2), NgramDrafter(2), ModelDrafter(TableLM(12), 2)))
    other = TableLM(12, max_positions=64)
    assert [part.model for part in with_models(drafter, {pair.target: other, None: None}).parts[::2]] == [other] * 2
    assert generate(pair, [[1, 2]], 30, drafter=drafter)[0].stats.emitted_per_round > 1.5


def test_the_longest_draft_length_of_the_parts_counts():
    prefix = Prefix(tokens_BS=jnp.asarray([[1, 2, 1, 0], [1, 2, 3, 0]]), lengths_B=jnp.full(2, 3))
    lookups = ChoosingDrafter((NgramDrafter(2, 3, 2), NgramDrafter(2)))
    assert lookups.draft_lengths(lookups.init(2, 4), prefix).tolist() == [2, 0]
    assert ChoosingDrafter(TWO).draft_lengths(ChoosingDrafter(TWO).init(2, 4), prefix) is None


class Tree(NgramDrafter):
    depth = 2


TWO = (NgramDrafter(2), ModelDrafter(TableLM(12), 2))


def test_what_does_not_fit_the_pair_is_refused():
    pair = table_pair()
    other = ChoosingDrafter((NgramDrafter(2), ModelDrafter(TableLM(9), 2)))
    two_models = ChoosingDrafter((ModelDrafter(TableLM(12), 2), ModelDrafter(TableLM(12, max_positions=64), 2)))
    own = Pair(target=pair.target, target_params=pair.target_params, draft_params=(None, pair.draft_params, None))
    for where, drafter, message in (
        (pair, other, "draft vocabulary 9 != target vocabulary 12"),
        (pair, two_models, "2 of the drafters.*draft_params"),
        (own, ChoosingDrafter(TWO), "draft_params are a tuple of 3 for 2 drafters"),
        (dataclasses.replace(own, draft_params=(None, None)), ChoosingDrafter(TWO), "ModelDrafter.*draft_params"),
    ):
        with pytest.raises(ValueError, match=message):
            make_method(where, drafter=drafter)
    assert two_models.max_positions == 64
