"""Conversations that a target writes itself: shards, resumption, and dropped questions."""

import json

import numpy as np
import pytest
from etils import epath

from specsamp import Pair
from specsamp.decoding.text import Continuation
from specsamp.training.conversations import borders, write_conversations
from specsamp.training.data import read_corpus
from support.fakes import TableLM, random_table
from support.refusals import refusal

END, BEGIN, USER, ANSWER, LETTERS = 0, 1, 2, 3, 4
VOCABULARY = 20


class Letters:
    """A tokenizer of sixteen letters with a chat template of four special tokens."""

    vocab_size, eos_id = VOCABULARY, END

    def encode(self, text):
        return [LETTERS + ord(letter) % 16 for letter in text]

    def encode_chat(self, messages, **_):
        (message,) = messages
        return [BEGIN, USER, *self.encode(message["content"]), END, ANSWER]

    def decode(self, tokens):
        return Continuation(self).decode(tokens)

    def token_bytes(self, token, before=None):
        return bytes([ord("p") + token - LETTERS]) if token >= LETTERS else None

    def token_id(self, text):
        return None

    def token(self, index):
        return str(index)


def pair_of(table):
    return Pair(target=TableLM(VOCABULARY), target_params=table, tokenizer=Letters())


def write(folder, tokens, table, **options):
    sizes = dict(shard=8, rows=4, longest_question=12, longest_answer=12)
    write_conversations(epath.Path(folder), pair_of(table), tokens=tokens, **sizes | options)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def table():
    return random_table(7, VOCABULARY, scale=0.3)


@pytest.mark.slow
def test_longer_run_continues_a_shorter_one(tmp_path, table):
    first = write(tmp_path / "a", 100, table)
    more = write(tmp_path / "a", 400, table)
    assert more.items() > first.items()
    assert write(tmp_path / "b", 400, table) == more
    (tmp_path / "b" / "0001.json").unlink()  # killed between the two files of a shard
    (tmp_path / "b" / "0001.npy").unlink()
    assert write(tmp_path / "b", 400, table) == more
    assert write(tmp_path / "c", 400, table, seed=1) != more


def test_conversations_are_whole_and_no_question_comes_twice(tmp_path, table):
    write(tmp_path, 400, table)
    questions = []
    for path in sorted(tmp_path.glob("*.npy")):
        tokens = np.load(path)
        told = json.loads(path.with_suffix(".json").read_text())
        assert tokens.dtype == np.uint8 and told["questions"] == 8
        starts = [start for start, _ in told["conversations"]] + [len(tokens)]
        ended = 0
        for (start, length), end in zip(told["conversations"], starts[1:]):
            prompt = tokens[start : start + length].tolist()
            answer = tokens[start + length : end].tolist()
            assert prompt[:2] == [BEGIN, USER]
            assert prompt[-2:] == [END, ANSWER]
            assert 0 < len(prompt) - 4 < 12
            assert END not in answer[:-1] and len(answer) <= 12
            questions.append(tuple(prompt))
            ended += answer[-1] == END
        assert told["ended"] == ended
    assert len(set(questions)) == len(questions) > 8
    assert borders(pair_of(table)) == ([BEGIN, USER], [END, ANSWER])
    texts = read_corpus(tmp_path, pattern="*.npy", held_out=0).train
    assert sum(map(len, texts.values())) >= 400


def asks_and_answers(after_question):
    """Returns the table of a target that writes the question "q", ``after_question``, and the
    answer "r".
    """
    table = np.full((VOCABULARY + 1,) * 3 + (VOCABULARY,), -1e9, np.float32)
    for before, token in (
        (USER, LETTERS + 1),
        (LETTERS + 1, after_question),
        (ANSWER, LETTERS + 2),
        (LETTERS + 2, END),
    ):
        table[:, :, before, token] = 0
    return table


def test_repeated_questions_end_in_one_line(tmp_path):
    """The target always writes the question "q"."""
    table = asks_and_answers(END)
    with refusal("none of 8 questions ended and was new: raise longest_question or shard"):
        write(tmp_path, 1000, table)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0000.json",
        "0000.npy",
        "written_by.json",
    ]


class Instructions(Letters):
    """A tokenizer whose template, like Mistral's, ends questions with a token that ends no text."""

    def encode_chat(self, messages, **_):
        (message,) = messages
        return [BEGIN, USER, *self.encode(message["content"]), ANSWER]


def test_question_ends_where_the_answer_begins(tmp_path):
    """The target writes the question "q" and the answer "r"."""
    table = asks_and_answers(ANSWER)
    pair = Pair(target=TableLM(VOCABULARY), target_params=table, tokenizer=Instructions())
    write_conversations(
        epath.Path(tmp_path),
        pair,
        tokens=1,
        shard=8,
        rows=4,
        longest_question=12,
        longest_answer=12,
    )
    expected = [BEGIN, USER, LETTERS + 1, ANSWER, LETTERS + 2, END]
    assert np.load(tmp_path / "0000.npy").tolist() == expected


@pytest.mark.parametrize("changed", [{"seed": 1}, {"coolest": 0.5}, {"shard": 9}, {"table": 8}])
def test_folder_of_another_run_is_refused(tmp_path, table, changed):
    write(tmp_path, 10, table)
    other = random_table(changed.pop("table", 7), VOCABULARY, scale=0.3)
    with refusal("holds other conversations: .*Name another folder"):
        write(tmp_path, 400, other, **changed)
    assert not (tmp_path / "0001.npy").exists()
    (tmp_path / "written_by.json").unlink()
    with refusal("holds arrays of something else: name another folder"):
        write(tmp_path, 400, table)
    assert not (tmp_path / "written_by.json").exists()


@pytest.mark.parametrize(
    "options, message", [({"coolest": 1.5}, "coolest"), ({"shard": 0}, "shard")]
)
def test_numbers_out_of_range_are_refused(tmp_path, table, options, message):
    with refusal(message):
        write(tmp_path, 10, table, **options)
