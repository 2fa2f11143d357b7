"""Two tokenizers are matched by the bytes of their tokens, in the styles of public models."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specsamp import ModelDrafter, generate
from specsamp.checkpoints.export import export
from specsamp.checkpoints.public_pair import read_pair
from specsamp.checkpoints.tokenizer import EOS, JsonTokenizer
from specsamp.checkpoints.vocabulary import (
    TokenBytes,
    describe_overlap,
    match_vocabularies,
    shared_mass,
)
from specsamp.decoding.drafters.translating import SharedVocabulary
from specsamp.training.data import train_tokenizer
from support.checkpoint_shapes import CONFIG, random_params
from support.fakes import TableLM
from support.refusals import refusal
from support.tokenizer_styles import STYLES, tokenizer


@functools.cache
def matched(target, draft):
    return match_vocabularies(tokenizer(target), tokenizer(draft))


@pytest.mark.parametrize("target, draft", [*itertools.permutations(STYLES, 2), ("qwen", "qwen")])
def test_draft_ids_have_the_bytes_of_the_text(target, draft):
    vocabulary = matched(target, draft)
    ours = TokenBytes(tokenizer(target), "")
    theirs = TokenBytes(tokenizer(draft), "")
    text = "def f(x):\n    return naïve, 数学, 1234567 – ¼\n"
    tokens = tokenizer(target).encode(text)
    written = b"".join(theirs.of_id[i] for i in vocabulary.read(tokens))
    assert written == b"".join(ours.of_id.get(i, b"") for i in tokens)
    assert written.decode().strip(" ") == text.strip(" "), (
        "SentencePiece writes a space before a text"
    )
    for token in np.flatnonzero(vocabulary.draft_ids_V >= 0):
        if token != tokenizer(target).eos_id:
            assert ours.of_id[token] == theirs.of_id[vocabulary.draft_ids_V[token]]


@pytest.mark.parametrize("target, draft", [("llama3", "llama2"), ("gemma", "qwen")])
def test_only_end_tokens_are_matched_among_special_ones(target, draft):
    vocabulary = matched(target, draft)
    ours = tokenizer(target)
    theirs = tokenizer(draft)
    assert vocabulary.draft_ids_V[ours.eos_id] == theirs.eos_id
    assert vocabulary.read([ours.eos_id]) == [theirs.eos_id]
    begin = ours.token_id({"llama3": "<|begin_of_text|>", "gemma": "<s>"}[target])
    assert vocabulary.read([begin]) == [] and vocabulary.draft_ids_V[begin] == -1
    assert vocabulary.begin == ((theirs.token_id("<s>"),) if draft == "llama2" else ())


@pytest.mark.parametrize("style", STYLES)
def test_ordinary_added_tokens_are_matched_by_text(style):
    """Gemma and GPT-NeoX have added tokens for several spaces, in different spellings."""
    given = tokenizers.Tokenizer.from_str(tokenizer(style).to_json())
    names = ["▁▁", "▁▁▁▁▁▁", "  ", "\n\n", "<table>", "<｜User｜>", "é"]
    given.add_tokens(
        [tokenizers.AddedToken(name, normalized=False, special=False) for name in names]
    )
    made = JsonTokenizer.from_tokenizer(given)
    own = TokenBytes(made, "")
    letter = given.encode("x=", add_special_tokens=False).ids
    for name in names:
        ids = [*letter, given.token_to_id(name), *letter]
        written = b"".join(own.of_id[i] for i in ids)
        assert written.decode(errors="replace").strip() == made.decode(ids).strip(), name
    spaces = own.of_id[given.token_to_id("▁▁")]
    assert spaces == (b"  " if style in ("llama2", "gemma") else "▁▁".encode())


def test_byte_with_two_tokens_matches_the_written_one():
    """The letter A is both an ordinary token and a fallback for its byte."""
    gemma = tokenizer("gemma")
    letter, byte = gemma.token_id("A"), gemma.token_id("<0x41>")
    assert letter != byte and TokenBytes(gemma, "").ids[b"A"] == letter
    vocabulary = matched("gemma", "gpt2")
    assert vocabulary.draft_ids_V[letter] >= 0 and vocabulary.draft_ids_V[byte] == -1
    assert vocabulary.read([byte]) == vocabulary.read([letter])


def test_equal_tokenizers_share_all_read_tokens():
    vocabulary = matched("qwen", "qwen")
    assert vocabulary.reading_VM.shape[1] == 1 and vocabulary.ids_per_token == 1
    assert vocabulary.num_shared == (vocabulary.reading_VM[:, 0] >= 0).sum()


def test_long_tokens_are_read_by_their_last_ids(monkeypatch):
    whole = matched("llama3", "gpt2")
    monkeypatch.setattr("specsamp.checkpoints.vocabulary.MOST_IDS", 2)
    cut = match_vocabularies(tokenizer("llama3"), tokenizer("gpt2"))
    long = np.flatnonzero((whole.reading_VM >= 0).sum(1) > 2)
    assert len(long) == cut.num_cut > 0 == whole.num_cut
    token = long[0]
    assert cut.read([token]) == whole.read([token])[-2:]
    assert f"of {len(long) / len(cut.draft_ids_V):.1%} the last 2 alone" in describe_overlap(cut)
    assert describe_overlap(whole).startswith(
        f"the draft has another tokenizer: it can propose {whole.num_shared} of the target's"
    )


def test_shared_mass_is_measured_on_the_draft():
    vocabulary = SharedVocabulary([2, -1, 0], [[2, -1], [3, 1], [0, -1]], 4, begin=(1,))
    table = np.log(np.broadcast_to(np.float32([0.1, 0.2, 0.3, 0.4]), (5, 5, 5, 4)))
    assert shared_mass(
        TableLM(4), jax.numpy.asarray(table), vocabulary, [[0, 1], [2]]
    ) == pytest.approx(0.4)


def test_tokenizers_that_do_not_match_are_refused():
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with refusal("the draft's tokenizer is a WordLevel"):
        match_vocabularies(tokenizer("gpt2"), JsonTokenizer.from_tokenizer(words))
    few = tokenizers.Tokenizer(models.BPE({"Ġ": 0, "a": 1, "b": 2}, []))
    few.decoder = decoders.ByteLevel()
    with refusal("no token of the draft has the byte 0x"):
        match_vocabularies(tokenizer("gpt2"), JsonTokenizer.from_tokenizer(few))
    letters = {character: i for i, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    apart = []
    for pair in ("qz", "jk"):
        words = map("".join, itertools.product(pair, repeat=12))
        vocabulary = letters | {word: 256 + i for i, word in enumerate(words)}
        apart.append(tokenizers.Tokenizer(models.BPE(vocabulary, [])))
        apart[-1].decoder = decoders.ByteLevel()
    with refusal("share 256 tokens, less than 10% of the smaller vocabulary of 4352"):
        match_vocabularies(*map(JsonTokenizer.from_tokenizer, apart))


@pytest.fixture(scope="module")
def other_draft(tmp_path_factory):
    """Writes a draft whose tokenizer was trained on other texts than the target's."""
    folder = tmp_path_factory.mktemp("other") / "draft"
    config = dataclasses.replace(CONFIG, vocab_size=320, num_layers=1, max_positions=64)
    other = train_tokenizer(["class Tree: value = None  # ünï, return"] * 3, 310)
    export(folder, config, random_params(config, 1), JsonTokenizer.from_tokenizer(other, eos=EOS))
    return folder


def test_unsuitable_pairs_of_two_tokenizers_are_refused(original, other_draft):
    with refusal("differ in their vocabulary.*--config.hugging_face.other_vocabulary"):
        read_pair(original, other_draft, dtype="float32")
    with refusal("other_vocabulary is for draft models, but a head"):
        read_pair(original, other_draft, is_head=True, other_vocabulary=True)
    said = []
    options = dict(other_vocabulary=True, dtype="float32", say=said.append)
    pair = read_pair(original, other_draft, **options)
    assert f"it can propose {pair.vocabulary.num_shared} of the target's 304 tokens" in said[0]
    with refusal("the pair's draft has another tokenizer"):
        generate(pair, ["def"], 4, drafter=ModelDrafter(pair.draft, 2))
    with refusal("a vocabulary was given without a draft model"):
        dataclasses.replace(pair, draft=None, draft_params=None)
