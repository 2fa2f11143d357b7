"""Computes what lossy rules cost by enumeration: of each token, from what is emitted alone, and of texts, by the rule's meter."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import log_softmax

from specsamp.sampling.rules import Draft
from specsamp.sampling.warp import log_probs
from support.enumeration import CHUNK, COMPILE_FAST, along_drafts, autoregressive, enumerate_round
from support.fakes import ORDER


def variation(one, other):
    """Half the sum of absolute differences over the last axis."""
    return np.abs(one - other).sum(-1) / 2


def token_outputs(rounds, step):
    """The distribution of the token ``step`` places into a round, if all drafted ones before it were accepted.

    Returns:
      ``[S, X, V**step, V]``, nan where that never happens, and of the drafted tokens there the share that is accepted.
    """
    joint = rounds.joint_SXDNV
    scenarios, prefixes, drafts, outcomes, vocab_size = joint.shape
    joint = joint.reshape(scenarios, prefixes, vocab_size**step, vocab_size, -1, outcomes, vocab_size)
    kept = joint[..., step + 1 :, :].sum((4, 5, 6))  # by the drafted token
    replaced = joint[..., step, :].sum((3, 4))  # by the one instead
    mass = (kept + replaced).sum(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (kept + replaced) / mass, kept.sum(-1) / mass[..., 0]


def meters(rule, target, draft, *, num_tokens, one_hot=False):
    """The rule's meter at each draft and each number of accepted tokens: variation and extra, ``[S, X, D, N, T]``."""
    scenarios, prefixes, vocab_size = target[0].shape
    rows = along_drafts(target, num_tokens + 1, num_tokens)
    shape = rows.shape[:3]
    drafts_DK = np.indices((vocab_size,) * num_tokens).reshape(num_tokens, -1).T.astype(np.int32)
    log_probs = None if one_hot else along_drafts(draft, num_tokens, num_tokens).reshape(-1, num_tokens, vocab_size)
    count = np.prod(shape)
    one = Draft(
        tokens_BK=np.broadcast_to(drafts_DK, shape + (num_tokens,)).reshape(count, num_tokens),
        num_drafted_B=np.full(count, num_tokens, np.int32),
        log_probs_BRV=log_probs,
    )
    rows = rows.reshape(count, num_tokens + 1, vocab_size)
    pieces = []
    with jax.enable_x64(True):
        for start in range(0, count, CHUNK):
            chosen = np.minimum(np.arange(start, start + CHUNK), count - 1)
            pieces.append(jax.device_get(_meters(rule, *jax.tree.map(lambda x: x[chosen], (one, rows)))))
    variation, extra = (np.concatenate(parts)[:count] for parts in zip(*pieces))
    return tuple(x.reshape(shape + (num_tokens + 1, num_tokens + 1)) for x in (variation, extra))


@functools.partial(jax.jit, static_argnums=0, compiler_options=COMPILE_FAST)
def _meters(rule, draft, target):
    batch, outcomes, _ = target.shape

    def meter(n):
        found = rule.meter(draft, target, jnp.full(batch, n))
        return found.variation, found.extra

    return jax.vmap(meter, out_axes=1)(jnp.arange(outcomes, dtype=jnp.int32))


def joint_and_price(rule, target, draft, *, num_tokens, length, one_hot=False):
    """The joint distribution of ``length`` tokens, ``[S, V**length]``, and the mean of their metered sums, ``[S]``."""
    scenarios, _, vocab_size = target[0].shape
    reached = [np.zeros((scenarios, vocab_size**m)) for m in range(length + 1)]
    reached[0][:] = 1
    price = np.zeros(scenarios)
    for m in range(length):
        rounds = enumerate_round(rule, target[m:], draft[m:], num_tokens=num_tokens, one_hot=one_hot)
        cost, _ = meters(rule, target[m:], draft[m:], num_tokens=num_tokens, one_hot=one_hot)
        spent_SXDN = np.where(rounds.joint_SXDNV.sum(-1) > 0, cost[..., : length - m].sum(-1), 0)
        price += np.einsum("sx,sxdn,sxdn->s", reached[m], rounds.joint_SXDNV.sum(-1), spent_SXDN)
        for n in range(num_tokens + 1):
            distribution = reached[m][..., None] * rounds.emitted(n)
            end = min(m + n + 1, length)
            reached[end] += distribution.reshape(scenarios, vocab_size**end, -1).sum(-1)
    return reached[length], price


def text_variation(joint, target, length):
    """The total variation between texts, ``[S]``."""
    return variation(joint, autoregressive(target, length))


def prefix_tables(table, warp, prompt, depth):
    """Returns what a `TableLM` says after every continuation of ``prompt`` shorter than ``depth``: `Distributions`."""
    vocab_size = table.shape[-1]
    warped = np.asarray(log_probs(warp, table.reshape(1, -1, vocab_size)), np.float64).reshape(table.shape)
    found = []
    for length in range(depth):
        texts = itertools.product(range(vocab_size), repeat=length)
        contexts = [tuple(([vocab_size] * ORDER + [*prompt, *text])[-ORDER:]) for text in texts]
        found.append(log_softmax(np.stack([warped[context] for context in contexts]), -1)[None])
    return found
