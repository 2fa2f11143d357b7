"""Names, bytes and offsets of a reply's tokens fit its text, with every style of tokenizer."""

import dataclasses
import itertools

import pytest

from specsamp import Method, NoDrafter
from specsamp.decoding.request import Request
from specsamp.decoding.results import Chunk, RowStats, RowText
from specsamp.decoding.state import Finish
from specsamp.decoding.text import Continuation
from specsamp.serving.answer import Answer
from specsamp.serving.openai_replies import Reply
from specsamp.serving.openai_requests import read_request
from specsamp.serving.scores import Scores
from support.tokenizer_styles import tokenizer

TEXT = "é» ሰላም ᏣᎳᎩ 𐌲 Human\ufffd  is 👩‍👧 e\u0301."
STATS = RowStats(rounds=1, emitted=1, drafted=0, reached=(), accepted_counts=(1,), variation=0.25)
METHOD = Method(drafter=NoDrafter())


def replied(style, prompt, tokens, ends, is_chat=False, exact=True, **fields):
    """Returns the answer to a request, and chunks of its stream that end after ``ends`` tokens."""
    asked = (
        {"messages": [{"role": "user", "content": "a"}]} if is_chat else {"prompt": list(prompt)}
    )
    asked = read_request(asked | fields, is_chat=is_chat, model="m")
    request = Request(prompt=tuple(prompt), max_new_tokens=len(tokens), tokenizer=tokenizer(style))
    answer = Answer(asked.for_service(""), print, [request])
    everything = [*prompt, *tokens]
    others = [[(token, -1.0), (5, -2.0), (300, -3.0)] for token in everything[1:]]
    answer.scores[request] = Scores([-1.0] * len(everything[1:]), others)
    reply = Reply(asked, answer, "m", exact=exact)
    text = RowText(
        tokens=tokens,
        from_draft=[False] * len(tokens),
        log_probs=[-1.0] * len(tokens),
        finish=0,
        stats=STATS,
    )
    chunks = []
    for shown, end in zip([0, *ends], ends):
        finish = Finish.LENGTH if end == ends[-1] else Finish.RUNNING
        row = dataclasses.replace(
            text,
            tokens=tokens[:end],
            from_draft=[False] * end,
            log_probs=[-1.0] * end,
            finish=finish,
        )
        chunks.append(reply.chunk(Chunk.of(request, row, METHOD, shown=shown)))
    return reply.whole(), [chunk["choices"][0] for chunk in chunks if chunk]


STYLES = ["gpt2", "llama2", "gemma", "chatglm", "t5"]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("start", [1, 4, 9])
def test_streamed_token_names_join_to_the_text(style, start):
    text = tokenizer(style)
    tokens = text.encode(TEXT)
    prompt, rest = tokens[:start], tokens[start:]
    answer, chunks = replied(
        style, prompt, rest, [*range(2, len(rest), 3), len(rest)], logprobs=0, stream=True
    )
    (whole,) = answer["choices"]
    names = sum((chunk["logprobs"]["tokens"] for chunk in chunks if chunk["logprobs"]), [])
    offsets = sum((chunk["logprobs"]["text_offset"] for chunk in chunks if chunk["logprobs"]), [])
    names = [
        name if text.token_bytes(token) is not None else ""
        for token, name in zip(rest, names, strict=True)
    ]
    assert "".join(names) == whole["text"] == "".join(chunk["text"] for chunk in chunks)
    assert Continuation(text).complete(prompt) + whole["text"] == text.decode(tokens)
    assert offsets == list(itertools.accumulate(map(len, names), initial=0))[:-1]


def test_chunk_without_text_keeps_its_marks():
    """A part of a character adds no text yet."""
    first, *tokens = tokenizer("gpt2").encode(TEXT)
    ends = range(1, len(tokens) + 1)
    _, chunks = replied("gpt2", [first], tokens, ends, stream=True, mark_drafted=True)
    assert not all(chunk["text"] for chunk in chunks)
    assert [len(chunk["from_draft"]) for chunk in chunks] == [1] * len(tokens)


@pytest.mark.parametrize("style", STYLES)
def test_chat_token_bytes_join_to_the_text(style):
    """The text may end inside a character; a token without text has a name and no bytes."""
    text = tokenizer(style)
    prompt, tokens = text.encode("a."), text.encode(TEXT)[:-4]
    for rest in (tokens, [*tokens[:8], text.eos_id, *tokens[8:]]):
        answer, _ = replied(style, prompt, rest, [len(rest)], is_chat=True, logprobs=True)
        (whole,) = answer["choices"]
        entries = whole["logprobs"]["content"]
        joined = bytes(itertools.chain(*(entry["bytes"] or () for entry in entries)))
        assert joined.decode(errors="replace") == whole["message"]["content"]
        unnamed = [entry for entry in entries if entry["bytes"] is None]
        ends = [text.token(token) for token in rest if text.token_bytes(token) is None]
        assert [entry["token"] for entry in unnamed] == ends
        assert len(ends) >= len(rest) - len(tokens)


@pytest.mark.parametrize("style", STYLES)
def test_echo_has_token_names_and_offsets(style):
    """A special token of the prompt has a name, adds no text, and moves no offset."""
    text = tokenizer(style)
    tokens = text.encode(TEXT)
    answer, _ = replied(style, tokens[:6], tokens[6:], [len(tokens) - 6], logprobs=3, echo=True)
    (whole,) = answer["choices"]
    marks = whole["logprobs"]
    assert whole["text"] == text.decode(tokens)
    decoder = Continuation(text)

    def name(at, token):
        before = decoder.complete(tokens[:at])
        if text.token_bytes(token) is None:
            return text.token(token)
        return Continuation(text).complete([*tokens[:at], token]).removeprefix(before)

    assert marks["tokens"] == [name(at, token) for at, token in enumerate(tokens)]
    assert marks["text_offset"] == [len(decoder.complete(tokens[:at])) for at in range(len(tokens))]
    likeliest = [None if tops is None else set(tops) for tops in marks["top_logprobs"]]
    assert (
        likeliest[1:]
        == [{name(at, one) for one in (token, 5, 300)} for at, token in enumerate(tokens)][1:]
    )


def test_answer_of_a_lossy_rule_has_its_cost():
    answer, _ = replied("gpt2", [5], [6], [1], exact=False)
    assert (answer["exact"], answer["usage"]["total_variation"]) == (False, 0.25)
