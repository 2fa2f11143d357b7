"""The exact distribution of one round of a rule over trees, by enumeration.

All ``V^K`` trees are weighted with the distribution they are drawn from, computed in this file; in
each tree, the rule's own walk is forced to every end. After the round, the target continues alone.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specsamp import Draft
from support.enumeration import COMPILE_FAST, Given, autoregressive

CHUNK = 2048


def paths_of(parents):
    """Returns the nodes on the way to each scored row, with the row's own node last."""
    paths = [()]
    for node, parent in enumerate(parents):
        paths.append((*paths[parent], node))
    return paths


def number(tokens, vocab_size):
    return functools.reduce(lambda found, token: found * vocab_size + int(token), tokens, 0)


def trees(parents, draft, children):
    """Yields every tree that may be drawn: tokens, and probability by scenario."""
    scenarios, _, vocab_size = draft[0].shape
    paths = paths_of(parents)
    for tokens in itertools.product(range(vocab_size), repeat=len(parents)):
        weight = np.ones(scenarios)
        for node, parent in enumerate(parents):
            before = [tokens[i] for i in paths[parent]]
            law = np.exp(draft[len(before)][:, number(before, vocab_size)])
            family = [i for i, other in enumerate(parents) if other == parent]
            if children != "independent":
                for older in family[: family.index(node)]:
                    law[:, tokens[older]] = 0
            total = law.sum(1, keepdims=True)
            law = np.where(
                total > 0, law / np.where(total > 0, total, 1), np.eye(vocab_size)[vocab_size - 1]
            )
            if children == "top" or (children == "top_and_drawn" and node != family[-1]):
                law = np.eye(vocab_size)[law.argmax(1)]
            weight = weight * law[:, tokens[node]]
        if weight.any():
            yield np.array(tokens, np.int32), weight


def rows_along(parents, tokens, tables):
    """Returns the distribution after every scored row, ``[S, K + 1, V]``."""
    vocab_size = tables[0].shape[-1]
    on_paths = [[tokens[i] for i in path] for path in paths_of(parents)]
    return np.stack([tables[len(path)][:, number(path, vocab_size)] for path in on_paths], axis=1)


def ends(rule, parents, tokens_RK, weights_R, target, draft, num_drafted=None):
    """Returns for each tree and each row the probability that the walk ends there, and the weights
    of the next token.
    """
    (count, K), paths = tokens_RK.shape, paths_of(parents)
    num_drafted = K if num_drafted is None else num_drafted
    # To end at a row, the nodes on its path pass and no further node does.
    forced_EK = np.array([[-1.0 if node in path else 2.0 for node in range(K)] for path in paths])
    depth = max(len(path) for path in paths)
    width = max(parents.count(row) for row in parents)
    found = []
    with jax.enable_x64(True):
        for start in range(0, count, CHUNK):
            at = np.minimum(np.arange(start, start + CHUNK), count - 1)
            tree = Draft(
                tokens_BK=tokens_RK[at],
                num_drafted_B=np.full(CHUNK, num_drafted, np.int32),
                log_probs_BRV=None if draft is None else draft[at],
                parents_BK=np.broadcast_to(np.array(parents, np.int32), (CHUNK, K)),
                depth=depth,
                width=width,
            )
            found.append(jax.device_get(_walks(rule, tree, target[at], forced_EK)))
    asked, weights, reached = (np.concatenate(parts, axis=1)[:, :count] for parts in zip(*found))
    passes = np.where(forced_EK[:, None] < 0, asked, 1 - asked)
    chance = np.where(asked < 0, 1, passes).prod(-1)
    lengths = np.array([len(path) for path in paths])
    assert np.all(
        (reached == lengths[:, None]) | (chance == 0) | (lengths[:, None] > 0) & (num_drafted < K)
    )
    chance = np.where(reached == lengths[:, None], chance, 0)
    mass = weights.sum(-1, keepdims=True)
    return chance * weights_R, weights / np.where(mass > 0, mass, 1)


@functools.partial(jax.jit, static_argnums=0, compiler_options=COMPILE_FAST)
def _walks(rule, draft, target, forced_EK):
    def walk(forced_K):
        walk = rule.walk(
            draft, Given(target, draft), jnp.broadcast_to(forced_K, draft.tokens_BK.shape)
        )
        return walk.asked_BK, walk.weights_BV, walk.num_accepted_B

    return jax.vmap(walk)(forced_EK)


def enumerate_tree(
    rule, parents, target, draft, length, *, drawn=None, one_hot=False, num_drafted=None
):
    """Returns the joint distribution of ``length`` tokens, ``[S, V**length]``, and the expected
    accepted tokens ``[S]``.

    Args:
      drawn: the way in which children were drawn, if it differs from the rule's.
      one_hot: the rule is given no distributions.
    """
    parents, (scenarios, _, vocab_size) = tuple(parents), target[0].shape
    tokens, weights = zip(*trees(parents, draft, drawn or rule.children))
    tokens_DK, weights_DS = np.array(tokens), np.array(weights)
    of_target = np.stack([rows_along(parents, each, target) for each in tokens])
    of_draft = np.stack([rows_along(parents, each, draft) for each in tokens])
    flat_tokens = np.repeat(tokens_DK, scenarios, axis=0)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (of_target, of_draft)]
    chance, last = ends(
        rule,
        parents,
        flat_tokens,
        weights_DS.ravel(),
        flat[0],
        None if one_hot else flat[1],
        num_drafted,
    )
    joint = np.zeros((scenarios, vocab_size**length))
    accepted = np.zeros(scenarios)
    for path, chance_R, last_RV in zip(paths_of(parents), chance, last):
        by_text = chance_R.reshape(-1, scenarios)
        accepted += len(path) * by_text.sum(0)
        for tokens_K, chance_S, last_SV in zip(
            tokens_DK, by_text, last_RV.reshape(-1, scenarios, vocab_size)
        ):
            kept = [tokens_K[i] for i in path]
            for token in range(vocab_size):
                text = (*kept, token)[:length]
                mass = chance_S * last_SV[:, token]
                rest = after(target, text, length)
                at = number(text, vocab_size) * rest.shape[1]
                joint[:, at : at + rest.shape[1]] += mass[:, None] * rest
    return joint, accepted


def after(target, text, length):
    """Returns the target's distribution after a text, ``[S, V**(length - len(text))]``."""
    vocab_size = target[0].shape[-1]
    at, tables = number(text, vocab_size), []
    for n in range(len(text), length):
        size = vocab_size ** (n - len(text))
        tables.append(target[n][:, at * size : (at + 1) * size])
    return autoregressive(tables, length - len(text)) if tables else np.ones((len(target[0]), 1))
