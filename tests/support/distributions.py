"""Distributions for the enumeration of rules: all kinds under all warps, random, constant."""

import functools

import jax
import numpy as np
from scipy.special import log_softmax

from specsamp.sampling.warp import chain, log_probs, min_p, temperature, top_k, top_p
from support.enumeration import COMPILE_FAST

warp_and_normalise = jax.jit(log_probs, compiler_options=COMPILE_FAST)

one_warp = {
    "as it is": chain(),
    "greedy": temperature(0.0),
    "cold": temperature(0.5),
    "hot": temperature(1.7),
    "top-k": top_k(2),
    "top-p": top_p(0.6),
    "min-p": min_p(0.3),
    "chain": chain(temperature(0.8), top_k(3), top_p(0.9)),
}
WARPS = {name: (warp, warp) for name, warp in one_warp.items()} | {
    "greedy target": (temperature(0.0), chain()),
    "greedy draft": (chain(), temperature(0.0)),
    "different": (chain(temperature(0.8), top_p(0.8)), chain(temperature(1.5), top_k(2))),
}


def log(probs):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probs, np.float64))


def warped(warp, logits):
    """Returns the warped log-probabilities in float64."""
    with jax.enable_x64(True):
        return np.asarray(warp_and_normalise(warp, logits))


def kinds_of_logits(rng, shape):
    """Returns target and draft logits, by the kind of their difference."""
    target = rng.normal(size=shape) * 1.5
    other = rng.normal(size=shape) * 2
    one_hot = np.where(
        np.arange(shape[-1]) == rng.normal(size=shape).argmax(-1)[:, None], 0, -np.inf
    )

    def most():
        return rng.integers(shape[-1], size=shape[:-1] + (1,))

    def some():
        return np.where(rng.random(shape).argsort(-1) <= most(), 0, -np.inf)  # one token or more

    half = rng.random(shape).argsort(-1) < 2
    return {
        "near": (target, target + 0.3 * other),
        "far": (target, other),
        "equal": (target, target),
        "ties": (np.round(target), np.round(other)),
        "draft lacks tokens": (target, other + some()),
        "target lacks tokens": (target + some(), other),
        "both lack tokens": (target + some(), other + some()),
        "disjoint": (np.where(half, target, -np.inf), np.where(half, -np.inf, other)),
        "one-hot": (target, one_hot),
        "one-hot, target lacks tokens": (target + some(), one_hot),
    }


@functools.cache
def grid(vocab_size):
    """Returns scenario names, target distributions and draft distributions: every kind of pair
    under every warp.
    """
    lengths = [vocab_size**n for n in range({3: 7, 4: 5}[vocab_size])]
    kinds = kinds_of_logits(np.random.default_rng(vocab_size), (sum(lengths), vocab_size))
    targets, drafts = (np.stack(logits) for logits in zip(*kinds.values()))
    distributions = [
        (warped(target_warp, targets), warped(draft_warp, drafts))
        for target_warp, draft_warp in WARPS.values()
    ]
    names = [f"{kind}, {warp}" for warp in WARPS for kind in kinds]
    target, draft = (
        np.split(np.concatenate(side), np.cumsum(lengths)[:-1], axis=1)
        for side in zip(*distributions)
    )
    return names, target, draft


def one_hots(names, *sides):
    keep = [i for i, name in enumerate(names) if name.startswith("one-hot")]
    return [names[i] for i in keep], *(
        [table[keep] for table in distributions] for distributions in sides
    )


def random_distributions(seed, scenarios, vocab_size, depth):
    rng = np.random.default_rng(seed)
    return [
        log_softmax(1.5 * rng.normal(size=(scenarios, vocab_size**n, vocab_size)), -1)
        for n in range(depth)
    ]


def constant(probs, depth):
    """Returns the distribution ``probs`` after every prefix; its rows are scenarios."""
    log_probs_SV = log(np.atleast_2d(probs))
    return [
        np.repeat(log_probs_SV[:, None], log_probs_SV.shape[-1] ** n, axis=1) for n in range(depth)
    ]
