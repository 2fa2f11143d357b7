"""Prompt lookup in earlier texts: the longest match drafts, and completions are exact."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import (
    CoupledRule,
    NgramDrafter,
    NgramTree,
    TokenRule,
    TreeShape,
    generate,
    generate_many,
)
from specsamp.decoding.drafters import ngram
from specsamp.decoding.state import Prefix, Weights
from specsamp.mesh.layout import make_mesh
from specsamp.mesh.sharded import shard
from support import drafters
from support.fakes import (
    FALSE_ALARM,
    counting_pair,
    decode,
    joint_distribution,
    p_value,
    prefill,
    samples_for,
    table_loop,
)
from support.loop_distributions import FULL, TARGET, V
from support.refusals import refused_calls

CORPUS = [[1, 2, 3, 7, 8], [], [9, 2, 3, 4], [3]]
K = 3


def propose(drafter, *texts, state=None):
    """Returns the tokens of each draft up to its end, and the drafter's state."""
    tokens_BS = jnp.asarray([[*text, *[0] * (20 - len(text))] for text in texts])
    prefix = Prefix(tokens_BS=tokens_BS, lengths_B=jnp.array(list(map(len, texts))))
    weights = Weights(target=None, draft=drafter.prepare(None))
    state = drafter.init(len(texts), 20) if state is None else state
    draft, state, _ = drafter.propose(weights, state, prefix, None, None)
    counts = np.where(draft.tokens_BK < 0, 0, draft.num_drafted_B[:, None])
    rows = zip(draft.tokens_BK.tolist(), np.minimum.accumulate(counts, 1).tolist())
    return [[token for token, count in zip(*row) if count] for row in rows], state


@pytest.mark.parametrize(
    "text, drafted",
    [
        ([5, 1, 2, 3], [7, 8]),  # the longer match wins over the later text
        ([5, 2, 3], [4]),
        ([0, 8], []),
        ([3, 6, 1, 2, 3], [6, 1, 2]),  # a shorter match in the sequence itself wins
        ([6, 6, 3], [4]),  # nothing follows the match in the last text
        ([0, 6, 0], [6, 0, 6]),  # a period goes on
    ],
)
def test_the_longest_match_in_a_corpus_drafts(text, drafted):
    assert propose(NgramDrafter(K, corpus=CORPUS), text)[0] == [drafted]


@pytest.mark.parametrize("max_ngram, expected", [(1, 4), (2, 5), (3, 6)])
def test_longer_matches_win_over_recent_ones(max_ngram, expected):
    text = [0, 1, 2, 6, 9, 1, 2, 5, 9, 8, 2, 4, 0, 1, 2]
    assert propose(NgramDrafter(1, max_ngram=max_ngram), text)[0] == [[expected]]


def test_ngrams_of_equal_hash_stay_apart(monkeypatch):
    monkeypatch.setattr(ngram, "_hashes", lambda before_XN, size: jnp.zeros_like(before_XN))
    drafts, _ = propose(NgramDrafter(K, corpus=CORPUS[:3]), [5, 1, 2, 3], [0, 1], [9, 2, 3])
    assert drafts == [[4], [], [4]], "the last n-gram alone is found, where it agrees"


def test_rows_look_in_the_logs_of_all_rows():
    drafter = NgramDrafter(K, log=8)
    drafts, state = propose(drafter, [1, 2, 3], [5, 6])
    assert drafts == [[], []], "a log ends with the current tokens, which nothing follows"
    drafts, state = propose(drafter, [1, 2, 3, 4, 7], [5, 2, 3], state=state)
    assert drafts == [[], [4, 7]]
    drafts, state = propose(drafter, [1, 2, 3, 4, 7], [5, 2, 3], state=state)
    assert drafts == [[], [4, 7]], "a row without new tokens writes nothing"
    for last in (8, 12):  # the next lap of the ring
        _, state = propose(drafter, range(20, 20 + last), [5, 2, 3], state=state)
    assert propose(drafter, [0], [9, 2, 3], state=state)[0] == [[], []]


class InPairs(NgramDrafter):
    """Treats each two rows as a batch of their own."""

    def propose(self, weights, state, prefix, cache, sample):
        def apart(tree):
            return jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), tree)

        def one(state, prefix):
            return NgramDrafter.propose(self, weights, state, prefix, cache, sample)[:2]

        made = jax.vmap(one)(apart(state), apart(prefix))
        draft, state = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), made)
        return draft, state, cache


def texts_after_texts(seed):
    """Returns the p-value of texts that are drafted from the logs of a run with seed 0."""
    loop = table_loop(TokenRule(), InPairs(2, corpus=[[0, 2, 1, 1, 0]], log=6))
    prompts = [[0], [2, 0, 1, 1]]
    length = 3
    draft = loop.drafter.prepare(None)
    samples = samples_for(V**length - 1, 2) // 2 * 2
    given = loop, TARGET, draft, prompts, length, FULL
    first = decode(*given, samples=samples).state
    state = prefill(*given, samples=samples, seed=seed)
    logs = dataclasses.replace(state.drafter_state, tables=first.drafter_state.tables)
    state = loop.run(
        Weights(target=TARGET, draft=draft), dataclasses.replace(state, drafter_state=logs), 2**30
    )
    starts = np.repeat([[1], [4]], samples, axis=0)
    emitted = np.take_along_axis(state.tokens_BS, starts + np.arange(length), axis=1)
    distributions = [joint_distribution(TARGET, FULL, prompt, length) for prompt in prompts]
    assert int(state.stats.accepted_BT[:, 1:].sum()) > samples, "logs and corpus draft"
    return p_value(list(zip(emitted.reshape(2, samples, length), distributions)))


def test_log_drafts_keep_the_target_distribution():
    assert texts_after_texts(seed=1) > FALSE_ALARM


def test_reused_noise_of_logged_text_is_caught():
    """The control, and the reason why prompt ids must differ."""
    assert texts_after_texts(seed=0) < FALSE_ALARM


def test_repeated_text_is_drafted_whole():
    """A single row decodes both prompts: its log outlives the first text."""
    prompts = [[3, 4]] * 2
    plain = generate(counting_pair(), [[3, 4]], 16, draft_length=0)
    for drafter, expected in ((NgramDrafter(K), [16, 16]), (NgramDrafter(K, log=32), [16, 4])):
        done = sorted(
            generate_many(counting_pair(), prompts, 16, rows=1, drafter=drafter),
            key=lambda row: row.prompt_index,
        )
        assert [row.tokens for row in done] == [plain[0].tokens] * 2
        assert [row.stats.rounds for row in done] == expected
        assert all(row.row_independent != bool(drafter.log) for row in done)


def test_texts_on_a_mesh_equal_single_prompts():
    pair = drafters.alone(drafters.TARGET)
    prompts = [[1, 2], [3], [5, 6, 7], [3]] * 2
    drafter = NgramDrafter(K, corpus=[[*range(24)]] * 2)
    alone = []
    options = dict(rule=CoupledRule(), drafter=drafter)
    for index in range(4):
        alone += generate(pair, [prompts[index]], 12, prompt_ids=[index], **options)
    options["drafter"] = dataclasses.replace(drafter, log=16)
    made = generate(shard(pair, make_mesh(data=4, model=2)), prompts, 12, **options)
    assert [row.tokens for row in made[:4]] == [row.tokens for row in alone]
    assert sum(row.stats.accepted for row in made) > 0


test_refused_ngram_drafters = refused_calls(
    {
        "corpus has no tokens: give lists of token ids": lambda: NgramDrafter(2, corpus=[]),
        "corpus must be lists of token ids; got 'text.txt'": lambda: NgramDrafter(
            2, corpus="text.txt"
        ),
        r"must be lists of token ids; got \[\[0.5\]\]": lambda: NgramDrafter(2, corpus=[[0.5]]),
        r"must be lists of token ids; got \[\[1, -1\]\]": lambda: NgramDrafter(2, corpus=[[1, -1]]),
        "log must be an integer >= 0.*got -1": lambda: NgramDrafter(2, log=-1),
        "a tree looks in the sequence alone: leave corpus and log out": lambda: NgramTree(
            tree=TreeShape.of_widths(2, 1), log=8
        ),
        r"corpus has token 999, and the target's vocabulary \d+ tokens: encode it": lambda: (
            generate(counting_pair(), ["a"], drafter=NgramDrafter(2, corpus=[[1, 999]]))
        ),
        "prompt_ids has 3 twice: where a draft depends on other texts, give": lambda: generate(
            counting_pair(), ["a", "b"], 4, prompt_ids=[3, 3], drafter=NgramDrafter(2, log=8)
        ),
    }
)
