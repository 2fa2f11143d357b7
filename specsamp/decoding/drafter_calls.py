"""Checks the results of a drafter's methods for the loop, while tracing.

A draft counts as many tokens as were returned. It ends before an id that is no token of the
vocabulary, before a distribution without mass 1, and before a token that has no probability in its
distribution. This biases no drafter that keeps to the protocol: it never draws such a token, and
its distributions have mass 1 or, where a context has no next token, are NaN, which earlier tokens
alone decide. Whether tokens were drawn from the distributions that are returned cannot be seen
here: `audit.py` measures it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.decoding.drafter import Drafter, PromptChunk, hooks_of
from specsamp.decoding.state import Prefix, Weights, gather_tokens
from specsamp.sampling.rules import Draft, at_tokens, count_leading

Array = jax.Array

MASS_ERROR = 0.01  # of a distribution; rounding makes 1e-3 at most


def checked(drafter: Drafter, method: str, returned: Any, **given: Any) -> tuple[Any, ...]:
    """Returns the results of a method; state and cache must be like those given.

    Only the state that `Drafter.propose` returns may be anything, since `Drafter.commit` gets it.

    Raises:
      ValueError: while tracing, if their structures, shapes or dtypes have changed.
    """
    name = f"{type(drafter).__name__}.{method}"
    if not isinstance(returned, tuple) or len(returned) != len(given):
        raise ValueError(
            f"{name} must return a tuple ({', '.join(given)}); got {type(returned).__name__}"
        )
    for (part, before), after in zip(given.items(), returned):
        if method != "propose" or part == "cache":
            _check_alike(name, part, before, after)
    return returned


def cut_draft(drafter: Drafter, draft: Any, batch: int, vocab_size: int) -> Draft:
    """Returns a proposal, with each draft cut before its first node that cannot be one.

    Such a node is no token of the vocabulary, it was not drawn from a distribution, or its parent
    does not come before it or has no distribution.

    Raises:
      ValueError: while tracing, naming the field that has another type, shape or dtype than those
        of `Draft`.
    """
    name = f"{type(drafter).__name__}.propose"
    if not isinstance(draft, Draft):
        raise ValueError(f"{name} must return a Draft; got {type(draft).__name__}")
    _check_array(f"{name}: tokens_BK", draft.tokens_BK, jnp.integer, (batch, None))
    nodes = draft.tokens_BK.shape[1]
    if nodes > drafter.K:
        raise ValueError(
            f"{name}: tokens_BK has {nodes} tokens per row, more than K = {drafter.K}: return K at "
            "most"
        )
    laws = nodes if draft.parents_BK is None else None
    shapes = {"num_drafted_B": (batch,), "log_probs_BRV": (batch, laws, vocab_size)}
    shapes |= {"parents_BK": (batch, nodes), "law_rows_BT": (batch, nodes + 1)}
    for field, shape in shapes.items():
        value = getattr(draft, field)
        if value is not None or field == "num_drafted_B":
            kind = jnp.floating if field == "log_probs_BRV" else jnp.integer
            _check_array(f"{name}: {field}", value, kind, shape)
    is_token_BK = (draft.tokens_BK >= 0) & (draft.tokens_BK < vocab_size)
    is_node_BK = is_token_BK & (
        _is_drawn(draft) if draft.parents_BK is None else _has_parent(draft)
    )
    return dataclasses.replace(
        draft,
        # The target reads the tokens after the end of a draft, too. An embedding that does not
        # exist would be NaN.
        tokens_BK=jnp.where(is_token_BK, draft.tokens_BK, 0).astype(jnp.int32),
        num_drafted_B=jnp.clip(draft.num_drafted_B, 0, count_leading(is_node_BK)).astype(jnp.int32),
    )


def num_covered(drafter: Drafter, lengths_B: Array) -> Array:
    """Returns how many tokens of each text a drafter's state covers after a draft, int32 ``[B]``.

    The first call of the next round reads the others.
    """
    return jnp.maximum(lengths_B - 2 - hooks_of(drafter).looks_ahead, 0)


def catch_up(
    drafter: Drafter,
    weights: Weights,
    state: Any,
    prefix: Prefix,
    seen_B: Array,
    rows_B: Array,
    any_shard: Callable[[Array], Array],
) -> tuple[Any, Array]:
    """Feeds a drafter the tokens emitted while it was paused, K + 1 per call; see
    `DrafterHooks.falls_behind`.

    The tokens that the first call of a round reads anyway are left out, see `num_covered`.

    Args:
      seen_B: int32, the tokens of each row that the drafter's state covers.
      rows_B: bool, the rows that must not lack tokens.
      any_shard: `DataShards.any`.

    Returns:
      The drafter's state, and the new ``seen_B``.
    """
    known_B = num_covered(drafter, prefix.lengths_B)

    def read(carry):
        state, seen_B = carry
        # Tokens beyond the sequence are scratch, and within the headroom.
        start_B = jnp.clip(seen_B, 0, known_B)
        tokens_BT = gather_tokens(prefix.tokens_BS, start_B, drafter.K + 1)
        chunk = PromptChunk(
            tokens_BT=tokens_BT, start_B=start_B, lengths_B=prefix.lengths_B, output=None
        )
        returned = drafter.read(weights, state, chunk, None)
        state, _ = checked(drafter, "read", returned, state=state, cache=None)
        return state, start_B + drafter.K + 1

    def is_behind(carry):
        return any_shard(jnp.any(rows_B & (carry[1] < known_B)))

    state, seen_B = jax.lax.while_loop(is_behind, read, (state, seen_B))
    return state, jnp.minimum(seen_B, prefix.lengths_B)


def _mass(draft: Draft) -> Array:
    """Returns the mass of each distribution, float32 ``[B, R]``; NaN where one is."""
    return jnp.sum(jnp.exp(draft.log_probs_BRV), axis=-1, dtype=jnp.float32)


def _is_drawn(draft: Draft) -> Array:
    """Returns whether each token of a chain has probability in a distribution of mass 1, bool ``[B,
    K]``.
    """
    if draft.log_probs_BRV is None:
        return jnp.ones(draft.tokens_BK.shape, bool)
    tokens_BK = jnp.clip(draft.tokens_BK, 0, draft.log_probs_BRV.shape[-1] - 1)
    log_probs_BK = at_tokens(draft.log_probs_BRV, tokens_BK)
    return (jnp.abs(_mass(draft) - 1) < MASS_ERROR) & (log_probs_BK > -jnp.inf)


def _has_parent(draft: Draft) -> Array:
    """Returns whether the parent of each node of a tree comes before it and has a distribution,
    bool ``[B, K]``.

    Rules for trees skip the nodes below a distribution of NaN.
    """
    parents_BK = draft.parents_BK
    nodes = parents_BK.shape[1]
    comes_before_BK = (parents_BK >= 0) & (parents_BK <= jnp.arange(nodes)[None])
    if draft.log_probs_BRV is None:
        return comes_before_BK
    laws_BK = parents_BK
    if draft.law_rows_BT is not None:
        laws_BK = jnp.take_along_axis(draft.law_rows_BT, jnp.clip(parents_BK, 0, nodes), axis=1)
    rows = draft.log_probs_BRV.shape[1]
    has_law_BK = (laws_BK >= 0) & (laws_BK < rows)
    is_wrong_BR = jnp.abs(_mass(draft) - 1) >= MASS_ERROR
    is_wrong_BK = jnp.take_along_axis(is_wrong_BR, jnp.clip(laws_BK, 0, rows - 1), axis=1)
    return comes_before_BK & has_law_BK & ~is_wrong_BK


def _check_array(name: str, x: Any, kind: Any, shape: tuple[int | None, ...]) -> None:
    """Raises ValueError if ``x`` is no array of this kind and shape; None stands for any size."""
    is_array = isinstance(x, (jax.Array, np.ndarray))
    if (
        not is_array
        or not jnp.issubdtype(x.dtype, kind)
        or len(x.shape) != len(shape)
        or any(size not in (None, given) for size, given in zip(shape, x.shape))
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        given = f"{x.dtype}{list(x.shape)}" if is_array else type(x).__name__
        raise ValueError(f"{name} must be an array of {kind.__name__} [{wanted}]; got {given}")


def _check_alike(name: str, part: str, given: Any, returned: Any) -> None:
    """Raises ValueError, while tracing, if two trees differ in structure, shapes or dtypes."""

    def shapes(tree):
        leaves = jax.tree.leaves_with_path(tree)
        return {
            jax.tree_util.keystr(path): f"{jnp.result_type(x)}{list(jnp.shape(x))}"
            for path, x in leaves
        }

    before, after = shapes(given), shapes(returned)
    path = next((path for path in before | after if before.get(path) != after.get(path)), None)
    structures = jax.tree.structure(given), jax.tree.structure(returned)
    if path is None and structures[0] == structures[1]:
        return
    ours, theirs = (
        structures if path is None else (before.get(path, "nothing"), after.get(path, "nothing"))
    )
    raise ValueError(
        f"{name} must return a {part} like the one before: {part}{path or ''} was {ours}, returned "
        f"was {theirs}"
    )
