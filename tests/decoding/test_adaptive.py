"""Adaptive draft lengths: completions are exact if no token's value decides on its submission."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import (
    Adaptive,
    Confidence,
    CoupledRule,
    Entropy,
    Method,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    Stop,
    TokenRule,
    generate,
)
from specsamp.decoding.engine import Engine
from specsamp.decoding.request import make_requests
from specsamp.serving.service import Service
from support.fakes import TableLM, counting_pair, decode, near, table_loop, table_pair
from support.loop_distributions import FULL, NEAR, PROMPTS, RESTLESS, TARGET, V
from support.refusals import refused_arguments, refused_calls

# The loop.


@pytest.fixture(scope="module")
def restless():
    """Returns a run of many rounds, with 20 samples of each of 2 prompts."""
    loop = table_loop(CoupledRule(), ModelDrafter(TableLM(V), 2), keep_rounds=True)
    return decode(
        loop, TARGET, NEAR, PROMPTS, 40, FULL, samples=20, adaptive=RESTLESS, padded_length=4
    )


def test_statistics_count_the_lengths(restless):
    stats, K = restless.state.stats, RESTLESS.K
    assert jnp.all(stats.lengths_BT.sum(1) == stats.rounds_B)
    assert jnp.all(stats.lengths_BT @ jnp.arange(K + 1) == stats.drafted_B)
    assert jnp.all(stats.lengths_BT.sum(0) > 0)  # every length occurs


def test_adaptive_coupled_text_equals_plain_decoding(restless):
    plain = decode(
        table_loop(CoupledRule(), NoDrafter()),
        TARGET,
        None,
        PROMPTS,
        40,
        FULL,
        samples=20,
        padded_length=4,
    )
    assert np.array_equal(restless.emitted(40), plain.emitted(40))


def test_a_row_paces_itself_alone(monkeypatch):
    """A row has the same draft lengths and completion alone, in a batch, and under other widths.

    Settings whose defaults depend on the batch size are given.
    """
    adaptive = Adaptive(
        lengths=(0, 1, 2), costs_ms=(1, 1.55, 2.0), usual=2, decay=0.8, pause=2, trust=0.3, margin=0
    )
    loop = table_loop(TokenRule(), ModelDrafter(TableLM(V), 2))

    def rows(prompts, ids):
        asked = dict(prompt_ids=ids, adaptive=adaptive, padded_length=4, slots=64)
        run = decode(loop, TARGET, near(TARGET, 1, 0.9), prompts, 40, FULL, **asked)
        return list(zip(run.emitted(40).tolist(), run.state.stats.lengths_BT.tolist()))

    alone = rows(PROMPTS[:1], [0]) + rows(PROMPTS[1:], [1])
    monkeypatch.setattr(Adaptive, "widths", (0, 2))
    together = rows(PROMPTS, [0, 1])
    assert together[0][1] != together[1][1] and all(together[1][1])
    assert alone == together


# Lengths.


def wanted_after(adaptive, rounds, rows=1):
    """Returns the draft lengths of a row, before the first of these rounds and after each; a round
    is ``(drafted, accepted)`` counts.
    """
    policy = adaptive.for_batch(rows)
    state = policy.begin(jnp.full(rows, 9), False)
    learn = jax.jit(policy.learn)
    wanted = [int(state.draft_lengths_B[0])]
    for counts in rounds:
        counts_2B = jnp.repeat(jnp.asarray(counts, jnp.int32)[:, None], rows, axis=1)
        state = learn(state, jnp.ones(rows, bool), *counts_2B)
        wanted.append(int(state.draft_lengths_B[0]))
    return wanted


def test_the_length_has_the_most_tokens_per_time():
    lengths = (0, 1, 2, 4, 8)
    costs = (10, 13, 17, 24, 45.0)
    decay = 0.9
    adaptive = Adaptive(
        lengths=lengths, costs_ms=costs, acceptance=0.5, trust=4.0, decay=decay, margin=0
    )
    rounds = [(2, 2), (4, 4), (8, 8), (8, 3), (4, 4), (2, 0), (1, 0), (1, 0)]
    accepted = 2.0
    rejected = 2.0
    wanted = wanted_after(adaptive, rounds)
    for count, (drafted, n) in enumerate(rounds, 1):
        accepted, rejected = (
            prior + (x - prior) * decay + new
            for prior, x, new in ((2.0, accepted, n), (2.0, rejected, n < drafted))
        )
        rate = accepted / (accepted + rejected)
        best = max(
            lengths, key=lambda k: sum(rate**i for i in range(k + 1)) / costs[lengths.index(k)]
        )
        assert wanted[count] == best
    assert {1, 2, 4} <= set(wanted)


def test_rows_of_a_batch_share_one_draft_length():
    """A row alone changes its length sooner: a batch's round is as wide as its longest draft."""
    adaptive = Adaptive(lengths=(0, 1, 4), costs_ms=(1, 2.1, 3.0), usual=1, acceptance=0.9)
    accepted, rejected = [(1, 1)] * 12, [(1, 0)] * 30
    assert wanted_after(adaptive, accepted)[-1] == 4
    assert set(wanted_after(adaptive, accepted, rows=2)) == {1}
    alone, of_two = (wanted_after(adaptive, rejected, rows).index(0) for rows in (1, 2))
    assert 0 < alone < of_two
    assert wanted_after(dataclasses.replace(adaptive, margin=10.0), rejected, rows=2)[-1] == 1
    silent = dataclasses.replace(adaptive, usual=0, acceptance=0.0, trust=0.1)
    tries = wanted_after(silent, [(0, 0)] * 40, rows=2)
    assert [at for at, wanted in enumerate(tries) if wanted] == [16]  # a pause of 8 rounds per row


def test_default_length_counts_the_depth_of_trees():
    """Of six nodes of which one can be accepted, a round emits 1.5 tokens, not 1.98."""
    adaptive = Adaptive(lengths=(0, 6), costs_ms=(1, 1.9), acceptance=0.5)
    assert adaptive.for_batch(1).usual == 6
    assert adaptive.for_batch(1, depths=(0, 1)).usual == 0


def test_lengths_suit_the_rows_that_are_decoded_together():
    adaptive = Adaptive(lengths=(2, 8), costs_ms=(1, 1.5), usual=2)
    pair = table_pair()
    method = Method(drafter=NgramDrafter(8), adaptive=adaptive)
    chosen = []
    for prompts, batch in ((5, 2), (1, 8), (1, None)):
        requests = make_requests(pair, method, [[1]] * prompts, 4)
        chosen.append(Engine.create(pair, method, requests, batch=batch).loop.adaptive)
    # The spare row, which only reads prompts, does not count.
    chosen.append(Service(pair, method, rows=1, context=32).batch.runner.engine.loop.adaptive)
    assert [(one.pause, one.longest) for one in chosen] == [(16, 2), (64, 2), (8, 8), (8, 8)]


def test_pauses_double_until_a_draft_pays():
    adaptive = Adaptive(
        lengths=(0, 2), costs_ms=(1, 2.0), acceptance=0.0, trust=0.1, decay=0.5, margin=0, pause=2
    )
    idle, lost, won = (0, 0), (2, 0), (2, 2)
    rounds = [
        *[idle] * 2,
        lost,
        *[idle] * 4,
        lost,
        *[idle] * 8,
        lost,
        *[idle] * 16,
        lost,
        *[idle] * 32,
        lost,
    ] + [*[idle] * 32, won]
    tries = [at for at, wanted in enumerate(wanted_after(adaptive, rounds)) if wanted]
    # A pause grows at most sixteenfold; an accepted draft ends the pauses.
    assert tries == [2, 7, 16, 33, 66, 99, 100]


def test_stops_use_their_documented_quantity():
    log_probs_BV = jnp.log(jnp.asarray([[0.5, 0.5, 0], [0.9, 0.05, 0.05]]))
    entropy_B = [math.log(2), -(0.9 * math.log(0.9) + 0.1 * math.log(0.05))]
    bound_B = [1 - math.sqrt(0.2 * entropy) for entropy in entropy_B]
    for least in (bound_B[0] - 1e-4, bound_B[0] + 1e-4, bound_B[1] + 1e-4):
        assert Entropy(least).goes_on(log_probs_BV, None).tolist() == [
            bound >= least for bound in bound_B
        ]
    assert Confidence(0.3).goes_on(log_probs_BV, jnp.log(jnp.asarray([0.29, 0.31]))).tolist() == [
        False,
        True,
    ]


# Calls.


@dataclasses.dataclass(frozen=True)
class FourAlone(NgramDrafter):
    K: int = dataclasses.field(default=4, init=False)


@dataclasses.dataclass
class Unhashable(Stop):
    """A stop that is not frozen."""

    least: float = 0.3

    def goes_on(self, log_probs_BV, log_prob_B):
        return log_prob_B > self.least


TWO_LENGTHS = Adaptive(lengths=(0, 4), costs_ms=(1, 2))

test_refused_adaptive_lengths = refused_arguments(
    functools.partial(dataclasses.replace, TWO_LENGTHS),
    {
        r"lengths must rise.*got \(\)": dict(lengths=()),
        "never adapts": dict(lengths=(4,), costs_ms=None),
        "costs_ms must be 1 numbers": dict(lengths=(4,), stop=Entropy()),
        r"costs_ms must be 2 numbers.*got \(1,\)": dict(costs_ms=(1,)),
        r"costs_ms must not fall.*got \(2, 1\)": dict(costs_ms=(2, 1)),
        r"costs_ms\[1\] must be a number above 0; got nan": dict(costs_ms=(1, math.nan)),
        "stop must be a Stop": dict(stop=0.3),
        "decay must be a number from 0 to 1; got 2": dict(decay=2),
        "pause must be an integer": dict(pause=0),
        "margin must be a number from 0; got -1": dict(margin=-1),
        "usual must be one of 0, 4; got 2": dict(usual=2),
    },
)

test_refused_adaptive_drafters = refused_calls(
    {
        "Entropy's weight must be a number above 0; got 0.0": lambda: Entropy(0.3, 0.0),
        "draft_length 4 differs from the drafter's K = 2": lambda: generate(
            counting_pair(), ["a"], draft_length=TWO_LENGTHS, drafter=NgramDrafter(2)
        ),
        "FourAlone cannot draft 2 tokens": lambda: generate(
            counting_pair(),
            ["a"],
            draft_length=Adaptive(lengths=(0, 2, 4), costs_ms=(1, 2, 3)),
            drafter=FourAlone(),
        ),
        "the method's adaptive, with its stop, must be hashable": lambda: generate(
            table_pair(), [[1]], 4, draft_length=Adaptive(lengths=(2,), stop=Unhashable())
        ),
    }
)
