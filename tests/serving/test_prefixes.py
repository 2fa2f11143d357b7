"""Prompts with equal prefixes, on a small transformer that attends to every slot: a wrong slot
changes the completion.
"""

import jax
import numpy as np
import pytest

from specsamp import (
    Adaptive,
    ModelDrafter,
    Pair,
    TransformerConfig,
    TransformerLM,
    generate,
    generate_many,
)
from specsamp.decoding.method import make_method
from specsamp.serving.service import Service
from support.services import submit

V, K = 64, 3
MODEL = TransformerLM(
    TransformerConfig(
        vocab_size=V, width=16, num_layers=1, num_heads=2, feedforward_width=32, positions="rotary"
    )
)
SHARP = jax.tree.map(lambda x: 4 * x, MODEL.init(jax.random.key(1)))
WRONG = jax.tree.map(lambda x: 4 * x, MODEL.init(jax.random.key(2)))
PAIR = Pair(target=MODEL, target_params=SHARP, draft=MODEL, draft_params=WRONG)


def text(random, length):
    return random.integers(0, V, length).tolist()


@pytest.mark.parametrize("draft_length", [0, K])
def test_joint_prefill_after_copied_prefixes_keeps_texts(draft_length):
    """One call reads four prompts, two of them after prefixes copied from ended completions."""
    random = np.random.default_rng(0)
    prompts = [text(random, 90) for _ in range(4)]
    for parent in (0, 1):
        shared = random.integers(38, 60)
        prompts.append(prompts[parent][:shared] + text(random, 90 - shared))
        prompts.append(text(random, random.integers(66, 96)))
    plain = generate(PAIR, prompts, 8, draft_length=0)
    queue = generate_many(PAIR, prompts, 8, rows=4, draft_length=draft_length)
    assert {one.prompt_index: one.tokens for one in queue} == {
        one.prompt_index: one.tokens for one in plain
    }
    assert queue.batch.prefill.tokens_copied >= 70, "the control: prefixes were copied"


@pytest.mark.slow
def test_paused_drafter_lends_the_prefix_it_read():
    """A paused draft has read less than the target; chunks have the room of the whole prompt."""
    random = np.random.default_rng(0)
    first = text(random, 120)
    second = first[:100] + text(random, 132)
    third = second[:90] + text(random, 140)
    prompts = [first, second, third]
    adaptive = Adaptive(lengths=(0, 1, K), costs_ms=(1.0, 1.1, 1.3), trust=1.0)
    method = make_method(PAIR, drafter=ModelDrafter(MODEL, K), draft_length=adaptive)
    service = Service(PAIR, method, rows=1, context=240, in_background=False)
    chunks = []
    for prompt in prompts:
        submit(service, [prompt], 8, deliver=chunks.append)
        while service.unfinished:
            service._wait()
            service._step()
    assert [chunk.tokens for chunk in chunks] == [
        one.tokens for one in generate(PAIR, prompts, 8, draft_length=0)
    ]
    assert service.batch.prefill.tokens_copied > 80, "the control: prefixes were copied"
    assert any(chunk.stats.lengths[0] for chunk in chunks), "the control: there were pauses"


def test_insert_over_an_absent_row_is_refused():
    queue = generate_many(PAIR, [[1]], 8, rows=1, draft_length=0)
    engine = queue.batch.runner.engine
    state = engine.blank(2)
    for at in ([2, 0], [1, 1], [-2, 0]):
        with pytest.raises(ValueError, match="must be different, from 0 to 1"):
            engine.insert(state, engine.blank(2), at)
    queue.close()
