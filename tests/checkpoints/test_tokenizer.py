"""Tokenizers: special tokens, ids with gaps, and text that is streamed while bytes are missing."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.checkpoints.trained_pair import load_pair
from specsamp.decoding.text import Continuation, TextStream
from support.byte_tokenizer import ByteTokenizer


def saved(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def with_specials(tmp_path):
    """A tokenizer that begins every text with <s>, as Llama's does; id 5 is the last of a
    vocabulary with a gap.
    """
    vocab = {"<s>": 0, "</s>": 1, ".": 2, "a": 3, "b": 5}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return JsonTokenizer(saved(tokenizer, tmp_path), eos="</s>")


def test_special_tokens_begin_prompts_but_not_stop_texts(with_specials):
    assert with_specials.encode("ab.") == [0, 3, 5, 2]
    assert with_specials.token_id(".") == 2 and with_specials.token_id("</s>") == 1
    assert with_specials.token_id("ab") is None
    assert with_specials.token(3) == "a" and with_specials.token(4) == ""
    assert with_specials.vocab_size == 6  # reaches the largest id


def test_texts_are_neither_cut_nor_filled_up(with_specials, tmp_path):
    """Whatever a training run left in the file; transformers ignores it too unless it is asked."""
    tokenizer = tokenizers.Tokenizer.from_str(with_specials.to_json())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    assert len(tokenizer.encode("abab").ids) == 8
    assert (
        JsonTokenizer(saved(tokenizer, tmp_path)).encode("abab")
        == with_specials.encode("abab")
        == [0, 3, 5, 3, 5]
    )


def test_damaged_tokenizers_are_named(with_specials, tmp_path):
    with pytest.raises(ValueError, match="has no token '<end>'"):
        JsonTokenizer(tmp_path / "tokenizer.json", eos="<end>")


@pytest.fixture
def with_byte_fallback(tmp_path):
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "<unk>": 257}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return JsonTokenizer(saved(tokenizer, tmp_path))


def pieces(tokenizer, tokens, step):
    stream = TextStream(Continuation(tokenizer))
    ends = list(range(step, len(tokens), step)) + [len(tokens)]
    return [stream.push(tokens[:end], end == len(tokens)) for end in ends]


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_streamed_pieces_make_the_whole_text(with_byte_fallback, step):
    for text in ("€€éa", "aé€a€", "ééé"):
        for tokenizer in (with_byte_fallback, ByteTokenizer()):
            tokens = tokenizer.encode(text)
            assert "".join(pieces(tokenizer, tokens, step)) == tokenizer.decode(tokens) == text


def test_an_incomplete_character_makes_none_before_it_unknown(with_byte_fallback):
    """As the library does, which is the control."""
    tokens = with_byte_fallback.encode("€€")[:4]
    assert with_byte_fallback.decode(tokens) == "€\N{REPLACEMENT CHARACTER}"
    assert "€" not in with_byte_fallback._tokenizer.decode(tokens)


def test_text_that_ends_in_the_middle_of_a_character_is_shown_at_the_end():
    assert pieces(ByteTokenizer(), list("a€".encode())[:3], 1) == [
        "a",
        "",
        "\N{REPLACEMENT CHARACTER}",
    ]


def test_texts_of_unknown_words_are_refused():
    tokenizer = load_pair("digits").tokenizer
    assert tokenizer.encode("3 def 4")[0] == 3
    with pytest.raises(ValueError, match="knows no word of 'def main': it reads words such as 0"):
        tokenizer.encode("def main")
