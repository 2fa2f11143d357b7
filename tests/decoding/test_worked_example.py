"""The loop reproduces the two rounds in the docstring of `specsamp.decoding.state`."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np

from specsamp import Draft, Drafter, LanguageModel, Loop, Output, TokenRule, greedy
from specsamp.decoding import state
from support.fakes import decode

TEXT = [5, 8, 3, 4, 9, 1, 6]


@dataclasses.dataclass(frozen=True)
class Recites(LanguageModel):
    """Writes ``TEXT``, a successor for each token; its cache holds the tokens that it has read."""

    vocab_size: int = 10

    def init_cache(self, batch, slots):
        return jnp.full((batch, slots), -1)

    def __call__(self, weights, tokens_BT, start_B, cache, *, hidden_layers=()):
        successor = np.zeros((10, 10), np.float32)
        successor[TEXT[:-1], TEXT[1:]] = 9.0
        at_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1])[None]
        cache = cache.at[jnp.arange(len(start_B))[:, None], at_BT].set(tokens_BT)
        return Output(logits_BTV=jnp.asarray(successor)[tokens_BT], cache=cache)


@dataclasses.dataclass(frozen=True)
class Proposes(Drafter):
    """Drafts [3 7] after two tokens, and [9 1] after four."""

    K: int = 2

    def propose(self, weights, drafter_state, prefix, cache, sample):
        tokens_BK = jnp.where(
            prefix.lengths_B[:, None] == 2, jnp.array([[3, 7]]), jnp.array([[9, 1]])
        )
        return (
            Draft(tokens_BK=tokens_BK, num_drafted_B=jnp.full_like(prefix.lengths_B, 2)),
            drafter_state,
            cache,
        )


def test_two_rounds_equal_the_docstring():
    loop = Loop(target=Recites(), drafter=Proposes(), rule=TokenRule())
    shown = re.findall(r"tokens_BS \[(.*?)\]   lengths_B (\d)", state.__doc__)[1:]
    held = ([5, 8, 3, 7], [5, 8, 3, 4, 9, 1])  # tokens in the cache after each round
    for (tokens, length), budget, slots in zip(shown, (2, 5), held, strict=True):
        after = decode(loop, None, None, [TEXT[:2]], budget, greedy(), slots=10).state
        committed = np.asarray(after.tokens_BS)[0, : int(length)]
        assert committed.tolist() == [int(token) for token in tokens.split() if token != "."]
        assert np.asarray(after.cache)[0, : len(slots)].tolist() == slots
        assert int(after.lengths_B[0]) == int(length)
    counts = after.stats
    assert [int(x[0]) for x in (counts.rounds_B, counts.emitted_B, counts.drafted_B)] == [2, 5, 4]
    assert np.asarray(after.tokens_BS)[np.asarray(after.from_draft_BS)].tolist() == [3, 9, 1]
