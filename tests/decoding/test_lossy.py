"""Lossy rules in the loop: texts have the enumerated distribution; completions report the cost."""

import functools

import jax
import numpy as np
import pytest

from specsamp import (
    EARS,
    BlockRule,
    Bounded,
    JointThreshold,
    Lenience,
    ModelDrafter,
    NgramDrafter,
    RowStats,
    chain,
    generate,
    generate_many,
    stream,
    temperature,
)
from specsamp.sampling.synthetic import SyntheticAcceptance
from support.extras import slow_but
from support.fakes import (
    FALSE_ALARM,
    TableLM,
    counting_pair,
    decode,
    p_value,
    prefix_tables,
    table_loop,
    table_pair,
)
from support.loop_distributions import FULL, NEAR, NUCLEUS, PROMPTS, TARGET, V
from support.price import joint_and_price, variation
from support.refusals import refusal

K, LENGTH = 2, 3
SAMPLES = 50_000  # the rules themselves are enumerated in sampling/test_lossy.py
CASES = {
    "bounded lenience": (Bounded(Lenience(0.1), 0.03), NEAR, NUCLEUS),
    "joint threshold": (JointThreshold(0.5), NEAR, FULL),
}
every_case = pytest.mark.parametrize("case", slow_but(CASES, "bounded lenience"))


@functools.cache
def run(case):
    """Returns first tokens and meters, ``[prompt, sample, LENGTH]``, and the run of many
    samples.
    """
    rule, draft, sampling = CASES[case]
    budgets = [LENGTH + i for i in range(len(PROMPTS))]
    found = decode(
        table_loop(rule, ModelDrafter(TableLM(V), K)),
        TARGET,
        draft,
        PROMPTS,
        budgets,
        sampling,
        samples=SAMPLES,
    )
    at = found.prompt_lengths[:, None] + np.arange(LENGTH)[None, :]
    cost, extra = (
        np.take_along_axis(x, at, axis=1)
        for x in (found.state.meter.variation, found.state.meter.extra)
    )
    shape = (len(PROMPTS), SAMPLES, LENGTH)
    return found.emitted(LENGTH).reshape(shape), cost.reshape(shape), extra.reshape(shape), found


@functools.cache
def enumerated(case):
    """Returns for each prompt the joint distribution, the mean sum of its meter, and the joint
    distribution of the target.
    """
    rule, draft, sampling = CASES[case]
    told = []
    for prompt in PROMPTS:
        target, draft_tables = (
            prefix_tables(one, sampling, prompt, LENGTH + K) for one in (TARGET, draft)
        )
        joint, price = joint_and_price(rule, target, draft_tables, num_tokens=K, length=LENGTH)
        own, _ = joint_and_price(
            BoundedToNothing, target, draft_tables, num_tokens=K, length=LENGTH
        )
        shape = (V,) * LENGTH
        told.append(
            (joint[0].reshape(shape) / joint.sum(), price[0], own[0].reshape(shape) / own.sum())
        )
    return told


BoundedToNothing = Bounded(EARS(), 0.0)


@every_case
def test_loop_distribution_equals_enumeration(case):
    emitted = run(case)[0]
    joints, _, own = zip(*enumerated(case))
    assert p_value(list(zip(emitted, joints)), powered=False) > FALSE_ALARM
    assert p_value(list(zip(emitted, own)), powered=False) < FALSE_ALARM * 1e-6, (
        "the control: it is not the target's distribution"
    )


@every_case
def test_meter_bounds_the_cost_of_texts(case):
    """The measured bias equals the metered bias for first tokens, and at most equals it for
    texts.
    """
    emitted, cost, _, _ = run(case)
    for prompt, (_, price, own) in enumerate(enumerated(case)):
        sums = cost[prompt].sum(-1)
        assert abs(sums.mean() - price) < 5 * sums.std() / np.sqrt(SAMPLES) + 1e-5
        first = np.bincount(emitted[prompt, :, 0], minlength=V) / SAMPLES
        ratio = variation(first, own.sum((1, 2))) / cost[prompt, :, 0].mean()
        assert 0.9 < ratio < 1.1


@every_case
def test_statistics_agree_with_the_meter(case):
    """Accepted tokens minus the metered extra are the token rule's; meters behind a text are 0."""
    _, _, _, found = run(case)
    state, stats = found.state, jax.device_get(found.state.stats)
    verified = stats.reached_BK.sum()
    accepted = (stats.accepted_BT.sum(0) * np.arange(K + 1)).sum()
    is_beyond = np.arange(state.tokens_BS.shape[1])[None, :] >= np.asarray(state.lengths_B)[:, None]
    for values in (state.meter.variation, state.meter.extra):
        assert np.all(np.asarray(values)[is_beyond] == 0)
    token_rule = (accepted - np.asarray(state.meter.extra, np.float64).sum()) / verified
    assert 0.3 < token_rule < accepted / verified


# Completions.

NEVER = "\0\0\0"  # a stop text, so that all calls share a program
OPTIONS = {
    "sampling": chain(temperature(8.0)),
    "draft_sampling": chain(temperature(4.0)),
    "rule": Lenience(0.5),
    "seed": 3,
}


@functools.cache
def whole():
    return generate(counting_pair(), ["a"], 24, stop=[NEVER], **OPTIONS)[0]


def test_completions_have_the_price_of_lossy_rules():
    stats = whole().stats
    assert not whole().exact
    assert 0 < stats.variation < stats.emitted
    assert stats.extra_accepted == pytest.approx(stats.variation, abs=1e-5)
    assert stats.variation_per_token == stats.variation / len(whole().tokens)
    assert (stats + stats).variation == 2 * stats.variation
    assert RowStats.from_json(vars(stats)) == stats


def test_text_after_a_stop_is_not_metered():
    """A text has the same meter whether a budget or a stop string ends it."""
    (cut,) = generate(counting_pair(), ["a"], 24, stop=[whole().text[4:7]], **OPTIONS)
    count = len(cut.tokens)
    assert cut.finish == "stop" and whole().tokens[:count] == cut.tokens and cut.dropped
    (short,) = generate(counting_pair(), ["a"], count, stop=[NEVER], **OPTIONS)
    assert short.tokens == cut.tokens
    assert cut.stats.variation == pytest.approx(short.stats.variation, abs=1e-6)
    assert cut.stats.extra_accepted == pytest.approx(short.stats.extra_accepted, abs=1e-6)
    assert 0 < cut.stats.variation < whole().stats.variation


def test_refilled_row_meters_its_own_text():
    prompts = ["a", "xyz"]
    first, second = generate_many(
        counting_pair(), prompts, [24, 5], rows=1, stop=[NEVER], **OPTIONS
    )
    assert first.tokens == whole().tokens
    assert first.stats.variation == pytest.approx(whole().stats.variation, abs=1e-5)
    assert 0 < second.stats.variation < first.stats.variation


class LossyDrafter(NgramDrafter):
    exact = False


@pytest.mark.parametrize("call", [generate, lambda *a, **b: next(stream(*a, **b)), generate_many])
def test_exactness_can_be_demanded(call):
    call = functools.partial(call, table_pair(), [[1]], 4, require_exact=True)
    with refusal(r"EARS\(beta=0.3\) is lossy"):
        call(rule=EARS(0.3))
    with refusal("exactness is required, but LossyDrafter"):
        call(drafter=LossyDrafter(2))


def test_exact_rules_have_no_meter():
    (one,) = generate(table_pair(), [[1]], 4, require_exact=True, rule=BlockRule())
    assert one.exact and one.stats.variation is None and np.isnan(one.stats.variation_per_token)
    assert (one.stats + one.stats).variation is None
    assert not SyntheticAcceptance(EARS(), 0.5).metered, "made-up texts follow no rule"
