"""Losses that training minimises. All functions but `text_loss` take log-probabilities and return
one number per position.

``target`` is the distribution to imitate, ``draft`` the distribution being trained. With P for
the target and Q for the draft:

    forward KL        sum P log(P/Q)    cross-entropy on samples of the target estimates it,
                                        up to a constant
    reverse KL        sum Q log(Q/P)
    total variation   1/2 sum |P - Q|   exactly 1 - acceptance of the token rule (Chen et al., arXiv
                                        2302.01318, theorem 1; DistillSpec, arXiv 2310.08461)
    lk hybrid         w KL(P || Q) + (1 - w) TV, with w = exp(-3 acceptance) without gradient, as in
                      the package speculators: KL learns fast at first, TV is the final aim
"""

import jax
import jax.numpy as jnp

Array = jax.Array


def cross_entropy(log_probs_BTV: Array, labels_BT: Array) -> Array:
    """Computes ``-log q(label)`` at every position, ``[B, T]`` nats."""
    return -jnp.take_along_axis(log_probs_BTV, labels_BT[..., None], axis=-1)[..., 0]


def text_loss(logits_BTV: Array, labels_BT: Array) -> Array:
    """Returns the mean cross-entropy of a text in nats, from logits of its tokens; a scalar."""
    return cross_entropy(jax.nn.log_softmax(logits_BTV), labels_BT).mean()


def forward_kl(target_BTV: Array, draft_BTV: Array) -> Array:
    """Computes KL(P || Q) at every position, ``[B, T]`` nats."""
    return _expectation(target_BTV, target_BTV - draft_BTV)


def reverse_kl(target_BTV: Array, draft_BTV: Array) -> Array:
    """Computes KL(Q || P) at every position, ``[B, T]`` nats; infinite where Q has mass that P
    excludes.
    """
    return _expectation(draft_BTV, draft_BTV - target_BTV)


def total_variation(target_BTV: Array, draft_BTV: Array) -> Array:
    """Computes the total variation distance at every position, ``[B, T]`` in [0, 1]."""
    return 0.5 * jnp.abs(jnp.exp(target_BTV) - jnp.exp(draft_BTV)).sum(axis=-1)


def overlap(target_BTV: Array, draft_BTV: Array) -> Array:
    """Computes ``sum min(P, Q)``, the probability that the token rule accepts a draft token, ``[B,
    T]``.
    """
    return jnp.exp(jnp.minimum(target_BTV, draft_BTV)).sum(axis=-1)


def greedy_agreement(target_BTV: Array, draft_BTV: Array) -> Array:
    """Returns 1.0 where both distributions have the same mode, else 0.0, ``[B, T]``."""
    return (target_BTV.argmax(axis=-1) == draft_BTV.argmax(axis=-1)).astype(jnp.float32)


def lk_hybrid(target_BTV: Array, draft_BTV: Array) -> Array:
    """Computes ``w KL(P || Q) + (1 - w) TV`` ``[B, T]``, with a separate weight ``w`` for each
    position.
    """
    weight_BT = jnp.exp(-3 * jax.lax.stop_gradient(overlap(target_BTV, draft_BTV)))
    return weight_BT * forward_kl(target_BTV, draft_BTV) + (1 - weight_BT) * total_variation(
        target_BTV, draft_BTV
    )


def dspark(target_BTV: Array, draft_BTV: Array) -> Array:
    """Computes ``.1 KL + .9 sum |P - Q|`` ``[B, T]``, the loss of DSpark up to the constant between
    KL and cross-entropy.
    """
    return 0.1 * forward_kl(target_BTV, draft_BTV) + 1.8 * total_variation(target_BTV, draft_BTV)


DIVERGENCES = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
    "lk_hybrid": lk_hybrid,
    "dspark": dspark,
}


def _expectation(log_probs_BTV: Array, values_BTV: Array) -> Array:
    """Averages values over the vocabulary under the given distribution, ``[B, T]``."""
    # A token without mass counts nothing, also where its value is inf - inf.
    probs = jnp.exp(log_probs_BTV)
    return jnp.where(probs > 0, probs * jnp.where(probs > 0, values_BTV, 0.0), 0.0).sum(axis=-1)
