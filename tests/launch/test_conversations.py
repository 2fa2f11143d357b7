"""launch/generate.py --conversations writes a target's texts for training, and the study searches
them for prompts of tests.
"""

import json
import shutil

import numpy as np
import pytest

from launch.studies import conversations as study
from specsamp.checkpoints.hugging_face import open_checkpoint
from specsamp.training.data import read_corpus
from support.run_script import call, read_cells, save_public_target, succeed


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_public_target(tmp_path_factory.mktemp("public") / "target")


@pytest.fixture(scope="module")
def chats(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "chats"
    flags = (
        f"--config=configs/hf.py:{target}",
        "--config.drafter=none",
        "--config.hugging_face.dtype=float32",
    )
    succeed(
        "generate",
        *flags,
        "--conversations=500",
        f"--output={folder}",
        "--rows=8",
        "--config.max_new_tokens=9",
    )
    return folder


def measured(target, chats, tmp_path, test, *more, name="result"):
    path = tmp_path / f"{name}.jsonl"
    path.write_text(json.dumps({"question_id": 1, "category": "writing", "turns": [test]}))
    output = tmp_path / f"{name}.json"
    flags = (
        f"--target={target}",
        f"--folder={chats}",
        f"--tests=mt_bench={path}",
        f"--output={output}",
        *more,
    )
    return call("study", "conversations", *flags), output


@pytest.mark.slow
def test_conversations_are_written_counted_and_read_for_training(target, chats, tmp_path):
    done, output = measured(target, chats, tmp_path, "one two three four five six")
    assert (done.returncode or 0) == 0, done.stderr
    (cell,) = read_cells(output)
    found, tokens = cell["result"], np.load(chats / "0000.npy")
    assert tokens.dtype == np.uint16 and found["tokens"] == len(tokens) >= 500
    assert 0 < found["answers_that_end"] < 1
    assert 0 < found["distinct_4_grams"] <= 1
    assert found["tests"]["mt_bench"]["looked_for"] == 1
    corpus = read_corpus(chats, pattern="*.npy", held_out=0.3)
    assert len(corpus.train) + len(corpus.held_out) == found["conversations"]
    assert corpus.held_out, "of a single shard, too"
    whole = read_corpus(chats, pattern="*.npy", held_out=0).train.values()
    assert np.concatenate(list(whole)).tolist() == tokens.tolist()


def test_prompts_of_a_test_set_are_refused(target, chats, tmp_path):
    places = json.loads((chats / "0000.json").read_text())["conversations"]
    decode = open_checkpoint(target).tokenizer.decode
    starts = [start for start, _ in places] + [None]
    texts = [
        decode(np.load(chats / "0000.npy")[one:two].tolist())
        for one, two in zip(starts, starts[1:])
    ]
    text = max(texts, key=lambda text: len(study.words_of(text)))
    assert len(study.words_of(text)) >= study.SHORTEST
    done, output = measured(target, chats, tmp_path, text)
    assert done.returncode == 2 and "holds 1 prompts of tests, such as mt_bench 1" in done.stderr
    assert not output.exists()


def test_conversations_with_prompts_drop_from_their_shard(target, chats, tmp_path):
    before = read_corpus(chats, pattern="*.npy", held_out=0).train
    longest = max(before.values(), key=len)
    text = open_checkpoint(target).tokenizer.decode(longest.tolist())
    copy = shutil.copytree(chats, tmp_path / "copy")
    done, output = measured(target, copy, tmp_path, text, "--drop")
    assert (done.returncode or 0) == 0, done.stderr
    (cell,) = read_cells(output)
    left = read_corpus(copy, pattern="*.npy", held_out=0).train
    assert 0 < len(left) == cell["result"]["conversations"] < len(before)
    written = {tuple(tokens.tolist()) for tokens in before.values()}
    assert {tuple(tokens.tolist()) for tokens in left.values()} <= written - {
        tuple(longest.tolist())
    }


def test_words_before_and_after_special_tokens_are_apart(target):
    """Special tokens separate words: Llama 3's template ends a question without a line break."""
    tokenizer = open_checkpoint(target).tokenizer
    tokens = [*tokenizer.encode("add 3 to x"), tokenizer.eos_id, *tokenizer.encode("x + 3")]
    assert study.words_of(study.text_of(tokenizer, tokens)) == ["add", "3", "to", "x", "x", "3"]


def test_test_prompts_are_searched_turn_by_turn():
    turns = [
        ("1", "one two three four five"),
        ("1", "too short"),
        ("2", "请解释量子力学"),
        ("3", "a b " * 7),
    ]
    parts = list(study.parts_of(turns))
    assert parts[0] == ("1", ("one", "two", "three", "four", "five"))
    assert parts[1] == ("2", tuple("请解释量子力学"))
    assert parts[2:] == [("3", ("a", "b") * 6 + ("a",)), ("3", ("b", "a") * 6 + ("b",))]
