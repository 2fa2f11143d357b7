"""Tokenizers: special tokens, ids with gaps, settings without effect, and unknown words."""

import pathlib

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from specsamp import load_pair
from specsamp.checkpoints.hugging_face import open_checkpoint
from specsamp.checkpoints.tokenizer import JsonTokenizer
from support.refusals import refusal, refused_calls


def saved(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def with_specials(tmp_path):
    """Returns a tokenizer that begins texts with <s>, like Llama's; no token has id 4, and the last
    has 5.
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
    """Truncation and padding in the file have no effect, as by default in transformers."""
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
    with refusal("has no token '<end>'"):
        JsonTokenizer(tmp_path / "tokenizer.json", eos="<end>")


def test_texts_of_unknown_words_differ():
    tokenizer = load_pair("digits").tokenizer
    assert tokenizer.knows("3 def 4") and not tokenizer.knows("def main")
    assert load_pair("python").tokenizer.knows("def main")


HERE = pathlib.Path()  # an empty folder
EMPTY = tokenizers.Tokenizer(tokenizers.models.BPE())

test_refused_tokenizers = refused_calls(
    {
        "no tokenizer at": lambda: JsonTokenizer(HERE / "elsewhere.json"),
        "tokenizer.json has no tokens": lambda: JsonTokenizer(saved(EMPTY, HERE)),
        "has no config.json": lambda: open_checkpoint(HERE),
        "no folder 'nothing/of/this'; give one, or the id": lambda: open_checkpoint(
            "nothing/of/this"
        ),
    }
)
