"""The best shape of a token tree, from acceptance by rank and the time of rounds (Sequoia, arXiv
2402.12374, section 3.1).

The b-th child of a row is the accepted one with probability ``ranks[b - 1]``: its older siblings
were rejected, and it is accepted. So a tree emits ``F = sum over rows of the product of ranks along
the path`` tokens per round, the pending row's own token included. Ranks are measured with stars,
trees of one level: the star of b children accepts with the sum of the first b ranks, and a longer
list of siblings begins with a shorter one.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from specsamp import validate
from specsamp.decoding.trees import TreeShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeForecast:
    """Forecasts a shape: tokens per round, and milliseconds of a round."""

    shape: TreeShape
    tokens_per_round: float
    round_ms: float

    @property
    def ms_per_token(self) -> float:
        return self.round_ms / self.tokens_per_round

    @property
    def is_chain(self) -> bool:
        return self.shape.width == 1


def tokens_of(shape: TreeShape, ranks: Sequence[float]) -> float:
    """Returns F of a shape."""
    reached = [1.0]
    for node, parent in enumerate(shape.parents):
        rank = shape.parents[:node].count(parent)
        reached.append(reached[parent] * (ranks[rank] if rank < len(ranks) else 0.0))
    return float(sum(reached))


def best_shape(ranks: Sequence[float], rows: int, depth: int | None = None) -> TreeShape:
    """Returns the shape with the most tokens per round among those of this size.

    Args:
      ranks: acceptance by rank, see the module.
      rows: scored rows, 2 or more: the pending token and K nodes.
      depth: the largest depth; None: any.
    """
    ranks = tuple(validate.number(f"ranks[{i}]", rank, 0, 1) for i, rank in enumerate(ranks))
    if not ranks or sum(ranks) > 1 + 1e-9:  # at most one sibling is accepted
        raise ValueError(f"ranks must be probabilities whose sum is at most 1; got {ranks}")
    validate.integer("rows", rows, 2)
    depth = rows - 1 if depth is None else min(validate.integer("depth", depth, 1), rows - 1)
    if rows > sum(min(len(ranks), rows) ** n for n in range(depth + 1)):
        raise ValueError(
            f"no tree of {rows} rows has {len(ranks)} ranks and depth {depth}: give more of either"
        )
    parents: list[int] = []
    size = 1 << rows.bit_length()  # of tables, which serve all numbers of rows below

    def place(row: int, rows: int, depth: int, children: int) -> None:
        sizes = []
        for rank in range(children, 0, -1):
            sizes.append(int(_tables(ranks, size, depth)[1][rows, rank]))
            rows -= sizes[-1]
        for below in reversed(sizes):
            parents.append(row)
            best = _tables(ranks, size, depth - 1)[0][below]
            place(len(parents), below, depth - 1, int(np.argmax(best)))

    whole = _tables(ranks, size, depth)[0][rows]
    place(0, rows, depth, int(np.argmax(whole)))
    return TreeShape.in_levels(parents)


@functools.cache
def _tables(ranks: tuple[float, ...], rows: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the most tokens of n rows under a root with exactly b children, and the size of the
    last child's tree.
    """
    best = np.full((rows + 1, len(ranks) + 1), -np.inf)
    sizes = np.zeros_like(best, int)
    best[1, 0] = 1
    if depth == 0:
        return best, sizes
    below = _tables(ranks, rows, depth - 1)[0].max(axis=1)
    for n in range(2, rows + 1):
        m = np.arange(1, n)
        for b in range(1, len(ranks) + 1):
            tokens = best[n - m, b - 1] + ranks[b - 1] * below[m]
            sizes[n, b] = m[np.argmax(tokens)]
            best[n, b] = tokens.max()
    return best, sizes


def choose_shape(
    ranks: Sequence[float],
    round_ms: Callable[[int, int], float],
    *,
    most_rows: int,
    most_depth: int,
) -> tuple[TreeForecast, TreeForecast]:
    """Returns the tree and the chain with the fewest milliseconds per token; the tree may be a
    chain itself.

    Args:
      ranks: acceptance by rank.
      round_ms: milliseconds of a round, by depth and scored rows.
      most_rows, most_depth: the largest sizes to consider.
    """
    forecasts = []
    for depth in range(1, validate.integer("most_depth", most_depth, 1) + 1):
        # The first has the chain alone.
        for rows in range(depth + 1, validate.integer("most_rows", most_rows, 2) + 1):
            if rows > sum(min(len(ranks), rows) ** n for n in range(depth + 1)):
                break
            shape = best_shape(ranks, rows, depth)
            ms = validate.number("round_ms", round_ms(shape.depth, shape.K + 1), 0, above=True)
            forecasts.append(
                TreeForecast(shape=shape, tokens_per_round=tokens_of(shape, ranks), round_ms=ms)
            )
    chains = [forecast for forecast in forecasts if forecast.is_chain]
    return tuple(
        min(among, key=lambda forecast: forecast.ms_per_token) for among in (forecasts, chains)
    )
