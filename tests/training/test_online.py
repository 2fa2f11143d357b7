"""Drafts that are trained while they are used: texts, acceptance, and refusals."""

import collections
import dataclasses
import time

import jax
import numpy as np
import pytest

from specsamp import (
    CoupledRule,
    Method,
    ModelDrafter,
    NgramDrafter,
    Pair,
    TokenRule,
    TransformerLM,
    chain,
    generate_many,
    temperature,
)
from specsamp.models.config import tiny
from specsamp.models.eagle import Eagle3Config
from specsamp.models.int8 import quantise
from specsamp.serving.service import Service
from specsamp.training.online import DraftLearner
from specsamp.training.trainer import TrainConfig
from support.refusals import refused_calls
from support.services import submit
from support.weights import drawn_params

V, BUDGET, SAMPLING = 6, 12, chain(temperature(0.8))


def lm(width):
    return TransformerLM(
        tiny(vocab_size=V, width=width, num_layers=2, num_heads=2, positions="rotary")
    )


PAIR = Pair(
    target=lm(16),
    target_params=drawn_params(lm(16), 0, 0.3),
    draft=lm(8),
    draft_params=drawn_params(lm(8), 1),
)
LAYER = tiny(
    vocab_size=V, width=16, num_layers=1, num_heads=2, positions="rotary", gated=True, tied=False
)
HEAD = Eagle3Config(layer=LAYER, target_layers=2, target_width=16, hidden_layers=(0, 1)).head()
PROMPTS = [[n % V, n // V % V, (n + 2) % V] for n in range(24)]
CONFIG = TrainConfig(steps=100, batch=8, learning_rate=3e-2, warmup_steps=0, weight_decay=0.0)


def learner(length=14):
    return DraftLearner(PAIR, CONFIG, length)


def many(learner=None, prompts=PROMPTS, **options):
    options = {"sampling": SAMPLING, "draft_length": 3, "rows": 4, "stop": []} | options
    return sorted(
        generate_many(PAIR, prompts, BUDGET, learner=learner, **options),
        key=lambda text: text.prompt_index,
    )


def changing():
    """Returns a learner that changes to another draft at every fourth text, the worst case."""
    drafts = [drawn_params(lm(8), seed, 0.5) for seed in range(4)]
    count = iter(range(10**6))

    def learn(tokens):
        number = next(count)
        return None if number % 4 else drafts[number // 4 % 4]

    return learn


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling, rule, equal",
    [(None, None, True), (SAMPLING, CoupledRule(), True), (SAMPLING, TokenRule(), False)],
    ids=["greedy", "coupled", "the control: sampled"],
)
def test_greedy_and_coupled_texts_ignore_the_draft(sampling, rule, equal):
    options = dict(prompts=PROMPTS[:12], rule=rule, sampling=sampling, rows=2)
    found, plain = (many(learner, **options) for learner in (changing(), None))
    assert ([text.tokens for text in found] == [text.tokens for text in plain]) == equal
    assert {text.row_independent for text in found} == {rule == CoupledRule()}
    assert all(text.row_independent for text in plain)


@pytest.mark.slow
def test_texts_have_the_distribution_of_the_target():
    prompts, count = [PROMPTS[0]] * 1000, 1000
    found = generate_many(
        PAIR,
        prompts,
        2,
        learner=changing(),
        sampling=SAMPLING,
        draft_length=2,
        rows=64,
        stop=[],
        prompt_ids=range(count),
    )
    counts = collections.Counter(tuple(text.tokens) for text in found)
    logits_TV = PAIR.target.forward(
        PAIR.target_params, np.array([[*PROMPTS[0], token] for token in range(V)])
    ).logits_BTV
    first_V = jax.nn.softmax(logits_TV[0, 2] / 0.8)
    joint_VV = np.asarray(first_V[:, None] * jax.nn.softmax(logits_TV[:, 3] / 0.8))
    found_VV = np.array([[counts[one, two] for two in range(V)] for one in range(V)]) / count
    noise = np.sqrt(joint_VV / count).sum() / 2
    assert np.abs(found_VV - joint_VV).sum() / 2 < 1.3 * noise
    assert np.abs(found_VV - np.roll(joint_VV, 1)).sum() / 2 > 3 * noise, "the control"


def test_a_draft_that_learns_is_accepted_more():
    learns = learner()
    texts = many(learns, PROMPTS * 16)
    assert len(learns.losses) > 10 and learns.losses[-1] < learns.losses[0]
    rates = [
        sum((t.stats for t in part[1:]), part[0].stats).acceptance_rate
        for part in (texts[:64], texts[-64:])
    ]
    assert rates[1] > rates[0] + 0.1


def serve(learner, calls, found, **options):
    """Requests four texts at a time, under one seed, and adds their chunks to ``found``; returns
    service and seeds.
    """
    method = Method(drafter=ModelDrafter(PAIR.draft, 3), sampling=SAMPLING, **options)
    service = Service(PAIR, method, rows=4, context=64, learner=learner)
    seeds = []
    service.compile()
    service.start()
    for _ in range(calls):
        answer = submit(
            service,
            PROMPTS[:4],
            BUDGET,
            deliver=found.append,
            ignore_eos=True,
            seed=7,
            sampling=SAMPLING,
        )
        seeds.append({request.seed for request in answer.requests})
        while service.unfinished:
            time.sleep(0.01)
    service.close()
    service.join()
    assert len(found) == 4 * calls and all(chunk.finish == "length" for chunk in found)
    return service, seeds


@pytest.mark.slow
def test_learning_service_uses_no_noise_twice():
    learns = learner()
    service, seeds = serve(learns, 10, [])
    assert len(learns.losses) >= 4 and learns.losses[-1] < learns.losses[0]
    assert not service.repeats and len(set.union(*seeds)) == 10
    service, seeds = serve(changing(), 2, [], rule=CoupledRule())
    assert service.repeats and seeds == [{7}, {7}], "the control: texts that no draft changes"


@pytest.mark.slow
def test_failing_learner_ends_no_text(tmp_path):
    found, known = [], []

    def fails(tokens):
        known.append(len(found))
        raise RuntimeError("no memory is left")

    service, _ = serve(fails, 2, found)
    assert service.delivery.learner is None and not service.repeats
    assert len(known) == 1 and known[0] > 0, "a text is sent before the draft learns from it"
    options = dict(sampling=SAMPLING, draft_length=3, rows=4, stop=[], log=tmp_path / "log")
    queue = generate_many(PAIR, PROMPTS, BUDGET, learner=fails, **options)
    got = []
    with pytest.raises(RuntimeError, match="no memory"):
        got.extend(queue)
    written = (tmp_path / "log").read_text().splitlines()
    assert len(written) - 1 == len(got) > 0 and len(known) == 2
    again = generate_many(PAIR, PROMPTS, BUDGET, **options)
    assert again.known == len(written) - 1 and len(list(again)) == len(PROMPTS)


@pytest.mark.slow
def test_prefix_of_a_former_draft_is_dropped():
    copied = []
    for learns in (None, lambda tokens: PAIR.draft_params):
        options = dict(sampling=SAMPLING, draft_length=3, rows=1, stop=[])
        queue = generate_many(PAIR, [[1, 2, 3, 4, 5, 0, 1, 2]] * 6, 4, learner=learns, **options)
        assert len(list(queue)) == 6
        copied.append(queue.batch.prefill.tokens_copied)
    assert copied[0] == 5 * copied[1] > 0


def test_updates_end_at_the_last_step():
    learns = DraftLearner(PAIR, TrainConfig(steps=3, batch=1, warmup_steps=0), 2)
    assert learns([1, 2]) is None and learns([3, 4]) is not None and len(learns.losses) == 1
    assert learns([1, 2] * 50) is not None and len(learns.losses) == 3, "a long text makes several"
    kept = len(learns._tokens)
    assert learns([1, 2] * 50) is None and len(learns._tokens) == kept


ALONE = Pair(target=PAIR.target, target_params=())
WITH_HEAD = dataclasses.replace(ALONE, head=HEAD, draft_params=())
IN_INT8 = dataclasses.replace(PAIR, draft_params={"w": quantise(np.ones((2, 2)), (0,))})

test_refused_online_learning = refused_calls(
    {
        "draft model .* a head": lambda: DraftLearner(WITH_HEAD, CONFIG),
        "draft model .* no draft": lambda: DraftLearner(ALONE, CONFIG),
        "int8 cannot be trained": lambda: DraftLearner(IN_INT8, CONFIG),
        "length .* 0": lambda: learner(0),
        "prompt_ids has 2 twice": lambda: many(changing(), PROMPTS[:3], prompt_ids=[2, 1, 2]),
        "NgramDrafter": lambda: many(changing(), drafter=NgramDrafter(K=3), draft_length=None),
    }
)
