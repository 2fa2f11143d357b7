"""Texts, streamed pieces and stop texts equal whole decoding, for tokenizers in many styles."""

import dataclasses
import itertools
import os
import re
import types

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specsamp import generate, stream
from specsamp.checkpoints.tokenizer import BYTE_OF_LETTER
from specsamp.decoding.request import make_stops
from specsamp.decoding.text import Continuation, Stops, TextStream
from support.byte_tokenizer import ByteTokenizer
from support.fakes import counting_pair
from support.tokenizer_styles import OTHER_STYLES, STYLES, tokenizer

ALL = (*STYLES, *OTHER_STYLES)
REPLACED = "\N{REPLACEMENT CHARACTER}"
WORDS = [
    "ሰላም",
    "ᏣᎳᎩ",
    "𐌲𐌿𐍄",
    "👩‍👩‍👧",
    "e\u0301",
    REPLACED,
    " ",
    "  ",
    "Human",
    " is",
    "é",
    "»",
    "\n\n",
    "▁",
    "def f(x):",
    ".",
]

several = settings(
    derandomize=True, deadline=None, max_examples=25, suppress_health_check=list(HealthCheck)
)


def reference(text, tokens):
    """Returns the library's text of tokens, after invalid runs of bytes are replaced."""
    pieces = [text.token(token) for token in tokens if token not in text._special]
    ids, byte = [], re.compile("<0x([0-9A-F]{2})>")
    for is_byte, run in itertools.groupby(
        pieces, lambda piece: bool(byte.fullmatch(piece)) and text._byte_of != {}
    ):
        run = list(run)
        if is_byte:
            mended = (
                bytes(int(byte.fullmatch(piece)[1], 16) for piece in run)
                .decode(errors="replace")
                .encode()
            )
            run = [f"<0x{value:02X}>" for value in mended]
        ids += map(text._tokenizer.token_to_id, run)
    return text._tokenizer.decode(ids)


def complete(text, tokens):
    """Returns the beginning of the text that stays the same under any further tokens."""
    whole = reference(text, tokens)
    if not whole.endswith(REPLACED):
        return whole
    more = [byte_token(text, value) for value in (0x80, 0x90, 0xA0, 0x41)]
    endings = [
        reference(text, [*tokens, *[one] * count])
        for one in more
        for count in (1, 2, 3)
        if one is not None
    ]
    return os.path.commonprefix([whole, *endings])


def byte_token(text, value):
    """Returns the token of a byte; None for a tokenizer without bytes."""
    letters = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
    return text._tokenizer.token_to_id(letters[value] if text.is_byte_level else f"<0x{value:02X}>")


@st.composite
def written(draw, style):
    """Draws a list of tokens: of words, of any ids, and of bytes that form no text."""
    text = tokenizer(style)
    words = st.lists(st.sampled_from(WORDS), max_size=6).map(
        lambda some: text.encode("".join(some))
    )
    some_bytes = [byte_token(text, value) for value in (0x20, 0x41, 0x82, 0xAC, 0xE2, 0xE1, 0xF0)]
    anything = st.lists(st.integers(0, text.vocab_size - 1), max_size=4)
    amiss = anything if None in some_bytes else st.lists(st.sampled_from(some_bytes), max_size=5)
    return sum(draw(st.lists(st.one_of(words, words, anything, amiss), max_size=4)), [])


def pair_of(text):
    return types.SimpleNamespace(
        tokenizer=text, target=types.SimpleNamespace(vocab_size=text.vocab_size), stop=None
    )


def cuts(draw, tokens):
    return sorted(draw(st.sets(st.integers(0, len(tokens)), max_size=5)))


@pytest.mark.parametrize("style", ALL)
def test_text_and_its_beginnings_equal_the_library(style):
    text = tokenizer(style)

    @several
    @given(written(style))
    def check(tokens):
        whole = text.decode(tokens)
        assert whole == reference(text, tokens)
        decoder = Continuation(text)
        assert decoder.decode(tokens[::-1]) == text.decode(tokens[::-1]), (
            "tokens that are not continued are forgotten"
        )
        for end in range(len(tokens) + 1):
            assert decoder.decode(tokens[:end]) == text.decode(tokens[:end])
            assert (
                decoder.complete(tokens[:end])
                == complete(text, tokens[:end])
                == whole[: decoder.steps(tokens[:end])[-1].size]
            )

    check()


@pytest.mark.parametrize("style", ALL)
def test_prompt_and_streamed_pieces_form_the_text(style):
    text = tokenizer(style)

    @several
    @given(st.data())
    def check(data):
        tokens = data.draw(written(style))
        start = data.draw(st.integers(0, len(tokens)))
        prompt, rest = tokens[:start], tokens[start:]
        pieces = TextStream(Continuation(text, prompt))
        shown = [pieces.push(rest[:end], False) for end in cuts(data.draw, rest)] + [
            pieces.push(rest, True)
        ]
        assert Continuation(text).complete(prompt) + "".join(shown) == text.decode(tokens)

    check()


@pytest.mark.parametrize("style", ALL)
def test_stop_text_is_found_exactly_in_text(style):
    """A stop text is found in any tokens, as early as possible, and is never streamed."""
    text = tokenizer(style)
    pair = pair_of(text)

    @several
    @given(st.data())
    def check(data):
        tokens = data.draw(written(style))
        starts = [complete(text, tokens[:end]) for end in range(len(tokens) + 1)]
        some = starts[-1][data.draw(st.integers(0, 12)) :][: data.draw(st.integers(1, 4))]
        entries = [*filter(None, [some]), *data.draw(st.lists(st.sampled_from(WORDS), max_size=2))]
        least = data.draw(st.sampled_from([0, 0, 2]))
        stops = make_stops(pair, entries, least)
        assert stops.texts == tuple(entries) and not stops.ids
        before = len(starts[min(least, len(tokens))])

        def begin(end):
            """Returns the first start of a stop text that ends after the least tokens, or None."""
            found = [
                at
                for entry in entries
                for at in range(max(before + 1 - len(entry), 0), len(starts[end]))
                if starts[end].startswith(entry, at)
            ]
            return min(found, default=None)

        count = next((end for end in range(len(tokens) + 1) if begin(end) is not None), None)
        assert stops.count(Continuation(text), tokens) == count
        ended = next((end + 1 for end, token in enumerate(tokens) if token in stops.sure), None)
        assert ended is None or count is not None and count <= ended, (
            "the loop ends where the text does"
        )
        kept = tokens[:count]
        expected = text.decode(kept) if count is None else starts[count][: begin(count)]
        assert stops.text(Continuation(text), kept) == expected
        pieces = TextStream(Continuation(text), stops)
        shown = [
            pieces.push(kept[:end], False)
            for end in cuts(data.draw, kept)
            if end < (count or len(tokens) + 1)
        ]
        assert "".join([*shown, pieces.push(kept, True)]) == expected

    check()


@pytest.mark.parametrize("style", STYLES)
def test_stop_text_equal_to_token_name_is_text(style):
    """Byte-level tokenizers name byte E9 "é"; SentencePiece names spaces "▁", Gemma also runs of
    them.
    """
    for text in (tokenizer(style), tokenizer("gemma3")):
        pair = pair_of(text)
        for entry in (*map(chr, range(0x21, 0x180)), "▁", "▁▁", "Ġ", "<0x0A>", "Ċ", "<tool>"):
            stops = make_stops(pair, [entry])
            assert stops.texts == (entry,) and not stops.ids
            assert all(text.token_bytes(token, token) == entry.encode() for token in stops.sure), (
                entry
            )


def test_stop_name_of_textless_token_is_that_token():
    for style, name in (
        ("qwen", "<|im_end|>"),
        ("llama2", "</s>"),
        ("llama3", "<|begin_of_text|>"),
    ):
        text = tokenizer(style)
        pair = pair_of(text)
        assert make_stops(pair, [name, 5]) == Stops(frozenset([text.token_id(name), 5]))


def test_stop_word_ends_text_at_end_or_inside():
    """The text of SentencePiece's token "▁Human" is " Human", or "Human" at the start of a text."""
    text = tokenizer("t5")
    assert text.encode("Human") == [text.token_id("▁Human")] == [text.token_id("Human")], (
        "the control"
    )
    tokens = text.encode("a Human is")
    for entry in ("Human", "Human is"):
        stops = make_stops(pair_of(text), [entry])
        kept = tokens[: stops.count(Continuation(text), tokens)]
        assert stops.text(Continuation(text), kept) == "a " and not stops.sure, entry


def test_stop_token_hides_no_earlier_stop_text():
    text = tokenizer("gpt2")
    tokens = [text.token_id(piece) for piece in ("x", " ", "  ")]
    stops = make_stops(pair_of(text), ["  "])
    assert stops.sure == {tokens[2]} and text.decode(tokens) == "x   "
    assert stops.count(Continuation(text), tokens) == 3
    assert stops.text(Continuation(text), tokens) == "x"


@pytest.mark.parametrize("style", ["llama2", "gemma", "qwen"])
@pytest.mark.parametrize("whole", ["a " + "ሰላም ለዓለም" * 3, f"a{REPLACED}bc"])
def test_prompt_that_ends_anywhere_is_continued(style, whole):
    """Also inside the bytes of a character, and after a replacement character."""
    text = tokenizer(style)
    tokens = text.encode(whole)
    for start in range(1, len(tokens) + 1):
        begun = Continuation(text).complete(tokens[:start])
        continued = Continuation(text, tokens[:start]).decode(tokens[start:])
        assert begun + continued == text.decode(tokens)


@dataclasses.dataclass(frozen=True)
class Script(ByteTokenizer):
    """Maps id n to the n-th token of a text, so that a counting model writes the text."""

    inner: object
    tokens: tuple

    def token_bytes(self, token, before=None):
        if token >= len(self.tokens):
            return None
        return self.inner.token_bytes(
            self.tokens[token], None if before is None else self.tokens[before]
        )


@pytest.mark.parametrize("style", ["llama2", "gemma", "qwen", "chatglm"])
def test_streamed_text_is_whole_at_every_budget(style):
    """A text may end by its budget, inside a character too, or by a stop text."""
    text = tokenizer(style)
    tokens = text.encode(" é» ሰላም Human\ufffd is 👩‍👧 .")
    pair = dataclasses.replace(counting_pair(), tokenizer=Script(text, tuple(tokens)))
    budgets = range(1, 25)  # up to the last character
    assert len(tokens) > budgets[-1] + 8
    prompts = [list(range((1, 4, 8)[index % 3])) for index, _ in enumerate(budgets)]
    for stop in ("never", "ላ", "Human", "Human is", " "):
        settings = dict(max_new_tokens=list(budgets), draft_length=2, stop=[stop])
        rows = generate(pair, prompts, **settings)
        shown = [""] * len(rows)
        for chunk in stream(pair, prompts, rounds_per_chunk=1, **settings):
            shown[chunk.prompt_index] += chunk.text
        for budget, prompt, row, streamed in zip(budgets, prompts, rows, shown, strict=True):
            before = Continuation(text).complete(tokens[: len(prompt)])
            whole = text.decode(tokens[: len(prompt) + budget]).removeprefix(before)
            assert row.text == streamed == whole.partition(stop)[0], (stop, len(prompt), budget)
            assert row.finish == ("stop" if stop in whole else "length")
            assert row.text == whole or stop not in text.decode(
                tokens[len(prompt) :][: len(row.tokens) - 1]
            )
