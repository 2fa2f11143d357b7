"""Policies trained on speculative rollouts: log-probabilities, noise, advantages, resumption, and
drafts that follow.
"""

import dataclasses
import functools
import io
import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from rich.console import Console

from specsamp import BlockRule, Pair, TransformerLM, generate, storage
from specsamp.decoding.drafters import EarlyExitDrafter, NgramDrafter
from specsamp.decoding.method import Method
from specsamp.mesh.layout import make_mesh
from specsamp.mesh.sharded import shard
from specsamp.models.config import tiny
from specsamp.models.eagle import Eagle3Config
from specsamp.sampling.lossy import Lenience
from specsamp.sampling.warp import chain, log_probs, temperature, top_k
from specsamp.training.feature_heads import TrainHead
from specsamp.training.rollouts import (
    PolicyGradient,
    RolloutConfig,
    Rollouts,
    Texts,
    advantages,
    learn,
)
from specsamp.training.trainer import Intervals, TrainConfig
from specsamp.training.training_task import TrainModel
from support.fakes import COMPILED
from support.refusals import refusal, refused_calls
from support.weights import drawn_params

V, BUDGET = 16, 6
PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]


def lm(width):
    return TransformerLM(
        tiny(vocab_size=V, width=width, num_layers=2, num_heads=2, positions="rotary")
    )


def optimizer(steps=4, rate=3e-2, batch=8, **fields):
    return TrainConfig(
        steps=steps,
        batch=batch,
        learning_rate=rate,
        warmup_steps=0,
        weight_decay=0.0,
        seed=3,
        **fields,
    )


CONFIG = RolloutConfig(policy=optimizer(), group=4, max_new_tokens=BUDGET, temperature=0.7, rows=3)
PAIR = Pair(
    target=lm(16),
    target_params=drawn_params(lm(16), 0, 0.1),
    draft=lm(8),
    draft_params=drawn_params(lm(8), 1),
)
LEARNING = dataclasses.replace(CONFIG, draft=optimizer())
DRAFT = TrainModel(lm(8), PAIR.target)


def few(prompt, text):
    """Rewards small tokens."""
    return -float(np.mean(text.tokens))


def run(folder, config=CONFIG, pair=PAIR, reward=few, console=None, prompts=PROMPTS, **options):
    options = {"draft_length": 2, "intervals": Intervals(log=1, checkpoint=2)} | options
    return learn(
        pair,
        prompts,
        reward,
        config,
        folder,
        console=console or Console(file=io.StringIO()),
        **options,
    )


def records(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith("seconds")} for line in lines
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Trains a policy and its draft without interruption; returns the folder and the last state."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, LEARNING, draft_task=DRAFT)


@jax.jit
def forward(params, tokens_BT, warp):
    """Returns the log-probability of every token, by one call over whole texts."""
    logits_BTV = PAIR.target.forward(params, tokens_BT[:, :-1]).logits_BTV
    return jnp.take_along_axis(log_probs(warp, logits_BTV), tokens_BT[:, 1:, None], axis=-1)[..., 0]


def gap(params, texts, warp=temperature(0.7)):
    found_BT = forward(params, texts.tokens_BT, warp)
    return float(jnp.where(texts.emitted_BT, jnp.abs(found_BT - texts.log_probs_BT), 0).max())


def test_rollouts_end_at_stops_and_refill_rows():
    """Texts have the log-probabilities of sampling. The training of a draft reads every position of
    a row: none of them is padding.

    The block rule is tested here, the token rule by all further tests.
    """
    pair = dataclasses.replace(PAIR, stop=(3, 5))
    rollouts = Rollouts(pair, PROMPTS, CONFIG, draft_length=2, rule=BlockRule())
    completions = rollouts.sample(0, PAIR.target_params, PAIR.draft_params)
    texts = rollouts.texts(completions, range(8))
    whole = [(*PROMPTS[text.prompt_index], *text.tokens) for text in completions]
    assert any(len(text.tokens) < BUDGET and text.tokens[-1] in pair.stop for text in completions)
    assert texts.emitted_BT.sum() == sum(len(text.tokens) for text in completions)
    assert gap(PAIR.target_params, texts) < 1e-5
    assert gap(PAIR.target_params, texts, chain()) > 0.1, "the control: temperature 1"
    assert gap(drawn_params(lm(16), 5), texts) > 0.1, "the control: another policy"
    for row, tokens_T in enumerate(texts.tokens_BT):
        stream = [token for text in (whole[row:] + whole) for token in text]
        assert tokens_T.tolist() == stream[: len(tokens_T)]


@pytest.mark.slow
def test_generate_returns_them_too():
    """test_layouts.py tests the unwarped log-probabilities."""
    warp = chain(temperature(0.7), top_k(5))
    options = dict(sampling=warp, draft_length=2, return_log_probs="sampled")
    (text,) = generate(PAIR, [PROMPTS[0]], BUDGET, **options)
    expected_BT = forward(PAIR.target_params, jnp.asarray([[*PROMPTS[0], *text.tokens]]), warp)
    assert_allclose(text.log_probs, expected_BT[0, 2:], atol=1e-5)
    with refusal("return_log_probs.*'all'"):
        generate(PAIR, [[1]], 2, return_log_probs="all")


def test_steps_have_prompts_and_noise_of_their_own():
    rollouts = Rollouts(PAIR, PROMPTS, CONFIG, draft_length=2)
    again, *steps = [
        {
            (text.prompt_index, text.sample_index): tuple(text.tokens)
            for text in rollouts.sample(step, PAIR.target_params, PAIR.draft_params)
        }
        for step in (0, 0, 1, 2)
    ]
    assert again == steps[0] and [index for _, index in again] == [0, 1, 2, 3] * 2
    assert len({frozenset(step) for step in steps}) > 1, "prompts of its own"
    assert all(len(set(step.values())) > 6 for step in steps), (
        "samples of a prompt have noise of their own"
    )
    shared = [
        (one, other, key)
        for one, other in itertools.combinations(steps, 2)
        for key in one.keys() & other.keys()
    ]
    assert len(shared) >= 4 and all(one[key] != other[key] for one, other, key in shared), (
        "and so have steps"
    )


def test_advantages_are_normalised_within_groups():
    found = advantages([1, 3, 1, 3, 5, 5, 5, 5], 4)
    assert_allclose(found, [-1, 1, -1, 1, 0, 0, 0, 0], atol=1e-6)


def test_gradient_equals_the_expected_rewards():
    """At the sampling policy, clipping has no effect, and the gradient is REINFORCE's."""
    rollouts = Rollouts(PAIR, PROMPTS, CONFIG, draft_length=2)
    completions = rollouts.sample(0, PAIR.target_params, PAIR.draft_params)
    texts = rollouts.texts(completions, [few(None, text) for text in completions])
    task = PolicyGradient(PAIR.target, 0.7, 0.2, V)

    def reinforce(params):
        weight_BT = (
            texts.emitted_BT / texts.emitted_BT.sum(1, keepdims=True) * texts.advantages_B[:, None]
        )
        return -(weight_BT * forward(params, texts.tokens_BT, temperature(0.7))).sum(1).mean()

    def loss(params):
        return task.loss(params, None, texts, None)[0]

    found, expected = (jax.jit(jax.grad(of))(PAIR.target_params) for of in (loss, reinforce))
    jax.tree.map(functools.partial(assert_allclose, atol=2e-5), found, expected)


def test_ratios_are_clipped_after_large_updates():
    """Texts have one token; the gradient by sampled log-probabilities is zero where clipped."""
    tokens_BT = jnp.full((4, 2), jnp.int32([1, 2]))
    ratios_BT = jnp.array([[2.0], [0.5], [2.0], [0.5]])

    def loss(log_probs_BT):
        texts = Texts(
            tokens_BT=tokens_BT,
            log_probs_BT=log_probs_BT,
            emitted_BT=jnp.ones((4, 1), bool),
            advantages_B=jnp.array([1.0, 1.0, -1.0, -1.0]),
        )
        task = PolicyGradient(PAIR.target, 1.0, 0.2, V)
        return task.loss(PAIR.target_params, None, texts, None)[0]

    now_BT = forward(PAIR.target_params, tokens_BT, chain())
    grads_BT = jax.jit(jax.grad(loss))(now_BT - jnp.log(ratios_BT))
    assert (grads_BT[:, 0] != 0).tolist() == [False, True, True, False]


@pytest.mark.slow
def test_rewards_rise_without_further_compilation(tmp_path):
    config = dataclasses.replace(CONFIG, policy=optimizer(steps=30))
    programs = []
    run(
        tmp_path,
        config,
        reward=lambda prompt, text: programs.append(sum(COMPILED.values())) or few(prompt, text),
    )
    rewards = [record["reward"] for record in records(tmp_path)]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 1.5
    assert programs[-1] == programs[4 * 8], "a policy step compiles nothing"
    assert max(record["log_prob_gap"] for record in records(tmp_path)) < 1e-5


@pytest.mark.slow
def test_killed_rollout_training_resumes_exactly(tmp_path, whole):
    """The training of the draft resumes as well."""
    folder, state = whole
    calls = []

    def killed(prompt, text):
        calls.append(1)
        if len(calls) > 3 * 8:
            raise KeyboardInterrupt
        return few(prompt, text)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, LEARNING, reward=killed, draft_task=DRAFT)
    other = dataclasses.replace(PAIR, draft_params=drawn_params(lm(8), 2))
    with refusal("another configuration: weights was "):
        run(tmp_path, LEARNING, other, draft_task=DRAFT)
    with storage.locked(tmp_path), refusal("written by another run"):
        run(tmp_path, LEARNING, draft_task=DRAFT)
    again = run(tmp_path, LEARNING, draft_task=DRAFT)
    assert records(tmp_path) == records(folder)
    jax.tree.map(assert_array_equal, again, state)


def reduced_head():
    """Returns a pair whose head has a part of the vocabulary, and the head's training task."""
    config = dataclasses.replace(lm(16).config, num_layers=1, gated=True, tied=False)
    head = Eagle3Config(
        layer=config, target_layers=2, hidden_layers=(0, 1), draft_vocab_size=12, own_output=True
    ).head()
    options = dict(objective="forward_kl", test_steps=2, decay=0.8)
    pair = dataclasses.replace(PAIR, draft=None, head=head, draft_params=drawn_params(head, 2))
    return pair, TrainHead(head=head, target=PAIR.target, **options)


@pytest.mark.slow
@pytest.mark.parametrize("pair, task", [(PAIR, DRAFT), reduced_head()], ids=["model", "reduced"])
def test_a_draft_that_learns_follows_the_policy(tmp_path, pair, task):
    """A draft that is distilled on the texts is accepted more and more, while the policy moves."""
    policy = optimizer(steps=20, rate=1e-2)
    config = dataclasses.replace(CONFIG, policy=policy, draft=optimizer(steps=20))
    run(tmp_path, config, pair, draft_task=task)
    acceptance = [record["acceptance"] for record in records(tmp_path)]
    assert np.mean(acceptance[-8:]) > np.mean(acceptance[:4]) + 0.1, acceptance


@pytest.mark.slow
def test_sharded_rollout_training_resumes_in_place(tmp_path, whole):
    pair = shard(PAIR, make_mesh(data=2, model=2, devices=jax.devices()[:4]))
    run(tmp_path, LEARNING, pair, draft_task=DRAFT)
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    again = run(tmp_path, LEARNING, pair, draft_task=DRAFT)
    assert len(again.policy.params["embedding"].sharding.device_set) == 4
    for found, expected in zip(jax.tree.leaves(again), jax.tree.leaves(whole[1])):
        assert_allclose(found, expected, atol=2e-3)


def test_equal_rewards_teach_nothing_and_warn(tmp_path):
    told = io.StringIO()
    state = run(tmp_path, reward=lambda prompt, text: 1, console=Console(file=told, width=200))
    assert "step 1: all texts of each prompt have the same reward" in told.getvalue()
    for one, other in zip(
        jax.tree.leaves(state.policy.params), jax.tree.leaves(PAIR.target_params)
    ):
        assert_array_equal(one, other)


def distil(pair, task=DRAFT, **options):
    return run("unused", LEARNING, pair, draft_task=task, **{"draft_length": None} | options)


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), "1"])
def test_invalid_reward_is_named_with_its_prompt(tmp_path, value):
    with refusal(rf"the reward of prompt \d, sample 0.*{value}"):
        run(tmp_path, reward=lambda prompt, text: value)


make = functools.partial(Rollouts, PAIR, PROMPTS, CONFIG)
NGRAMS = NgramDrafter(K=2)
FEW_ROWS = dataclasses.replace(CONFIG, policy=optimizer(batch=32))

test_refused_rollouts = refused_calls(
    {
        "policy.batch 8 .* group 3": lambda: RolloutConfig(policy=optimizer(), group=3),
        "group.* 1": lambda: RolloutConfig(policy=optimizer(), group=1),
        "temperature .*above 0.* 0": lambda: RolloutConfig(policy=optimizer(), temperature=0),
        "draft.batch 4 .* 8": lambda: RolloutConfig(policy=optimizer(), draft=optimizer(batch=4)),
        "8 prompts.* 4": lambda: Rollouts(PAIR, PROMPTS, FEW_ROWS),
        "lossy": lambda: make(rule=Lenience(0.5)),
        "temperature alone": lambda: make(sampling=chain(temperature(0.7), top_k(5))),
        "leave method out": lambda: make(method=Method(drafter=NGRAMS)),
        "both": lambda: run("unused", draft_task=TrainModel(lm(8), PAIR.target)),
        "NgramDrafter has no draft": lambda: distil(PAIR, drafter=NGRAMS),
        "EarlyExitDrafter has no draft": lambda: distil(
            PAIR, drafter=EarlyExitDrafter(PAIR.target, 1, 2)
        ),
        "another tokenizer": lambda: distil(
            dataclasses.replace(PAIR, vocabulary="any"), drafter=NGRAMS
        ),
        "pair's draft is of another model": lambda: distil(PAIR, TrainModel(lm(16), PAIR.target)),
    }
)
