"""A conversation, which keeps its cache, has the completions of texts read anew."""

import pytest

from specsamp import Conversation, chain, generate, penalties, temperature
from support.fakes import COMPILED, counting_pair, table_pair
from support.refusals import refused_calls


def said(chat, text, budget, **options):
    """Returns the tokens of one turn."""
    return [token for chunk in chat.stream(text, budget, **options) for token in chunk.tokens]


def anew(pair, text, budget, **options):
    return generate(pair, [text], budget, **options)[0].tokens


def test_conversation_turns_equal_whole_texts():
    """Sampled turns equal whole texts if a text grows, shrinks or is replaced; penalties also count
    the tokens of earlier turns.
    """
    pair = table_pair()
    sampling = chain(penalties(repetition=1.5), temperature(1.0))
    options = dict(sampling=sampling, draft_length=3, seed=5)
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
def test_the_longest_text_is_read():
    pair, text = table_pair(), [1, 2, 0] * 171
    chat = Conversation(pair, max_tokens=514, draft_length=3)
    assert said(chat, text, 1) == anew(pair, text, 1, draft_length=3)


def test_conversation_streams_text_and_stops():
    chat = Conversation(counting_pair(), draft_length=2, stop=["gh"])
    assert "".join(chunk.text for chunk in chat.stream("abc", 20)) == "def"
    assert "".join(chunk.text for chunk in chat.stream("abcdefgxyz", 3)) == "{|}"
    assert chat.tokens_read == 4


def test_abandoned_stream_is_forgotten():
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


test_refused_conversations = refused_calls(
    {
        "max_tokens must be": lambda: Conversation(counting_pair(), max_tokens=1),
        "max_tokens = 100, but the models have 64": lambda: Conversation(
            counting_pair(), max_tokens=100
        ),
        "3 tokens, and max_new_tokens = 8 more.*max_tokens = 10": lambda: Conversation(
            counting_pair(), max_tokens=10
        ).stream("abc", 8),
    }
)
