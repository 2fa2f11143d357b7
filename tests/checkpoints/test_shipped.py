"""The shipped pair: greedy text is the target's, with the draft model and with the head."""

import pytest

from specsamp import generate, greedy, load_pair
from specsamp.checkpoints.trained_pair import load_prompts


@pytest.fixture(scope="module")
def pair():
    return load_pair("python")


def test_shipped_pair_greedy_text_ignores_the_draft(pair):
    prompt = load_prompts("python")[1:2]
    plain, drafted = (
        generate(pair, prompt, 24, sampling=greedy(), draft_length=K)[0] for K in (0, 3)
    )
    assert plain.tokens == drafted.tokens and drafted.stats.acceptance_rate > 0.4


@pytest.fixture(scope="module")
def head_pair():
    return load_pair("python", draft="head")


@pytest.mark.slow
def test_shipped_head_drafts_and_keeps_greedy_text(head_pair, pair):
    prompt = load_prompts("python")[1:2]
    plain, drafted = (
        generate(head_pair, prompt, 24, sampling=greedy(), draft_length=K)[0] for K in (0, 3)
    )
    assert plain.tokens == drafted.tokens and drafted.stats.rounds <= 16
