"""The shipped pair: greedy text is the target's, with the draft model and with the head."""

import pytest

from specsamp import generate, greedy, load_pair
from specsamp.checkpoints.trained_pair import load_prompts


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


@pytest.mark.slow
def test_greedy_text_does_not_depend_on_the_head_and_it_drafts(head_pair, pair):
    prompt = load_prompts("python")[1:2]
    plain, drafted = (
        generate(head_pair, prompt, 24, sampling=greedy(), draft_length=K)[0] for K in (0, 3)
    )
    assert plain.tokens == drafted.tokens and drafted.stats.rounds <= 16
