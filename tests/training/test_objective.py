"""Objectives against float64, at distributions that exclude tokens; each check also catches a
broken variant.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from specsamp.training import objective
from specsamp.training.objective import DIVERGENCES

CLOSE = 1e-5


@pytest.fixture(scope="module")
def logits():
    """Returns logits of a target and a draft; both exclude tokens, the draft fewer of the same."""
    target, draft = np.random.default_rng(0).normal(size=(2, 2, 5, 7)) * 2
    target[..., :2] = -np.inf
    draft[..., 0] = -np.inf
    draft[0, 0] = target[0, 0]  # equal distributions
    return target, draft


def probs(logits):
    weights = np.exp(logits)
    return weights / weights.sum(-1, keepdims=True)


def forward_kl(p, q):
    return np.sum(
        np.where(p > 0, p * np.log(np.where(p > 0, p, 1) / np.where(p > 0, q, 1)), 0), axis=-1
    )


def total_variation(p, q):
    return 0.5 * np.abs(p - q).sum(-1)


def lk_hybrid(p, q):
    weight = np.exp(-3 * (1 - total_variation(p, q)))
    return weight * forward_kl(p, q) + (1 - weight) * total_variation(p, q)


DIFFERENTIATED = {
    "forward_kl": forward_kl,
    "reverse_kl": lambda p, q: forward_kl(q, p),
    "total_variation": total_variation,
}
DIFFERENTIATED["dspark"] = lambda p, q: 0.1 * forward_kl(p, q) + 0.9 * np.abs(p - q).sum(-1)
REFERENCES = DIFFERENTIATED | {"lk_hybrid": lk_hybrid}  # a part of the hybrid has no gradient


def log_probs(logits):
    return jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))


def supported(name, target, draft):
    """Returns both, swapped for the reverse divergence, which would otherwise be infinite."""
    return (draft, target) if name == "reverse_kl" else (target, draft)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_equal_numpy(logits, name):
    target, draft = supported(name, *logits)
    expected = REFERENCES[name](probs(target), probs(draft))
    found = np.asarray(DIVERGENCES[name](log_probs(target), log_probs(draft)))
    assert_allclose(found, expected, atol=CLOSE)
    assert abs(found[0, 0]) < CLOSE  # of equal distributions
    broken = [0.5 * found]
    if name != "total_variation":
        broken.append(DIVERGENCES[name](log_probs(draft), log_probs(target)))
    assert all(np.abs(wrong - expected).max() > 100 * CLOSE for wrong in broken)


def gradient(function, logits):
    return np.asarray(
        jax.grad(lambda x: function(jax.nn.log_softmax(x)).sum())(jnp.asarray(logits, jnp.float32))
    )


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_are_finite_and_those_of_finite_differences(logits, name):
    target, draft = supported(name, *logits)
    found = gradient(lambda q: DIVERGENCES[name](log_probs(target), q), draft)
    assert np.isfinite(found).all()
    for index in [(0, 2, 3), (1, 4, 6)]:
        step = np.zeros_like(draft)
        step[index] = 1e-5
        above, below = (
            REFERENCES[name](probs(target), probs(draft + sign * step)).sum() for sign in (1, -1)
        )
        assert_allclose(found[index], (above - below) / 2e-5, atol=1e-4)
        assert abs(found[index]) > 1e-3  # zero would be finite too


def test_a_careless_divergence_has_no_gradient(logits):
    """The control: without masks, the reverse divergence has a gradient of NaN."""
    target, draft = supported("reverse_kl", *logits)
    careless = gradient(lambda q: (jnp.exp(q) * (q - log_probs(target))).sum(-1), draft)
    assert np.isnan(careless).any()


def test_greedy_agreement_counts_equal_choices(logits):
    agreement = np.asarray(objective.greedy_agreement(*map(log_probs, logits)))
    assert_array_equal(agreement, logits[0].argmax(-1) == logits[1].argmax(-1))
    assert 0 < agreement.mean() < 1


def test_hybrid_leans_to_variation_as_acceptance_grows():
    """Acceptance 0.7 gives the divergence a weight of exp(-2.1), which has no gradient."""
    target = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]]))
    draft = jnp.log(jnp.array([[[0.2, 0.3, 0.5]]]))
    assert_allclose(objective.lk_hybrid(target, draft), [[0.296925]], atol=1e-6)
    of = {name: gradient(lambda q: DIVERGENCES[name](target, q), draft) for name in DIVERGENCES}
    expected = np.exp(-2.1) * of["forward_kl"] + (1 - np.exp(-2.1)) * of["total_variation"]
    assert_allclose(of["lk_hybrid"], expected, atol=1e-6)
