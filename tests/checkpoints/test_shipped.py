"""The pair that comes with the package: small enough, trained, and a draft of its own target."""

import numpy as np
import pytest

from specsamp import generate, greedy, load_pair
from specsamp.checkpoints.trained_pair import load_prompts, pair_folder
from specsamp.decoding.drafters import BlockDrafter


@pytest.fixture(scope="module")
def pair():
    return load_pair("python")


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
