"""The exact distribution of speculative sampling by enumeration, independent of the loop.

A rule splits into an acceptance distribution, a map from yes/no answers to ``n``, and a residual
distribution. Over a small vocabulary, the sums are finite: over all ``V^K`` drafts, weighted with
the distribution they are drawn from, all ``2^K`` patterns of answers, weighted with the acceptance
distribution, and all appended tokens. That is one round from one prefix, and rounds are chained
until ``length`` tokens are out. Nothing is drawn, so that an exact rule reproduces the target's own
joint distribution to rounding, here in float64.

(The coupled rule does not split: its answers are the agreement of two choices. It emits the
target's own choices, which decoding/test_pathwise.py compares token by token.)

Distributions are tables that see the *whole* prefix. ``distributions[n]`` is ``[S, V**n, V]``, the
log-probabilities after each prefix of length n, read as a number in base V; S counts independent
scenarios, which share the few jitted calls of one fixed shape in which the rule is evaluated.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specsamp import chain
from specsamp.sampling.rules import Draft, TargetDistributions

CHUNK = 4096  # rows per jitted call
# Small functions: compiling takes longer than running.
COMPILE_FAST = {"xla_backend_optimization_level": 0}


def autoregressive(target, length):
    """Returns the target's own joint distribution of ``length`` tokens, ``[S, V**length]``."""
    joint = np.ones((target[0].shape[0], 1))
    for table in target[:length]:
        joint = (joint[..., None] * np.exp(table)).reshape(joint.shape[0], -1)
    return joint


def joint_distribution(rule, target, draft, **options):
    """Returns the joint distribution of the first tokens that rounds of ``rule`` emit, ``[S,
    V**length]``; see `chain_rounds`.
    """
    return chain_rounds(rule, target, draft, **options)[0]


def chain_rounds(
    rule, target, draft, *, num_tokens, length, num_drafted=None, shown=None, **options
):
    """Chains rounds until ``length`` tokens are out; a round that emits more is cut.

    Args:
      target, draft: tables for every prefix shorter than ``length + num_tokens``.
      num_drafted: one entry for each length of prefix; see `enumerate_round`.

    Returns:
      The joint distribution of the tokens, and for each length of prefix the probability that a
      round starts at each prefix, and the rounds.
    """
    scenarios, _, vocab_size = target[0].shape
    reached = [np.zeros((scenarios, vocab_size**m)) for m in range(length + 1)]
    reached[0][:] = 1
    found = []
    for m in range(length):
        chosen = None if num_drafted is None else num_drafted[m]
        seen = None if shown is None else shown[m:]
        options |= {"num_tokens": num_tokens, "num_drafted": chosen, "shown": seen}
        rounds = enumerate_round(rule, target[m:], draft[m:], **options)
        found.append((reached[m], rounds))
        for n in range(num_tokens + 1):
            distribution = reached[m][..., None] * rounds.emitted(n)
            end = min(m + n + 1, length)
            reached[end] += distribution.reshape(scenarios, vocab_size**end, -1).sum(-1)
    return reached[length], found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """One round from each of X prefixes of one length: D = V**K drafts, N = K + 1 outcomes."""

    drafted_SXD: np.ndarray  # the probability of each draft
    num_accepted_SXDN: np.ndarray  # the distribution of n, given the draft
    last_SXDNV: np.ndarray  # the distribution of the appended token, given the draft and n

    @property
    def joint_SXDNV(self):
        """Returns the distribution of (draft, n, appended token)."""
        drafted = self.drafted_SXD[..., None, None]
        # A rule may be undefined only for drafts that are never drawn.
        return np.where(
            drafted > 0, drafted * self.num_accepted_SXDN[..., None] * self.last_SXDNV, 0
        )

    @property
    def expected_accepted_SX(self):
        return self.joint_SXDNV.sum((2, 4)) @ np.arange(self.num_accepted_SXDN.shape[-1])

    def emitted(self, n):
        """Returns the joint probability of n accepted tokens and n + 1 emitted ones, [S, X,
        V**(n+1)].
        """
        joint = self.joint_SXDNV[:, :, :, n]
        scenarios, prefixes, _, vocab_size = joint.shape
        shape = (scenarios, prefixes, vocab_size**n, -1, vocab_size)
        return joint.reshape(shape).sum(3).reshape(scenarios, prefixes, -1)


def enumerate_round(
    rule,
    target,
    draft,
    *,
    num_tokens,
    num_drafted=None,
    one_hot=False,
    shown=None,
    dtype=np.float64,
):
    """Enumerates one round from every prefix of ``target[0]``, whose length need not be zero.

    Args:
      target, draft: ``target[i]`` conditions on the prefix and i drafted tokens; i up to K, or K -
        1.
      num_drafted: broadcasts to ``[S, X, D]``; K if None. It may depend on the drafted tokens like
        a stopping time: whether it exceeds i, on the first i tokens alone. Later tokens are still
        drafted and passed to the rule, and must have no effect.
      one_hot: ``draft`` holds one-hot distributions; the rule is given no distributions.
      shown: the distributions shown to the rule, if they differ from the distributions of the draws
        (a bug, for negative controls).
      dtype: of the rule's results; sums over its answers are always in float64.
    """
    scenarios, prefixes, vocab_size = target[0].shape
    drafts_DK = np.array(list(itertools.product(range(vocab_size), repeat=num_tokens)), np.int32)
    num_drafts = vocab_size**num_tokens
    shape = (scenarios, prefixes, num_drafts)

    target_rows = along_drafts(target, num_tokens + 1, num_tokens)
    draft_rows = along_drafts(draft, num_tokens, num_tokens).reshape(
        shape + (num_tokens, vocab_size)
    )
    drafted = np.exp(
        np.take_along_axis(draft_rows, drafts_DK[None, None, :, :, None], axis=-1)
    ).prod((-2, -1))
    seen = (
        None
        if one_hot
        else draft_rows
        if shown is None
        else along_drafts(shown, num_tokens, num_tokens)
    )

    def flat(x, rank):  # one row per scenario, prefix and draft
        tail = x.shape[x.ndim - rank :]
        return np.broadcast_to(x, shape + tail).reshape((np.prod(shape),) + tail)

    num_drafted = np.asarray(num_tokens if num_drafted is None else num_drafted, np.int32)
    acceptance, residual = split(
        rule,
        flat(drafts_DK, 1),
        flat(num_drafted, 0),
        None if seen is None else flat(seen, 2),
        flat(target_rows, 2),
        dtype,
    )
    acceptance = acceptance.astype(np.float64)
    residual = residual.astype(np.float64)
    # The rule reads the distribution of n from independent yes/no answers.
    patterns_PK = np.array(list(itertools.product([False, True], repeat=num_tokens)), bool)
    n_P = np.asarray(rule.num_accepted(jnp.asarray(patterns_PK)))
    patterns_RP = np.where(patterns_PK, acceptance[:, None], 1 - acceptance[:, None]).prod(-1)
    num_accepted = patterns_RP @ np.eye(num_tokens + 1)[n_P]
    mass = residual.sum(-1, keepdims=True)
    last = np.where(mass > 0, residual / np.where(mass > 0, mass, 1), np.exp(flat(target_rows, 2)))
    return Rounds(
        drafted_SXD=drafted,
        num_accepted_SXDN=num_accepted.reshape(shape + (num_tokens + 1,)),
        last_SXDNV=last.reshape(shape + (num_tokens + 1, vocab_size)),
    )


def along_drafts(distributions, steps, num_tokens):
    """Returns the distributions after the first 0, 1, .. tokens of each draft of each prefix, ``[S,
    X, D, steps, V]``.
    """
    if not steps:
        return np.zeros(0)
    scenarios, prefixes, vocab_size = distributions[0].shape
    rows = [
        np.repeat(distributions[i], vocab_size ** (num_tokens - i), axis=1) for i in range(steps)
    ]
    return np.stack(rows, axis=2).reshape(scenarios, prefixes, -1, steps, vocab_size)


class Given(TargetDistributions):
    """Target distributions that are already warped and normalised."""

    def __init__(self, target_log_probs, draft):
        super().__init__(logits_BTV=target_log_probs, warp=chain(), draft=draft)

    def all(self):
        return self.logits_BTV


def split(rule, tokens, num_drafted, log_probs, target, dtype=np.float64):
    """Returns ``rule.acceptance``, [R, K], and ``rule.residual`` for n = 0 .. K, [R, K+1, V],
    computed in ``dtype``.
    """
    log_probs = None if log_probs is None else log_probs.astype(dtype)
    draft = Draft(tokens_BK=tokens, num_drafted_B=num_drafted, log_probs_BRV=log_probs)
    acceptance, residual = in_chunks(_split, rule, draft, target.astype(dtype))
    assert acceptance.dtype == residual.dtype == dtype
    return acceptance, residual


def in_chunks(function, rule, draft, target):
    """Returns the arrays of ``function(rule, draft, target)``, in float64 or as given, in chunks of
    one shape.
    """
    rows, pieces = len(target), []
    with jax.enable_x64(True):
        for start in range(0, rows, CHUNK):
            chosen = np.minimum(np.arange(start, start + CHUNK), rows - 1)
            pieces.append(
                jax.device_get(function(rule, *jax.tree.map(lambda x: x[chosen], (draft, target))))
            )
    return tuple(np.concatenate(parts)[:rows] for parts in zip(*pieces))


@functools.partial(jax.jit, static_argnums=0, compiler_options=COMPILE_FAST)
def _split(rule, draft, target):
    batch, outcomes, _ = target.shape

    def residual(n):
        return rule.residual(draft, target, jnp.full(batch, n))

    return rule.acceptance(draft, target), jax.vmap(residual, out_axes=1)(
        jnp.arange(outcomes, dtype=jnp.int32)
    )
