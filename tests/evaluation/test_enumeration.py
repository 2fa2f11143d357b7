"""The enumeration of foreign code: exact rules to rounding, mistakes at their known distances, and what it refuses."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch.studies.conformance import ours
from launch.studies.conformance.cases import CASES, P, Q
from specsamp.evaluation.enumeration import Outside, Raised, distribution, interpret, joint, law_distance
from support import mutants
from support.extras import needs

TARGET, DRAFT = np.exp(Q), np.exp(P)
ONE = CASES[0]
ONE_Q, ONE_P = np.exp(ONE.target[0]), np.exp(ONE.draft[0])


def accepts(q, p):
    return min(1, q / p)


def residual(q, p):
    return np.maximum(q - p, 0) / np.maximum(q - p, 0).sum()


def emit(last, target=TARGET, draft=DRAFT, K=2, accept=accepts, correct=residual):
    """Speculative sampling in NumPy, as code of others is written."""
    drafted = []
    for _ in range(K):
        drafted.append(np.random.choice(3, p=draft[[last, *drafted][-1]]))
    emitted = []
    for token in drafted:
        q, p = target[[last, *emitted][-1]], draft[[last, *emitted][-1]]
        if random.random() >= accept(q[token], p[token]):
            return [*emitted, np.random.choice(3, p=correct(q, p))]
        emitted.append(token)
    return [*emitted, np.random.choice(3, p=target[emitted[-1]])]


def plain(last, target=TARGET):
    return [np.random.choice(3, p=target[last])]


@pytest.mark.parametrize("K", [1, 2, 3])
def test_an_exact_rule_has_the_joint_distribution_of_its_target(K):
    law = joint(lambda last: emit(last, K=K), 3)
    assert len(law) == 27 and sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert law_distance(law, joint(plain, 3)) < 1e-15


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        ({"accept": lambda q, p: 1.0}, ONE_P),
        ({"accept": lambda q, p: 0.0}, residual(ONE_Q, ONE_P)),
        ({"correct": lambda q, p: q}, np.minimum(ONE_P, ONE_Q) + (1 - np.minimum(ONE_P, ONE_Q).sum()) * ONE_Q),
    ],
)
def test_mistakes_are_at_their_known_distance(mistake, expected):
    def biased(last):
        return emit(last, np.tile(ONE_Q, (3, 1)), np.tile(ONE_P, (3, 1)), K=1, **mistake)[:1]

    variation = np.abs(expected - ONE_Q).sum() / 2
    assert variation > 0.1
    law = dict(enumerate(ONE_Q))
    found = {text[0]: share for text, share in joint(biased, 1).items()}
    assert law_distance(found, law) == pytest.approx(variation, abs=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (None, ONE_Q),
        (mutants.AcceptAlways(), ONE_P),
        (mutants.RejectAlways(), residual(ONE_Q, ONE_P)),
    ],
)
def test_our_rules_and_their_mutants_run_as_they_are_compiled(rule, expected, monkeypatch):
    if rule is not None:
        monkeypatch.setattr(ours, "make_rule", lambda word: rule)
    found = joint(ours.rounds(None, ONE, rule="token")[0], 1)
    assert [found.get((token,), 0) for token in range(3)] == pytest.approx(expected, abs=1e-15)


def test_control_flow_of_jax_forks_and_a_key_keeps_its_numbers():
    @interpret
    def tosses(key):
        def again(state):
            count, key = state
            return (count < 3) & (jax.random.uniform(jax.random.fold_in(key, count)) < 0.25)

        count = jax.lax.while_loop(again, lambda state: (state[0] + 1, state[1]), (0, key))[0]
        first = jax.random.uniform(jax.random.fold_in(key, 0)) < 0.25
        return jax.lax.cond(first, lambda: 10 * count, lambda: count)

    law = distribution(lambda: int(tosses(jax.random.key(0))))
    assert law == pytest.approx({0: 0.75, 10: 0.25 * 0.75, 20: 0.25**2 * 0.75, 30: 0.25**3})


def test_races_are_categorical_choices():
    weights = jnp.array([0.5, 0.3, 0.2])
    gumbel = interpret(lambda key: jax.random.categorical(key, jnp.log(weights)))
    exponential = interpret(lambda key: jnp.argmax(weights / (jax.random.exponential(key, (3,)) + 1e-9)))
    for race in (gumbel, exponential):
        law = distribution(lambda race=race: int(race(jax.random.key(0))))
        assert [law[token] for token in range(3)] == pytest.approx([0.5, 0.3, 0.2], abs=1e-7)


def test_the_scale_of_a_race_does_not_matter():
    weights = 1e-16 * np.array([0.7, 0.3])
    race = interpret(lambda key: jnp.argmax(weights / (jax.random.exponential(key, (2,)) + 1e-9)))
    assert distribution(lambda: int(race(jax.random.key(0)))) == pytest.approx({0: 0.7, 1: 0.3}, abs=1e-6)


def test_a_path_that_raises_emits_the_error():
    law = distribution(lambda: 1 // int(random.random() < 0.9))
    assert law == {
        1: pytest.approx(0.9),
        Raised("ZeroDivisionError: integer division or modulo by zero"): pytest.approx(0.1),
    }


KEPT, CAPTURED = [0.1], np.random.random


def drifts():
    KEPT[0] += 0.1
    return bool(random.random() < KEPT[0])


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: np.random.normal(), "numpy.random.normal is not replaced"),
        (lambda: np.random.default_rng(0).normal(), "Generator.normal is not replaced"),
        (lambda: random.random() < random.random(), "less of two random numbers"),
        (lambda: [np.random.choice(2) for _ in range(10_000)], "did not end after 2000 draws"),
        (lambda: tuple(np.random.choice(2) for _ in range(10)), "more than 100 paths"),
        (drifts, "another distribution"),
        (lambda: CAPTURED() < 0, "numpy.random drew by a function that is not replaced"),
        (
            lambda: float(interpret(lambda key: jnp.sin(jax.random.uniform(key)))(jax.random.key(0))),
            "JAX's sin of random",
        ),
    ],
)
def test_what_cannot_be_enumerated_is_named(run, message):
    with pytest.raises(Outside, match=message):
        distribution(run, max_paths=100)


def test_a_round_that_emits_nothing_is_refused():
    with pytest.raises(Outside, match="emits no token"):
        joint(lambda last: [], 1)


@needs("torch")
def test_draws_of_torch():
    import torch

    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    runs = [
        lambda: torch.multinomial(weights, 1).item(),
        lambda: (weights / torch.empty_like(weights).exponential_()).argmax(-1, keepdim=True).item(),
        lambda: (weights.log() - torch.log(-torch.log(torch.rand(3) + 1e-20) + 1e-20)).argmax(-1).item(),
        lambda: int((torch.cumsum(weights, 0) < torch.rand(1)).sum()),
        lambda: (torch.rand_like(weights).log() / weights).topk(2)[1][0].item(),
    ]
    for run in runs:
        law = distribution(run)
        assert [law[token] for token in range(3)] == pytest.approx([0.5, 0.3, 0.2], abs=1e-15)
    with pytest.raises(Outside, match=r"torch\.randn is not replaced"):
        distribution(lambda: torch.randn(1))
