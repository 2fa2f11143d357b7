"""Lossy rules through the loop: they write what is enumerated, and meter what that costs."""

import functools

import jax
import numpy as np
import pytest

from specsamp import EARS, Bounded, JointThreshold, Lenience
from specsamp.decoding.drafters import ModelDrafter
from support.fakes import FALSE_ALARM, TableLM, decode, p_value, prefix_tables, table_loop
from support.loop_distributions import FAR, FULL, NEAR, NUCLEUS, PROMPTS, TARGET, V
from support.price import joint_and_price, variation

K, LENGTH = 2, 3
SAMPLES = 50_000  # the rules themselves are enumerated in sampling/test_lossy.py
CASES = {
    "EARS": (EARS(1.0), FAR, FULL),
    "bounded lenience": (Bounded(Lenience(0.1), 0.03), NEAR, NUCLEUS),
    "joint threshold": (JointThreshold(0.5), NEAR, FULL),
}
every_case = pytest.mark.parametrize("case", CASES)


@functools.cache
def run(case):
    """Many texts of a rule: their first tokens and meters, ``[prompt, sample, LENGTH]``, and the loop's statistics."""
    rule, draft, sampling = CASES[case]
    budgets = [LENGTH + i for i in range(len(PROMPTS))]
    found = decode(
        table_loop(rule, ModelDrafter(TableLM(V), K)), TARGET, draft, PROMPTS, budgets, sampling, samples=SAMPLES
    )
    at = found.prompt_lengths[:, None] + np.arange(LENGTH)[None, :]
    cost, extra = (
        np.take_along_axis(np.asarray(x), at, axis=1) for x in (found.state.meter.variation, found.state.meter.extra)
    )
    shape = (len(PROMPTS), SAMPLES, LENGTH)
    return found.emitted(LENGTH).reshape(shape), cost.reshape(shape), extra.reshape(shape), found


@functools.cache
def enumerated(case):
    """Returns for each prompt the joint distribution, the mean sum of meters, and the target's own joint distribution."""
    rule, draft, sampling = CASES[case]
    told = []
    for prompt in PROMPTS:
        target, draft_tables = (prefix_tables(one, sampling, prompt, LENGTH + K) for one in (TARGET, draft))
        joint, price = joint_and_price(rule, target, draft_tables, num_tokens=K, length=LENGTH)
        own, _ = joint_and_price(BoundedToNothing, target, draft_tables, num_tokens=K, length=LENGTH)
        shape = (V,) * LENGTH
        told.append((joint[0].reshape(shape) / joint.sum(), price[0], own[0].reshape(shape) / own.sum()))
    return told


BoundedToNothing = Bounded(EARS(), 0.0)


@every_case
def test_the_loop_writes_what_is_enumerated(case):
    emitted = run(case)[0]
    joints, _, own = zip(*enumerated(case))
    assert p_value(list(zip(emitted, joints)), powered=False) > FALSE_ALARM
    assert p_value(list(zip(emitted, own)), powered=False) < FALSE_ALARM * 1e-6, (
        "the control: it is not the target's distribution"
    )


@every_case
def test_the_meter_says_what_texts_cost(case):
    """The bias measured over the bias metered: of first tokens one, but where the meter only bounds; of texts at most one."""
    emitted, cost, _, _ = run(case)
    for prompt, (_, price, own) in enumerate(enumerated(case)):
        sums = cost[prompt].sum(-1)
        assert abs(sums.mean() - price) < 5 * sums.std() / np.sqrt(SAMPLES) + 1e-5
        first = np.bincount(emitted[prompt, :, 0], minlength=V) / SAMPLES
        ratio = variation(first, own.sum((1, 2))) / cost[prompt, :, 0].mean()
        assert (0.0 if case == "joint threshold" else 0.9) < ratio < 1.1
        cells = np.ravel_multi_index(emitted[prompt].T, own.shape)
        texts = np.bincount(cells, minlength=own.size) / SAMPLES
        assert variation(texts, own.ravel()) / sums.mean() < 1.1


def test_a_budget_bounds_every_token():
    cost = run("bounded lenience")[1]
    assert cost.max() < 0.03 * (1 + 1e-5) and (cost > 0.0299).any()


@every_case
def test_statistics_and_meter_tell_one_story(case):
    """Acceptance is what the token rule would have reached, and what was bought; meters are 0 beyond the text."""
    _, _, _, found = run(case)
    state, stats = found.state, jax.device_get(found.state.stats)
    verified, accepted = stats.reached_BK.sum(), (stats.accepted_BT.sum(0) * np.arange(K + 1)).sum()
    is_beyond = np.arange(state.tokens_BS.shape[1])[None, :] >= np.asarray(state.lengths_B)[:, None]
    for values in (state.meter.variation, state.meter.extra):
        assert np.all(np.asarray(values)[is_beyond] == 0)
    token_rule = (accepted - np.asarray(state.meter.extra, np.float64).sum()) / verified
    assert 0.3 < token_rule < accepted / verified


def test_the_token_rules_acceptance_is_told():
    """Compares first tokens, where both rules verify the same: what is accepted, less what was bought, is ``sum min(p, q)``."""
    emitted, _, extra, found = run("EARS")
    from_draft = np.take_along_axis(np.asarray(found.state.from_draft_BS), found.prompt_lengths[:, None], axis=1)
    for prompt in range(len(PROMPTS)):
        q, p = (np.exp(prefix_tables(one, FULL, PROMPTS[prompt], 1)[0][0, 0]) for one in (TARGET, FAR))
        accepted = from_draft.reshape(len(PROMPTS), SAMPLES)[prompt].mean()
        assert abs(accepted - extra[prompt, :, 0].mean() - np.minimum(p, q).sum()) < 5 * 0.5 / np.sqrt(SAMPLES)
