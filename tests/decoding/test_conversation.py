"""Conversations: a text that is read on has the same continuation as a text that is read anew."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import EarlyExitDrafter, Pair, chain, generate, penalties, temperature
from specsamp.decoding.conversation import Conversation
from specsamp.decoding.drafters import FeatureDrafter
from specsamp.decoding.engine import Engine
from specsamp.decoding.method import make_method
from specsamp.decoding.request import make_requests
from specsamp.models.config import tiny
from specsamp.models.transformer import TransformerLM
from support.extras import slow_but
from support.fakes import COMPILED, counting_pair, random_table, table_pair
from support.heads import LayeredTable, eagle3
from support.weights import drawn_params

V = 12


def said(chat, text, budget, **options):
    """Returns what one turn writes."""
    return [token for chunk in chat.stream(text, budget, **options) for token in chunk.tokens]


def anew(pair, text, budget, **options):
    return generate(pair, [text], budget, **options)[0].tokens


def test_turns_on_a_table_are_those_of_whole_texts():
    """Covers sampled turns of every kind: a longer, a shorter and another text, and a text cut by a
    stop.
    """
    pair = table_pair()
    options = dict(sampling=temperature(1.0), draft_length=3, seed=5)
    chat = Conversation(pair, max_tokens=100, **options)
    text = [1, 2]
    for turn, (added, budget) in enumerate((([], 9), ([3], 4), ([0, 2, 1], 11), ([1] * 20, 2))):
        text = text + added
        written = said(chat, text, budget)
        assert written == anew(pair, text, budget, prompt_ids=[turn], **options)
        assert chat.tokens == text + written
        text = chat.tokens
    assert chat.tokens_read == 20 + 2, "the token before the last may be unknown to the draft"
    for turn, other in enumerate((text[:10], [2, 2, 2], text[:1]), start=4):
        assert said(chat, other, 5) == anew(pair, other, 5, prompt_ids=[turn], **options)
    (whole,) = generate(pair, [other], 5, prompt_ids=[6], **options)
    assert chat.stats == whole.stats


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens, length", [(514, 513), (64, 63)])
def test_the_longest_text_is_read(max_tokens, length):
    pair = table_pair()
    chat = Conversation(pair, max_tokens=max_tokens, draft_length=3)
    text = [1, 2, 0] * (length // 3)
    assert said(chat, text, max_tokens - length) == anew(
        pair, text, max_tokens - length, draft_length=3
    )


def test_texts_of_a_model_that_remembers_tokens():
    """N-grams, a window of attention and penalties look back, beyond where the text goes on."""
    config = tiny(
        vocab_size=50, num_layers=2, positions="rotary", ngram_rows=64, window=8, global_layers=(1,)
    )
    model = TransformerLM(config)
    pair = Pair(target=model, target_params=drawn_params(model))
    options = dict(
        drafter=EarlyExitDrafter(model, 1, 2),
        sampling=chain(penalties(repetition=1.5), temperature(0.5)),
        seed=1,
    )
    chat = Conversation(pair, max_tokens=100, **options)
    text = [5, 6, 7, *said(chat, [5, 6, 7], 12), 9]
    assert said(chat, text, 20) == anew(pair, text, 20, prompt_ids=[1], **options)
    assert chat.tokens_read == 3


@pytest.mark.parametrize("kind", slow_but(["model", "head"], "head"))
def test_what_is_read_on_leaves_the_caches_of_the_whole_text(kind):
    """Tokens alone do not show a wrong feature, or a hole: a draft's cache costs acceptance and
    nothing else.
    """
    pair, drafter = PAIRS[kind]()
    text, slots = [5, 6, 7, 2, 9, 4, 1], 128
    method = make_method(pair, drafter=drafter, sampling=temperature(1.0))
    requests = make_requests(pair, method, [text[:4]], 20)
    engine = Engine.create(pair, method, requests, slots=slots)
    state = engine.run(engine.prefill(requests))
    whole = [*text[:4], *engine.take(state, requests)[0].tokens, *text]
    (then,) = make_requests(pair, method, [whole], 5)
    anew = engine.prefill([then])
    start = len(whole) - len(text) - 2
    on = engine.extend(
        [then], dataclasses.replace(state, request=None), [start], [len(whole)], chunk=4
    )

    def committed(tree):
        leaves = [
            leaf
            for leaf in jax.tree.leaves(tree)
            if slots in leaf.shape and leaf.dtype == jnp.float32
        ]
        return [np.moveaxis(leaf, leaf.shape.index(slots), 0)[: len(whole) - 1] for leaf in leaves]

    for ours, theirs in zip(
        committed(on.drafter_state), committed(anew.drafter_state), strict=True
    ):
        np.testing.assert_allclose(ours[: len(whole) - 2], theirs[: len(whole) - 2], atol=1e-5)
    for ours, theirs in zip(committed(on.cache), committed(anew.cache), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def twins():
    """Makes a pair whose drafts are all accepted: after each round the draft has not seen the token
    before the last.
    """
    model = TransformerLM(tiny(vocab_size=50, num_layers=2, positions="rotary"))
    params = drawn_params(model)
    return Pair(target=model, target_params=params, draft=model, draft_params=params), None


def headed_pair():
    """A random head on a table: what it proposes depends on all that it has read."""
    target, head = LayeredTable(V), eagle3(V)
    params = jax.tree.map(lambda x: 3 * x, drawn_params(head, 2))
    pair = Pair(target=target, target_params=random_table(0, V), head=head, draft_params=params)
    return pair, FeatureDrafter(target, head, 3)


PAIRS = {"model": twins, "head": headed_pair}


def test_text_and_stops():
    chat = Conversation(counting_pair(), draft_length=2, stop=["gh"])
    assert "".join(chunk.text for chunk in chat.stream("abc", 20)) == "def"
    assert "".join(chunk.text for chunk in chat.stream("abcdefgxyz", 3)) == "{|}"
    assert chat.tokens_read == 4


def test_a_stream_that_is_left_behind_is_forgotten():
    chat = Conversation(counting_pair(), draft_length=2)
    next(chat.stream("abc", 20))
    assert bytes(chat.tokens) == b"abcdef"
    assert "".join(chunk.text for chunk in chat.stream("abc", 4)) == "defg"
    assert chat.tokens_read == 3


def test_turns_compile_once():
    chat = Conversation(counting_pair(), draft_length=2)
    said(chat, "abc", 5)
    said(chat, "abcdefgh", 5)
    before = COMPILED["jit(extend)"]
    said(chat, "abcdefghijklmnopqrs", 3)
    assert COMPILED["jit(extend)"] == before > 0


def test_a_text_has_the_positions_of_its_models():
    assert Conversation(counting_pair()).max_tokens == 64
