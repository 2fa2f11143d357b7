"""Objectives against float64, at distributions that exclude tokens; each check also catches a broken variant."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp.training import objective
from specsamp.training.objective import DIVERGENCES

B, T, V = 2, 5, 7
CLOSE = 1e-5


def exact_log_probs(logits):
    with np.errstate(divide="ignore"):
        probs = np.exp(np.asarray(logits, np.float64))
        return np.log(probs / probs.sum(-1, keepdims=True))


@pytest.fixture(scope="module")
def logits():
    """Of a target and a draft; both exclude tokens, the draft only such as the target does too."""
    rng = np.random.default_rng(0)
    target, draft = rng.normal(size=(2, B, T, V)) * 2
    target[..., :2] = -np.inf
    draft[..., 0] = -np.inf
    draft[0, 0] = target[0, 0]  # equal distributions
    return target, draft


def forward_kl(target, draft):
    return sum(np.exp(target[i]) * (target[i] - draft[i]) for i in range(V) if target[i] > -np.inf)


def reverse_kl(target, draft):
    return forward_kl(draft, target)


def total_variation(target, draft):
    return 0.5 * np.abs(np.exp(target) - np.exp(draft)).sum()


def lk_hybrid(target, draft):
    weight = np.exp(-3 * (1 - total_variation(target, draft)))
    return weight * forward_kl(target, draft) + (1 - weight) * total_variation(target, draft)


REFERENCES = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "total_variation": total_variation}
DIFFERENTIATED = tuple(REFERENCES)  # all of whose gradient is taken
REFERENCES["lk_hybrid"] = lk_hybrid


def of_rows(reference, target, draft):
    return np.array(
        [[reference(exact_log_probs(target[b, t]), exact_log_probs(draft[b, t])) for t in range(T)] for b in range(B)]
    )


def ours(name, target, draft):
    target, draft = (jax.nn.log_softmax(jnp.asarray(x, jnp.float32)) for x in (target, draft))
    return np.asarray(DIVERGENCES[name](target, draft))


def check(name, function, target, draft):
    """Raises where ``function`` is not the divergence."""
    np.testing.assert_allclose(function(name, target, draft), of_rows(REFERENCES[name], target, draft), atol=CLOSE)


def supported(name, target, draft):
    """The reverse divergence is infinite where the draft has mass that the target excludes: give it the other order."""
    return (draft, target) if name == "reverse_kl" else (target, draft)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences(logits, name):
    target, draft = supported(name, *logits)
    check(name, ours, target, draft)
    assert abs(ours(name, target, draft)[0, 0]) < CLOSE  # of equal distributions

    def swapped(name, target, draft):
        return ours(name, draft, target)

    def halved(name, target, draft):
        return 0.5 * ours(name, target, draft)

    for broken in [halved] if name == "total_variation" else [halved, swapped]:
        with pytest.raises(AssertionError):
            check(name, broken, target, draft)


def gradient(function, logits):
    def scalar(x):
        return function(jax.nn.log_softmax(x)).sum()

    return np.asarray(jax.grad(scalar)(jnp.asarray(logits, jnp.float32)))


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_are_finite_and_those_of_finite_differences(logits, name):
    target, draft = supported(name, *logits)
    target_BTV = jnp.asarray(exact_log_probs(target), jnp.float32)
    of_ours = gradient(lambda q: DIVERGENCES[name](target_BTV, q), draft)
    assert np.isfinite(of_ours).all()
    step = 1e-5
    for index in [(0, 2, 3), (1, 4, 6)]:
        ends = []
        for sign in (1, -1):
            moved = draft.copy()
            moved[index] += sign * step
            ends.append(of_rows(REFERENCES[name], target, moved).sum())
        np.testing.assert_allclose(of_ours[index], (ends[0] - ends[1]) / (2 * step), atol=1e-4)
        assert abs(of_ours[index]) > 1e-3  # zero would be finite too


def test_a_careless_divergence_has_no_gradient(logits):
    """The control: without its masks the reverse divergence of the same distributions has a gradient that is not a number."""
    target, draft = supported("reverse_kl", *logits)
    target_BTV = jnp.asarray(exact_log_probs(target), jnp.float32)
    careless = gradient(lambda q: (jnp.exp(q) * (q - target_BTV)).sum(-1), draft)
    assert np.isnan(careless).any()


def test_greedy_agreement(logits):
    target, draft = (jnp.asarray(exact_log_probs(x), jnp.float32) for x in logits)
    agreement = np.asarray(objective.greedy_agreement(target, draft))
    np.testing.assert_array_equal(agreement, logits[0].argmax(-1) == logits[1].argmax(-1))
    assert 0 < agreement.mean() < 1


def test_the_hybrid_leans_to_total_variation_as_acceptance_grows():
    """Acceptance 0.7 gives the divergence a weight of exp(-2.1), which has no gradient."""
    target, draft = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]])), jnp.log(jnp.array([[[0.2, 0.3, 0.5]]]))
    np.testing.assert_allclose(objective.lk_hybrid(target, draft), [[0.296925]], atol=1e-6)

    def gradient(function):
        return jax.grad(lambda logits: function(target, jax.nn.log_softmax(logits)).sum())(draft)

    weight = np.exp(-2.1)
    expected = weight * gradient(objective.forward_kl) + (1 - weight) * gradient(objective.total_variation)
    np.testing.assert_allclose(gradient(objective.lk_hybrid), expected, atol=1e-6)
