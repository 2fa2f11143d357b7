"""The dynamic programme for the shape of a tree: golden values, brute force, and when a chain is
better.
"""

import itertools

import pytest

from specsamp import TreeShape
from specsamp.analysis.tree_shape import best_shape, choose_shape, tokens_of
from support.refusals import refused_calls

RANKS = (0.6, 0.2, 0.1)


def test_no_tree_of_seven_rows_is_better():
    for depth in (1, 3):
        shapes = itertools.product(*(range(node + 1) for node in range(6)))
        known = [TreeShape.in_levels(parents) for parents in shapes]
        best = max(
            tokens_of(shape, (0.5, 0.3, 0.1, 0.05, 0.03, 0.01))
            for shape in known
            if shape.depth <= depth
        )
        found = best_shape((0.5, 0.3, 0.1, 0.05, 0.03, 0.01), 7, depth)
        assert found.depth <= depth
        assert tokens_of(found, (0.5, 0.3, 0.1, 0.05, 0.03, 0.01)) == pytest.approx(best)


def test_best_tree_depends_on_costs():
    free_rows, chain = choose_shape(
        RANKS, lambda depth, rows: 10 + depth, most_rows=16, most_depth=6
    )
    assert free_rows.shape.K == 15
    assert free_rows.ms_per_token < chain.ms_per_token
    assert chain.is_chain
    dear_rows, chain = choose_shape(
        RANKS, lambda depth, rows: 1 + 2 * rows, most_rows=16, most_depth=6
    )
    assert dear_rows.is_chain and dear_rows == chain and chain.shape.K == 1


test_refused_shapes = refused_calls(
    {
        r"ranks\[1\] .* got 1.2": lambda: best_shape((0.6, 1.2), 4),
        r"sum is at most 1; got \(0.6, 0.9\)": lambda: best_shape((0.6, 0.9), 4),
        "rows .* got 1": lambda: best_shape(RANKS, 1),
        "no tree of 5 rows has 1 ranks and depth 2": lambda: best_shape((0.6,), 5, 2),
    }
)
