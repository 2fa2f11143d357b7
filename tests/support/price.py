"""Costs of lossy rules by enumeration: of tokens by emitted distributions, of texts by meters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specsamp import Draft
from support.enumeration import COMPILE_FAST, along_drafts, autoregressive, chain_rounds, in_chunks


def variation(one, other):
    """Returns half the sum of absolute differences over the last axis."""
    return np.abs(one - other).sum(-1) / 2


def token_outputs(rounds, step):
    """Returns the distribution of token ``step`` of a round, given that all drafted tokens before
    it were accepted.

    Returns:
      ``[S, X, V**step, V]``, nan if that never happens, and the share of drafted tokens there that
      is accepted.
    """
    joint = rounds.joint_SXDNV
    scenarios, prefixes, drafts, outcomes, vocab_size = joint.shape
    joint = joint.reshape(
        scenarios, prefixes, vocab_size**step, vocab_size, -1, outcomes, vocab_size
    )
    kept = joint[..., step + 1 :, :].sum((4, 5, 6))  # by the drafted token
    replaced = joint[..., step, :].sum((3, 4))  # by the token in its place
    mass = (kept + replaced).sum(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (kept + replaced) / mass, kept.sum(-1) / mass[..., 0]


def meters(rule, target, draft, *, num_tokens, one_hot=False):
    """Returns the rule's meter at each draft and each number of accepted tokens: variation and
    extra, ``[S, X, D, N, T]``.
    """
    scenarios, prefixes, vocab_size = target[0].shape
    rows = along_drafts(target, num_tokens + 1, num_tokens)
    shape = rows.shape[:3]
    drafts_DK = np.indices((vocab_size,) * num_tokens).reshape(num_tokens, -1).T.astype(np.int32)
    log_probs = (
        None
        if one_hot
        else along_drafts(draft, num_tokens, num_tokens).reshape(-1, num_tokens, vocab_size)
    )
    count = np.prod(shape)
    drafts = Draft(
        tokens_BK=np.broadcast_to(drafts_DK, shape + (num_tokens,)).reshape(count, num_tokens),
        num_drafted_B=np.full(count, num_tokens, np.int32),
        log_probs_BRV=log_probs,
    )
    found = in_chunks(_meters, rule, drafts, rows.reshape(count, num_tokens + 1, vocab_size))
    return tuple(x.reshape(shape + (num_tokens + 1, num_tokens + 1)) for x in found)


@functools.partial(jax.jit, static_argnums=0, compiler_options=COMPILE_FAST)
def _meters(rule, draft, target):
    batch, outcomes, _ = target.shape

    def meter(n):
        found = rule.meter(draft, target, jnp.full(batch, n))
        return found.variation, found.extra

    return jax.vmap(meter, out_axes=1)(jnp.arange(outcomes, dtype=jnp.int32))


def joint_and_price(rule, target, draft, *, num_tokens, length):
    """Returns the joint distribution of ``length`` tokens, ``[S, V**length]``, and the mean of
    their metered sums, ``[S]``.
    """
    joint, chained = chain_rounds(rule, target, draft, length=length, num_tokens=num_tokens)
    price = 0.0
    for m, (reached, rounds) in enumerate(chained):
        cost, _ = meters(rule, target[m:], draft[m:], num_tokens=num_tokens)
        happens_SXDN = rounds.joint_SXDNV.sum(-1)
        spent_SXDN = np.where(happens_SXDN > 0, cost[..., : length - m].sum(-1), 0)
        price = price + np.einsum("sx,sxdn,sxdn->s", reached, happens_SXDN, spent_SXDN)
    return joint, price


def text_variation(joint, target, length):
    """Returns the total variation of texts from the target's, ``[S]``."""
    return variation(joint, autoregressive(target, length))
