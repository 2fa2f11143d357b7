"""Token trees through the loop: texts are exact, slots are moved, and mistakes are caught."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import (
    Adaptive,
    BlockTree,
    Confidence,
    CoupledRule,
    FeatureTree,
    Growth,
    Method,
    ModelTree,
    NgramTree,
    NoDrafter,
    RecursiveRule,
    RowStats,
    TokenRule,
    TraversalRule,
    TreeShape,
    chain,
    greedy,
    penalties,
    temperature,
    top_p,
)
from specsamp.decoding.drafters import ModelDrafter
from specsamp.decoding.engine import Engine
from specsamp.decoding.method import make_method
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import make_requests
from specsamp.decoding.sampler import Sampler
from specsamp.decoding.state import Finish
from specsamp.sampling.lossy import EARS
from specsamp.sampling.rules import Rule, TargetDistributions
from support import tree_mutants as mutants
from support.drafters import DRAFTERS
from support.extras import slow_but
from support.fakes import FALSE_ALARM, CountingLM, TableLM, decode, near, random_table, table_loop
from support.heads import LayeredTable, block, eagle3, medusa, weights_of
from support.loop_distributions import FAR, FULL, LIKELY, NEAR, TARGET, V, distribution_test
from support.refusals import refusal, refused_calls

FEWER, PROMPT = 20_000, [[2, 0, 1, 1]]
# Depth 2 has an inner node and two leaves; the draft does not read leaves.
TREE = TreeShape((0, 0, 1, 1, 2, 3))


def model():
    return ModelTree(TableLM(V), tree=TREE)


def head_loop(kind, head, rule, **options):
    target = LayeredTable(V)
    return dataclasses.replace(table_loop(rule, kind(target, head, **options)), target=target)


EAGLE = eagle3(V)
PRUNED = Growth(depth=3, expanded=2, children=3, nodes=5)
BLOCK = block(V)
# Further trees and rules: test_pairs.py.
CASES = {
    "recursive": (table_loop(RecursiveRule(), model()), FAR, FULL),
    "top and drawn": (table_loop(TraversalRule("top_and_drawn"), model()), NEAR, LIKELY),
    "prompt lookup": (
        table_loop(RecursiveRule(), NgramTree(tree=TreeShape.of_widths(2, 1))),
        None,
        FULL,
    ),
    "EAGLE-2": (
        head_loop(FeatureTree, EAGLE, RecursiveRule("top"), tree=PRUNED),
        weights_of(EAGLE),
        FULL,
    ),
    "block, argmax": (
        head_loop(BlockTree, BLOCK, RecursiveRule(), tree=TREE, law="argmax"),
        weights_of(BLOCK),
        FULL,
    ),
}


@pytest.mark.parametrize("case", slow_but(CASES, "recursive"))
def test_texts_have_the_distribution_of_the_target(case):
    loop, draft, sampling = CASES[case]
    options = dict(length=3, samples=FEWER, powered=False, prompts=PROMPT)
    assert distribution_test(loop, draft, sampling, **options) > FALSE_ALARM


# Mistakes of rules: sampling/test_trees.py.
MISTAKES = {
    "pruned": table_loop(RecursiveRule(), mutants.PrunedByValue(TableLM(V), tree=TREE)),
    "moved": dataclasses.replace(table_loop(RecursiveRule(), model()), target=mutants.NotMoved(V)),
    "positions": table_loop(RecursiveRule(), model(), loop=mutants.PositionsByRow),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name):
    options = dict(length=3, samples=FEWER, powered=False, prompts=PROMPT)
    assert distribution_test(MISTAKES[name], FAR, FULL, **options) < FALSE_ALARM * 1e-6


V8 = 8
TARGET8 = random_table(10, V8)
NEAR8 = near(random_table(10, V8), 11, 0.4)
PROMPTS = [[0], [1, 2, 3], [4, 5, 6, 7, 0, 1, 2], [3, 3]]
BIG = TreeShape.in_levels((0, 1, 2, 0, 1, 2, 0, 4, 3))
SMALL_TREES = [
    ModelTree(TableLM(V8), tree=BIG),
    ModelTree(TableLM(V8), tree=Growth(depth=3, expanded=2, children=3)),
    NgramTree(tree=TreeShape.of_widths(3, 1, 1)),
]


def texts_of(drafter, rule, sampling, draft=NEAR8, **options):
    loop = table_loop(rule, drafter, V8, keep_log_probs=True, keep_rounds=True)
    return decode(loop, TARGET8, draft, PROMPTS, [40, 7, 25, 60], sampling, **options).state


def assert_same(ours, theirs):
    assert np.array_equal(ours.lengths_B, theirs.lengths_B)
    for row, length in enumerate(np.asarray(theirs.lengths_B)):
        assert np.array_equal(ours.tokens_BS[row, :length], theirs.tokens_BS[row, :length])
        np.testing.assert_allclose(
            ours.log_probs_BS[row, :length], theirs.log_probs_BS[row, :length], atol=1e-6
        )


@pytest.mark.parametrize("drafter", slow_but(SMALL_TREES, *SMALL_TREES[:2]))
def test_coupled_tree_text_equals_plain_decoding(drafter):
    """Equal tokens, log-probabilities and ends show that rows, slots and positions are right."""
    apart = chain(temperature([1.0, 0.4, 0.0, 0.4]), top_p([1.0, 0.9, 1.0, 1.0]))
    for stop_ids in ((-1,), (6,)):
        options = dict(samples=4, stop_ids=stop_ids)
        tree, plain = (
            texts_of(each, CoupledRule(), apart, **options) for each in (drafter, NoDrafter())
        )
        assert_same(tree, plain)
        assert np.array_equal(tree.finish_B, plain.finish_B)
    assert np.any(plain.finish_B == Finish.STOP)


def test_log_probabilities_of_wrong_rows_are_caught(monkeypatch):
    """The control of the test above takes the rows of the first nodes for the rows of the path."""

    def first_rows(self, verdict):
        depth = verdict.rows_BT.shape[1]
        rows_BT = jnp.broadcast_to(jnp.arange(depth)[None], verdict.rows_BT.shape)
        return right(self, dataclasses.replace(verdict, rows_BT=rows_BT))

    right = TargetDistributions.along
    monkeypatch.setattr(TargetDistributions, "along", first_rows)
    # No other test has this number of slots, so that the program is traced anew.
    wrong, plain = (
        texts_of(drafter, CoupledRule(), chain(temperature(1.0)), slots=128)
        for drafter in (SMALL_TREES[0], NoDrafter())
    )
    assert np.array_equal(wrong.tokens_BS[3, :60], plain.tokens_BS[3, :60])
    assert np.abs(wrong.log_probs_BS[3, :60] - plain.log_probs_BS[3, :60]).max() > 0.1


def test_a_greedy_row_in_a_batch_of_trees():
    """Of a greedy row's siblings, all but the first are dead."""
    sampling = chain(temperature([0.0, 1.0, 0.0, 0.7]))
    plain = texts_of(NoDrafter(), TokenRule(), greedy())
    mixed = texts_of(SMALL_TREES[0], RecursiveRule(), sampling)
    for row in (0, 2):
        length = int(plain.lengths_B[row])
        assert np.array_equal(mixed.tokens_BS[row, :length], plain.tokens_BS[row, :length])


# Each path of a tree has the distributions of a chain with the same tokens.


@dataclasses.dataclass(frozen=True, eq=False)
class Given(Rule):
    """Draws the given tokens."""

    tokens_BK: jax.Array

    def sample(self, log_probs_BV, keys, offset):
        return jax.lax.dynamic_index_in_dim(self.tokens_BK, offset, axis=1, keepdims=False)

    def verify(self, draft, target, keys):
        raise NotImplementedError


def paths_of(parents):
    """Returns the scored rows from the pending token to each leaf."""
    paths = [(0,)]
    for parent in parents:
        paths.append((*paths[parent], len(paths)))
    return [path for path in paths if path[-1] not in parents]


def largest_error(kind, of_chains, mutant=None):
    """Returns the largest difference of a child's probability from its probability in a chain."""
    (pair, drafter, *_), (_, chains, *_) = DRAFTERS[kind](), DRAFTERS[of_chains]()
    if mutant is not None:
        drafter = mutant(drafter.target, drafter.head, tree=drafter.tree)
    sampling = chain(penalties(frequency=0.5), temperature(1.0))
    method = Method(drafter=drafter, rule=RecursiveRule(), sampling=sampling)
    requests = make_requests(pair, method, [[3, 1, 4, 1, 5, 9, 2, 6]], 8)
    engine = Engine.create(pair, method, requests, slots=128)
    weights, state = engine.weights, engine.prefill(requests)
    draft, _, _ = jax.jit(engine.loop.draft)(weights, state.request, state)

    @jax.jit
    def chain_of(tokens_BK):
        sample = Sampler(
            warp=state.request.draft_sampling,
            rule=Given(tokens_BK),
            keys=engine.loop._keys(state.request, state),
            warp_state=state.draft_warp_state,
        )
        return chains.propose(weights, state.drafter_state, state.prefix, state.cache, sample)[0]

    worst = 0.0
    for path in paths_of(draft.parents_BK[0].tolist()):
        tokens_D = draft.tokens_BK[0, jnp.asarray(path[1:]) - 1]
        tokens_BK = jnp.pad(tokens_D, (0, chains.K - len(tokens_D)))[None]
        expected_KV = np.exp(chain_of(tokens_BK).log_probs_BRV[0])
        laws = draft.law_rows_BT[0, jnp.asarray(path[:-1])]
        found_DV = np.exp(draft.log_probs_BRV[0, laws])
        worst = max(worst, np.abs(found_DV - expected_KV[: len(found_DV)]).max())
    return worst


OF_CHAINS = {
    "model tree": "model",
    "grown tree": "model",
    "early exit tree": "early exit",
    "EAGLE-3 tree": "EAGLE-3",
    "Medusa tree": "Medusa",
    "block tree": "DSpark",
}


@pytest.mark.parametrize("kind", slow_but(OF_CHAINS, "EAGLE-3 tree"))
def test_tree_paths_are_drafted_as_chains(kind):
    """Penalties are included: they count the tokens of the path."""
    assert largest_error(kind, OF_CHAINS[kind]) < 1e-4


def test_nodes_read_with_root_feature_are_caught():
    """The mistake lowers acceptance only, and no text shows it."""
    assert largest_error("EAGLE-3 tree", "EAGLE-3", mutants.RootsFeature) > 0.01


def test_statistics_count_by_depth():
    state = texts_of(SMALL_TREES[0], RecursiveRule(), chain(temperature(1.0)), samples=50)
    stats = state.stats
    assert stats.reached_BK.shape[1] == BIG.depth == 4
    assert TreeShape.in_levels((0, 1, 0)) == TreeShape((0, 0, 1))
    accepted_B = (stats.accepted_BT * np.arange(5)[None]).sum(1)
    assert np.array_equal(accepted_B, state.from_draft_BS.sum(1))
    assert np.array_equal(stats.reached_BK[:, 0], stats.rounds_B)
    # Some nodes at depth 2 are leaves: a round that ends at one verifies no third position.
    assert int(stats.reached_BK[:, 2].sum()) < int(stats.accepted_BT[:, 2:].sum())
    # A text that is cut afterwards has the counts of a run that ends there.
    for row, prompt in ((0, 1), (70, 3), (140, 7)):
        emitted = slice(prompt, int(state.lengths_B[row]))
        rounds, from_draft = (
            x[row, emitted].tolist() for x in (state.rounds_BS, state.from_draft_BS)
        )
        assert RowStats.of_rounds(rounds, from_draft, BIG.depth) == RowStats.of(stats, row)


def test_a_grown_tree_must_keep_what_was_drawn():
    drafter = ModelTree(TableLM(V), tree=PRUNED)
    with refusal("nodes = 5 of 15 drawn nodes"):
        decode(table_loop(RecursiveRule(), drafter), TARGET, NEAR, PROMPT, 3, FULL)


def make(drafter, rule, **options):
    pair = Pair(target=TableLM(V), target_params=TARGET, draft=drafter.model, draft_params=NEAR)
    return make_method(pair, drafter=drafter, rule=rule, **options)


STOPS = Adaptive(lengths=(6,), stop=Confidence(0.3))
WIDE = ModelTree(TableLM(V), tree=TreeShape((0,) * 4))
GROWTH = Growth(depth=2, expanded=1, children=2)

test_refused_trees = refused_calls(
    {
        "TokenRule.* verifies chains, but ModelTree drafts token trees": lambda: make(
            model(), TokenRule()
        ),
        "EARS.* verifies chains, but ModelTree": lambda: make(model(), EARS(0.3)),
        "verifies token trees, but ModelDrafter .*TokenRule": lambda: make(
            ModelDrafter(TableLM(V), 2), RecursiveRule()
        ),
        "stop=Confidence.* ends chains, but ModelTree": lambda: make(
            model(), RecursiveRule(), draft_length=STOPS
        ),
        "4 siblings, but there are 3 tokens": lambda: make(WIDE, RecursiveRule()),
        "CountingLM has no compact": lambda: make(
            ModelTree(CountingLM(V), tree=TREE), RecursiveRule()
        ),
        "at least one node": lambda: TreeShape(()),
        r"parents\[1\] = 3": lambda: TreeShape((0, 3)),
        "level by level": lambda: TreeShape((0, 1, 0)),
        "branches below its first tokens": lambda: NgramTree(tree=TREE),
        "depth of its tree = 3, but the head drafts 2": lambda: FeatureTree(
            LayeredTable(V), medusa(V, 2), tree=TREE
        ),
        "tree must be a TreeShape, .*got Growth": lambda: FeatureTree(
            LayeredTable(V), medusa(V, 2), tree=GROWTH
        ),
        "tree must be a TreeShape": lambda: NgramTree(tree=GROWTH),
        "nodes .*got 3": lambda: Growth(depth=3, expanded=2, children=3, nodes=3),
    }
)
