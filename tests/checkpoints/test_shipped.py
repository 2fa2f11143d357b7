"""The pair that comes with the package: small enough, trained, and a draft of its own target."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import chain, generate, greedy, load_pair
from specsamp.checkpoints.trained_pair import load_prompts, pair_folder
from specsamp.decoding.drafters import BlockDrafter
from specsamp.models.heads import FeatureHead
from specsamp.models.transformer import TransformerLM
from specsamp.training.feature_heads import TrainHead


@pytest.fixture(scope="module")
def pair():
    return load_pair("python")


def test_it_fits_a_package_and_is_too_large_for_a_cache(pair):
    """Both models and the tokenizer have 48 MB; in float32 the target is more than twice a cache of
    32 MiB.
    """
    assert sum(path.stat().st_size for path in pair_folder("python").rglob("*")) < 48e6

    def streamed(model, params):
        weights = model.fit_slots(model.prepare(params), 128)
        return sum(x.nbytes for x, _ in model.matrices_read(weights, 1))

    target, draft = (
        streamed(pair.target, pair.target_params),
        streamed(pair.draft, pair.draft_params),
    )
    assert target > 2 * 32 * 2**20 and draft < target / 25


def test_its_greedy_text_does_not_depend_on_the_draft(pair):
    prompt = load_prompts("python")[1:2]
    plain, drafted = (
        generate(pair, prompt, 24, sampling=greedy(), draft_length=K)[0] for K in (0, 3)
    )
    assert plain.tokens == drafted.tokens and drafted.stats.acceptance_rate > 0.4


@pytest.fixture(scope="module")
def head_pair():
    return load_pair("python", draft="head")


def test_greedy_text_does_not_depend_on_the_head_and_it_drafts(head_pair, pair):
    prompt = load_prompts("python")[1:2]
    plain, drafted = (
        generate(head_pair, prompt, 24, sampling=greedy(), draft_length=K)[0] for K in (0, 3)
    )
    assert plain.tokens == drafted.tokens and drafted.stats.rounds <= 16


def test_the_target_accepts_its_head_at_every_position(head_pair, pair):
    """On text it has not seen; one that takes its layers in the wrong order is accepted less."""
    tokens_BT = jnp.asarray([pair.tokenizer.encode(load_prompts("python")[1])])
    target = TransformerLM(pair.target.config)

    def accepted(head):
        task = TrainHead(head=head, target=target, test_steps=2)
        measured = jax.jit(task.measure)(
            head_pair.draft_params, task.teacher(pair.target_params), tokens_BT, chain()
        )
        return np.array([measured[f"acceptance/position_{i}"] for i in (1, 2)])

    swapped = dataclasses.replace(head_pair.head.config, hidden_layers=(5, 3, 1))
    right, wrong = accepted(head_pair.head), accepted(FeatureHead(swapped))
    assert right.min() > 0.5 and (right > wrong + 0.04).all(), (right, wrong)


@pytest.mark.slow
def test_the_target_accepts_its_block_head_and_less_without_its_correction():
    """Greedy texts do not depend on it; the Markov head is what makes later tokens of a
    block fit.
    """
    pair, prompts = load_pair("python", draft="block"), load_prompts("python")[1:5]
    assert sum(path.stat().st_size for path in (pair_folder("python") / "block").iterdir()) < 7e6
    plain = generate(pair, prompts, 48, sampling=greedy(), draft_length=0)
    emitted = {}
    for law in ("conditional", "marginals"):
        drafted = generate(
            pair,
            prompts,
            48,
            sampling=greedy(),
            drafter=BlockDrafter(pair.target, pair.head, 4, law),
        )
        assert [text.tokens for text in drafted] == [text.tokens for text in plain]
        emitted[law] = np.mean([text.stats.emitted_per_round for text in drafted])
    assert emitted["conditional"] > max(1.6, emitted["marginals"] + 0.1), emitted
