"""The shipped pair: greedy text is the target's, with the draft model and with the head."""

import pytest

from specsamp import generate, greedy, load_pair
from specsamp.checkpoints.trained_pair import load_prompts
from support.extras import slow_but


@pytest.mark.parametrize("draft", slow_but(["model", "head"], "model"))
def test_shipped_pair_greedy_text_ignores_the_draft(draft):
    pair, prompt = load_pair("python", draft=draft), load_prompts("python")[1:2]
    plain, drafted = (
        generate(pair, prompt, 24, sampling=greedy(), draft_length=K)[0] for K in (0, 3)
    )
    assert plain.tokens == drafted.tokens and drafted.stats.acceptance_rate > 0.4
