"""Several modules draft as if they read the whole text at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import Loop, ModuleDrafter, TokenRule
from specsamp.decoding.drafters import FeatureTree
from specsamp.decoding.method import head_drafter
from specsamp.decoding.state import Weights, write_tokens
from specsamp.decoding.trees import TreeShape
from support.fakes import prefill
from support.heads import LayeredTable, mtp
from support.loop_distributions import FULL, TARGET, V
from support.refusals import refused_calls
from support.weights import drawn_params

D = 3
HEAD, MODEL = mtp(V, num_modules=D), LayeredTable(V)
WEIGHTS = Weights(target=TARGET, draft=HEAD.prepare(drawn_params(HEAD)))
PROMPTS = [[0], [2, 1, 2, 1], [1, 2, 1, 2, 2, 0, 1]]


@jax.jit
def expected(tokens_BS, lengths_B, drafted_BK):
    """Returns the log-probabilities of drafted tokens from modules that read a text and its draft
    at once, without a cache.
    """
    start_B = jnp.zeros_like(lengths_B)
    tokens_BS = write_tokens(tokens_BS, drafted_BK, lengths_B)
    output = MODEL(
        TARGET,
        tokens_BS,
        start_B,
        MODEL.init_cache(*tokens_BS.shape),
        hidden_layers=HEAD.hidden_layers,
    )
    (features_BSD,), found = output.hidden, []
    for k in range(drafted_BK.shape[1]):
        embedded_BSD, _ = MODEL.embed(TARGET, jnp.roll(tokens_BS, -k - 1, axis=1), start_B, None)
        features_BSD, _ = HEAD(WEIGHTS.draft, embedded_BSD, features_BSD, start_B, None, k)
        last_B1D = HEAD.take(features_BSD, jnp.maximum(lengths_B - 2, 0))[:, None]
        logits_B1V = HEAD.logits(
            WEIGHTS.draft, last_B1D, lambda x: MODEL.unembed_normed(TARGET, x), k
        )
        found.append(jax.nn.log_softmax(logits_B1V[:, 0]))
    return jnp.stack(found, axis=1)


def error(loop, state):
    """Returns the largest difference from `expected` over all rows with a draft."""
    draft, _, _ = jax.jit(loop.draft)(WEIGHTS, state.request, state)
    wanted_BKV = expected(state.tokens_BS, state.lengths_B, draft.tokens_BK)
    drafts_B11 = (draft.num_drafted_B > 0)[:, None, None]
    return float(jnp.where(drafts_B11, abs(wanted_BKV - draft.log_probs_BRV), 0).max())


@pytest.mark.slow
def test_module_drafts_equal_those_of_whole_texts():
    """Prefill in chunks: test_next_round.py."""
    loop = Loop(target=MODEL, drafter=ModuleDrafter(MODEL, HEAD, D), rule=TokenRule())
    options = dict(samples=4, slots=40, prompt_ids=range(3))
    state = prefill(loop, TARGET, WEIGHTS.draft, PROMPTS, 20, FULL, **options)
    sizes = set()
    for _ in range(6):
        assert error(loop, state) < 1e-5
        before_B = np.asarray(state.lengths_B)
        state = loop.run(WEIGHTS, state, 1)
        sizes |= set((np.asarray(state.lengths_B) - before_B).tolist())
    assert sizes == set(range(1, D + 2)), "rounds of every size"


THREE = mtp(3, num_modules=3)

test_refused_module_drafters = refused_calls(
    {
        "K = 4, but the head drafts 3 tokens": lambda: head_drafter(LayeredTable(3), THREE, 4),
        "3 modules draft chains": lambda: FeatureTree(
            LayeredTable(3), THREE, tree=TreeShape.of_widths(2, 1)
        ),
        "head must be .*num_modules above 1": lambda: ModuleDrafter(LayeredTable(3), mtp(3), 1),
    }
)
