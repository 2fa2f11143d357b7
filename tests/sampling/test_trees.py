"""Rules over trees, enumerated in float64: tables of the literature, joint laws of whole trees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from specsamp import BlockRule, CoupledRule, TokenRule, chain
from specsamp.sampling import tree_rules
from specsamp.sampling.rng import RoundKeys, row_keys
from specsamp.sampling.rules import Draft, TargetDistributions
from specsamp.sampling.tree_rules import CHILDREN, KSeqRule, RecursiveRule, TraversalRule
from support.distributions import constant, log, random_distributions
from support.enumeration import COMPILE_FAST, Given, autoregressive, enumerate_round
from support.extras import slow_but
from support.refusals import refused_calls
from support.tree_enumeration import enumerate_tree
from support.tree_mutants import KeepsTheSecond, MergesEqual, WrongOrder

EXACT, BIASED = 1e-12, 1e-3
RULES = [*map(RecursiveRule, CHILDREN), KSeqRule(), *map(TraversalRule, CHILDREN)]
TWO = (0, 0, 2, 1)  # two children with a child each, in the opposite order
THREE = (0, 0, 0, 2)


def name_of(rule):
    return f"{type(rule).__name__}-{rule.children}"


@functools.cache
def scenarios():
    """Returns pairs: random ones, a draft with fewer tokens than siblings, a target that lacks a
    token, equal and disjoint pairs.
    """
    target = random_distributions(20, 8, 3, 4)
    draft = random_distributions(21, 8, 3, 4)
    for q, p in zip(target, draft):
        p[2, :, 1:] = p[3, :, 1] = -np.inf  # one token, as in a greedy row; two tokens
        q[4, :, 0] = -np.inf
        p[5] = q[5]
        q[6, :, 1:], p[6, :, 0] = -np.inf, -np.inf
    return [
        [x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in tables]
        for tables in (target, draft)
    ]


@pytest.mark.parametrize("rule", RULES, ids=name_of)
@pytest.mark.parametrize("parents", [TWO, pytest.param(THREE, marks=pytest.mark.slow)], ids=str)
def test_trees_emit_the_targets_joint_distribution(rule, parents):
    target, draft = scenarios()
    joint, _ = enumerate_tree(rule, parents, target, draft, 3, one_hot=rule.chooses)
    assert np.abs(joint - autoregressive(target, 3)).max() < EXACT


DISTINCT = [RecursiveRule(), RecursiveRule("top_and_drawn"), TraversalRule()]


@pytest.mark.parametrize("rule", [*DISTINCT, KeepsTheSecond()], ids=name_of)
def test_three_siblings_keep_the_target_distribution(rule):
    """With three tokens, the third sibling has all remaining probability, and hides the mistake."""
    target = random_distributions(22, 8, 4, 2)
    draft = random_distributions(23, 8, 4, 2)
    joint, _ = enumerate_tree(rule, (0, 0, 0), target, draft, 2)
    error = np.abs(joint - autoregressive(target, 2)).max()
    assert error > BIASED if isinstance(rule, KeepsTheSecond) else error < EXACT


@pytest.mark.parametrize("rule", [RecursiveRule(), TraversalRule()], ids=name_of)
def test_a_tree_may_be_cut_anywhere(rule):
    target, draft = scenarios()
    for count in range(4):
        joint, accepted = enumerate_tree(rule, TWO, target, draft, 3, num_drafted=count)
        assert np.abs(joint - autoregressive(target, 3)).max() < EXACT
        assert np.all(accepted[:2] > 0) == (count > 0)


@pytest.mark.parametrize(
    "rule, parents, options",
    [
        # The draft is not normalised again after a refusal.
        (RecursiveRule("independent"), TWO, dict(drawn="distinct")),
        (MergesEqual(), TWO, {}),
        (RecursiveRule(), TWO, dict(drawn="top")),  # chosen by value, judged as drawn
        (TraversalRule(), TWO, dict(drawn="top")),
        (TraversalRule("independent"), TWO, dict(drawn="distinct")),
        (KSeqRule(), TWO, dict(drawn="distinct")),
        (WrongOrder(), TWO, {}),  # the wrong order of siblings
    ],
    ids=str,
)
def test_children_must_be_judged_as_they_were_drawn(rule, parents, options):
    target = random_distributions(3, 4, 3, 4)
    draft = random_distributions(4, 4, 3, 4)
    joint, _ = enumerate_tree(rule, parents, target, draft, 3, **options)
    assert np.abs(joint - autoregressive(target, 3)).max() > BIASED


def test_repeated_siblings_of_distinct_rules_are_dead():
    """Siblings drawn with replacement are exact too: a repeated token has no probability left."""
    target = random_distributions(3, 4, 3, 4)
    draft = random_distributions(4, 4, 3, 4)
    joint, _ = enumerate_tree(RecursiveRule(), TWO, target, draft, 3, drawn="independent")
    assert np.abs(joint - autoregressive(target, 3)).max() < EXACT


# A chain is a tree.


@pytest.mark.parametrize(
    "rule, of_chains", [(RecursiveRule(), TokenRule()), (TraversalRule(), BlockRule())]
)
def test_tree_rule_on_chain_equals_chain_rule(rule, of_chains):
    target = random_distributions(5, 6, 3, 4)
    draft = random_distributions(6, 6, 3, 4)
    rounds = enumerate_round(of_chains, target, draft, num_tokens=3)
    joint, accepted = enumerate_tree(rule, (0, 1, 2), target, draft, 4)
    assert_allclose(accepted, rounds.expected_accepted_SX[:, 0], atol=EXACT)
    assert np.abs(joint - autoregressive(target, 4)).max() < EXACT


# Tables of the literature: acceptance at one position.

PAIRS = {  # target, draft
    "reversed": ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5)),
    "near": ((0.5, 0.3, 0.15, 0.05), (0.45, 0.25, 0.2, 0.1)),
    "flatter": ((0.7, 0.2, 0.07, 0.03), (0.5, 0.3, 0.15, 0.05)),
    "far": ((0.6, 0.3, 0.1), (0.1, 0.3, 0.6)),
    "uniform": ((0.5, 0.3, 0.2, 0.0), (0.25,) * 4),
}
# With replacement, K-SEQ, without replacement, top and drawn, top; None: not in the literature.
ONE_POSITION = {
    ("reversed", 3): (0.808, 0.858519, 1, 1, 1),
    ("near", 2): (0.97, 0.9828, 0.9795, 0.9273, 0.8),
    ("flatter", 2): (0.9, 0.9312, 0.929, 0.98, 0.9),
    ("far", 3): (0.595, 0.62423, 1, None, None),
    ("uniform", 3): (0.86875, 0.91125, 0.925, None, 1),
}
AT_A_POSITION = (
    RecursiveRule("independent"),
    KSeqRule(),
    RecursiveRule(),
    RecursiveRule("top_and_drawn"),
    RecursiveRule("top"),
)


@pytest.mark.parametrize("rule", slow_but(range(5), 1, 2))
def test_acceptance_at_one_position(rule):
    for (pair, siblings), expected in ONE_POSITION.items():
        if expected[rule] is not None:
            q, p = PAIRS[pair]
            chosen = AT_A_POSITION[rule]
            _, accepted = enumerate_tree(
                chosen, (0,) * siblings, constant(q, 2), constant(p, 2), 1, one_hot=chosen.chooses
            )
            assert_allclose(accepted, expected[rule], atol=5e-5, err_msg=f"{pair}, {siblings}")


# Whole trees: expected accepted tokens, with and without replacement, top-down and by traversal.

WHOLE = {
    RecursiveRule("independent"): 1.292,
    TraversalRule("independent"): 1.352,
    RecursiveRule(): 1.394,
    TraversalRule(): 1.454,
}


@pytest.mark.slow
def test_accepted_tokens_of_whole_trees():
    q, p = (constant(x, 3) for x in PAIRS["reversed"])
    for rule, expected in WHOLE.items():
        _, accepted = enumerate_tree(rule, (0, 0, 1, 2), q, p, 3)
        assert_allclose(accepted[0], expected, atol=EXACT, err_msg=name_of(rule))


class Shares(TraversalRule):
    """Gives all rows but the root's one distribution, as the heads of Medusa do."""

    def walk(self, draft, target, uniforms_BK):
        batch, count, _ = draft.log_probs_BRV.shape
        shared = dataclasses.replace(
            draft,
            log_probs_BRV=draft.log_probs_BRV[:, :2],
            law_rows_BT=jnp.broadcast_to(jnp.minimum(jnp.arange(count), 1), (batch, count)),
        )
        return super().walk(shared, target, uniforms_BK)


def test_traversal_of_parents_that_share_a_distribution():
    q, p = (constant(x, 3) for x in PAIRS["reversed"])
    alone, shared = (enumerate_tree(rule, TWO, q, p, 3) for rule in (TraversalRule(), Shares()))
    assert np.abs(shared[0] - autoregressive(q, 3)).max() < EXACT
    assert_allclose(shared[1], alone[1], atol=EXACT)


# Single steps.


def walk(rule, tokens, parents, target, draft, uniforms, depth=1):
    """Runs the rule's walk with these random numbers."""
    with jax.enable_x64(True):
        tree = Draft(
            tokens_BK=jnp.asarray([tokens], jnp.int32),
            num_drafted_B=jnp.asarray([len(tokens)]),
            log_probs_BRV=None if draft is None else jnp.asarray(log(draft))[None],
            parents_BK=jnp.asarray([parents], jnp.int32),
            depth=depth,
        )
        return jax.tree.map(
            np.asarray,
            rule.walk(tree, Given(jnp.asarray(log(target))[None], tree), jnp.asarray([uniforms])),
        )


@pytest.mark.parametrize("rule", [RecursiveRule(), TraversalRule()], ids=name_of)
def test_large_batches_are_judged_like_small_ones(rule, monkeypatch):
    """A folded vocabulary pads 13 tokens: no path and no weight reaches into the padding."""
    batch, vocab_size = 3, 13
    target_BTV, draft_BRV = (
        jax.random.normal(jax.random.key(i), (batch, 5, vocab_size)) for i in range(2)
    )
    draft = Draft(
        tokens_BK=jax.random.randint(jax.random.key(2), (batch, 4), 0, vocab_size),
        num_drafted_B=jnp.full(batch, 4),
        log_probs_BRV=jax.nn.log_softmax(draft_BRV),
        parents_BK=jnp.broadcast_to(jnp.array(TWO), (batch, 4)),
        depth=2,
        width=2,
    )
    target = TargetDistributions(logits_BTV=target_BTV, warp=chain(), draft=draft)
    uniforms_BK = jax.random.uniform(jax.random.key(3), (batch, 4))
    few = rule.walk(draft, target, uniforms_BK)
    monkeypatch.setattr(tree_rules, "MAX_UNROLLED", 0)
    jax.tree.map(assert_array_equal, rule.walk(draft, target, uniforms_BK), few)
    assert few.weights_BV.shape == (batch, vocab_size) and len(set(few.num_accepted_B.tolist())) > 1


@pytest.mark.parametrize("rule", [RecursiveRule(), TraversalRule()], ids=name_of)
def test_a_nan_leaves_out_its_subtree_alone(rule):
    q, p = PAIRS["reversed"]
    laws = [p, [np.nan] * 3, p, p, p]
    # Rows 1 and 2 below the root, 3 below row 1, 4 below row 2.
    found = walk(rule, [2, 0, 1, 0], [0, 0, 1, 2], [q] * 5, laws, [0.0, 0.9, 0.0, 0.0], depth=2)
    assert found.rows_BT.tolist()[0][:2] == [0, 1] and found.num_accepted_B == [1]
    assert np.isfinite(found.weights_BV).all()
    found = walk(rule, [2, 0, 1, 0], [0, 0, 1, 2], [q] * 5, laws, [0.99, 0.0, 0.0, 0.0], depth=2)
    assert found.rows_BT.tolist() == [[0, 2, 4]]


@pytest.mark.parametrize(
    "rule", [RecursiveRule(), RecursiveRule("independent"), TraversalRule()], ids=name_of
)
def test_dead_nodes_are_never_accepted(rule):
    """A greedy draft has one token for three siblings; dead siblings do not change the target."""
    q = (0.5, 0.3, 0.2)
    found = walk(rule, [1, 2, 0], [0] * 3, [q] * 4, [[0, 1, 0]] * 4, [0.31, 0.0, 0.0])
    assert_allclose(found.asked_BK, [[0.3, 0, 0]], atol=EXACT)
    assert found.num_accepted_B == [0]
    assert_allclose(found.weights_BV, [[5 / 7, 0, 2 / 7]], atol=EXACT)


# How siblings are drawn.

KEYS = RoundKeys(
    rows_B=row_keys(0, jnp.arange(20_000), jnp.zeros(20_000, jnp.int32)),
    starts_B=jnp.full(20_000, 3),
)


def drawn(rule, count, probs=(0.5, 0.3, 0.15, 0.05)):
    siblings = jax.jit(rule.siblings, compiler_options=COMPILE_FAST)
    laws_BPV = jnp.broadcast_to(jnp.asarray(log(probs), jnp.float32), (20_000, 1, len(probs)))
    return np.asarray(siblings(laws_BPV, KEYS, nodes_PC=np.arange(count)[None], depth=0))[:, 0]


@pytest.mark.parametrize(
    "rule", [RecursiveRule(), RecursiveRule("independent"), CoupledRule()], ids=str
)
def test_fewer_siblings_begin_a_longer_list(rule):
    three = drawn(rule, 3)
    assert_array_equal(drawn(rule, 2), three[:, :2])
    p = np.array((0.5, 0.3, 0.15, 0.05))
    pairs = np.outer(p, p)
    if rule != RecursiveRule("independent"):
        np.fill_diagonal(pairs, 0)
        pairs /= (1 - p)[:, None]
    seen = np.histogram2d(three[:, 0], three[:, 1], bins=[np.arange(5) - 0.5] * 2)[0] / len(three)
    assert np.abs(seen - pairs).max() < 0.02


def test_the_top_tokens_come_before_the_drawn_one():
    tokens = drawn(RecursiveRule("top_and_drawn"), 3)
    assert np.all(tokens[:, 0] == 0) and np.all(tokens[:, 1] == 1)
    assert np.mean(tokens[:, 2] == 2) == pytest.approx(0.75, abs=0.02)


test_refused_tree_rules = refused_calls(
    {
        "children must be one of .*; got 'worst'": lambda: TraversalRule("worst"),
        "children must be one of .*; got 'top'": lambda: KSeqRule("top"),
    }
)
