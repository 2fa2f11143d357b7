"""Corpora, tokenizers and windows: functions of the files, the seed and the step."""

import json
import pathlib
import types

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from specsamp.checkpoints.chat import ChatTemplate
from specsamp.checkpoints.tokenizer import EOS, JsonTokenizer
from specsamp.training.data import (
    Mixture,
    Windows,
    held_out_windows,
    integer_tokenizer,
    read_corpus,
    standard_library,
    token_stream,
    train_tokenizer,
)
from support import extras
from support.refusals import refusal, refused_calls

LETTERS = types.SimpleNamespace(encode=lambda text: [ord(c) for c in text], eos_id=0)


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


FILES = {f"package_{i % 3}/module_{i}.py": f"value = {i}\n" for i in range(40)}


def test_a_files_side_depends_on_its_path_alone(tmp_path):
    before = read_corpus(write(tmp_path / "one", FILES), held_out=0.3)
    assert 5 < len(before.held_out) < 20 and len(before.train) + len(before.held_out) == len(FILES)
    others = {f"later/{i}.py": "x = 1\n" for i in range(40)} | {
        name: "changed = True\n" for name in FILES
    }
    after = read_corpus(write(tmp_path / "moved" / "elsewhere", others), held_out=0.3)
    assert after.held_out.keys() & FILES.keys() == before.held_out.keys()
    assert after.train.keys() & FILES.keys() == before.train.keys()
    # The hash spreads new files as well.
    assert {name for name in after.held_out if name.startswith("later/")}


def test_contents_are_read_and_omissions_counted(tmp_path):
    files = {
        "a.py": "x = 'é'\r\n",
        "latin.py": "é".encode("latin-1"),
        "empty.py": " \n",
        "test/b.py": "2",
    }
    corpus = read_corpus(
        write(tmp_path, files | {"deep/test_d.py": "4", "e.txt": "5"}),
        exclude=("test", "*_d.py"),
        held_out=0.0,
    )
    assert corpus.train == {"a.py": "x = 'é'\r\n"}
    assert corpus.held_out == {}
    assert corpus.skipped == ("latin.py",)
    counts = {
        "train_files": 1,
        "train_bytes": 10,
        "held_out_files": 0,
        "held_out_bytes": 0,
        "skipped_files": 1,
    }
    assert corpus.describe() == {"sha256": corpus.digest} | counts
    assert read_corpus(tmp_path, pattern="*.txt", held_out=0.0).train.keys() == {"e.txt"}


def test_the_digest_sees_every_content_and_path(tmp_path):
    files = {f"{name}.py": f"value = '{name}'\n" for name in "abc"}
    changed = files | {"a.py": "value = -1\n"}, {name: files[name] for name in ("b.py", "c.py")}
    moved = changed[1] | {"moved.py": files["a.py"]}
    corpora = [
        read_corpus(write(tmp_path / str(i), made))
        for i, made in enumerate((files, *changed, moved, files))
    ]
    assert len({corpus.digest for corpus in corpora}) == 4
    assert corpora[0].digest == corpora[4].digest


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    made = train_tokenizer([(standard_library() / "ast.py").read_text()], 300)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return JsonTokenizer(path, eos=EOS)


def test_any_text_survives_the_tokenizer(tokenizer):
    text = (
        "".join(map(chr, range(0x250)))
        + "日本語 🐍\u2028 e\u0301\r\n\t \x0c  def f(x):\n\n\n    return x\n"
    )
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("def ")) < 4  # it has merges


def test_the_end_of_text_is_the_last_id(tokenizer):
    assert tokenizer.vocab_size == 300 and tokenizer.eos_id == 299 and tokenizer.token(299) == EOS
    few = train_tokenizer(["ab"], 300)  # fewer merges than ids
    assert few.token_to_id(EOS) == max(few.get_vocab().values()) < 299
    assert train_tokenizer(["ab"], 300, "<end>").token_to_id("<end>") == few.token_to_id(EOS)


STREAM = np.arange(103, dtype=np.int32)


def test_batches_hold_rows_of_seed_and_step():
    """This also holds across epochs: 60 rows are more than five epochs of 11."""
    windows = Windows(STREAM, 8, seed=3)
    other = Windows(STREAM, 8, seed=4)
    assert windows.per_epoch == 11

    def rows(size):
        return np.concatenate(
            [windows.batch(step, size) for step in reversed(range(60 // size))][::-1]
        )

    assert_array_equal(rows(4), rows(60))
    assert_array_equal(rows(15), rows(60))
    assert (other.batch(5, 4) != windows.batch(5, 4)).any()
    assert (windows.batch(6, 4) != windows.batch(5, 4)).any()


@pytest.mark.parametrize("tokens", [103, 104, 105])
def test_an_epoch_has_every_window_once(tokens):
    windows = Windows(np.arange(tokens, dtype=np.int32), 8)
    starts = []
    for epoch in range(6):
        rows = windows.batch(epoch, windows.per_epoch)
        # Tokens are consecutive, so labels are shifted inputs.
        assert_array_equal(rows, rows[:, :1] + np.arange(9))
        inputs = np.sort(rows[:, :-1].ravel())
        assert_array_equal(inputs, inputs[0] + np.arange(8 * windows.per_epoch))
        assert inputs[0] < 8 and rows.max() < tokens
        starts.append(rows[:, 0].tolist())
    assert all(order != sorted(order) for order in starts)
    assert len({order[0] % 8 for order in starts}) > 1  # cut at different offsets
    with refusal(r"16 tokens are too few for windows of 8 \+ 1"):
        Windows(STREAM[:16], 8)


def test_held_out_windows_spread_over_the_texts(tmp_path):
    corpus = read_corpus(write(tmp_path, {f"{i}.py": "x" * 50 for i in range(30)}), held_out=0.5)
    stream = token_stream(corpus.held_out, LETTERS)
    every = held_out_windows(corpus, LETTERS, 8, 10**6)
    assert_array_equal(every, Windows(stream, 8).in_order())
    some = held_out_windows(corpus, LETTERS, 8, 5)
    assert_array_equal(some[[0, -1]], every[[0, -1]])
    assert some.shape == (5, 9)
    with refusal("data.held_out_windows must be .*; got 0"):
        held_out_windows(corpus, LETTERS, 8, 0)
    with refusal(f"have {len(stream)} tokens.* raise data.held_out"):
        held_out_windows(corpus, LETTERS, len(stream), 5)


def test_mixture_has_its_shares_per_epoch():
    windows = Windows(STREAM, 8)
    rows = 1000 + np.arange(12, dtype=np.int32)[:, None] + np.zeros(9, np.int32)
    mixture = Mixture(windows, rows, share=0.5)
    batches = [mixture.batch(step, 6) for step in range(8)]
    assert all((batch[:, 0] >= 1000).sum() == 3 for batch in batches)
    assert_array_equal(np.concatenate([batch[:3] for batch in batches]), windows.batch(0, 24))
    drawn = np.concatenate([batch[3:, 0] for batch in batches]) - 1000
    first, second = drawn[:12].tolist(), drawn[12:].tolist()
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second and first != sorted(first)
    assert_array_equal(Mixture(windows, rows, share=0.5).batch(6, 6), batches[6])


def test_conversations_of_a_jsonl_file(tmp_path):
    """Each line is a text with its own side of the split, and is written by the chat template."""
    lines = [
        json.dumps({"messages": [{"content": chr(97 + i)}], "name": "\u2028"}, ensure_ascii=False)
        for i in range(20)
    ]
    corpus = read_corpus(
        write(tmp_path, {"talk.jsonl": "\n\n".join(lines)}), pattern="*.jsonl", held_out=0.3
    )
    assert len(corpus.train) + len(corpus.held_out) == 20
    assert "talk.jsonl:1" in corpus.train | corpus.held_out
    assert corpus.describe()["train_bytes"] == len("".join(corpus.train.values()).encode())

    def encode_chat(messages, *, complete):
        assert complete
        return [ord(messages[0]["content"]), 1]

    speaks = types.SimpleNamespace(encode=LETTERS.encode, encode_chat=encode_chat, eos_id=0)
    texts = [corpus.train.get("talk.jsonl:1") or corpus.held_out["talk.jsonl:1"], "b"]
    assert token_stream(dict(enumerate([*texts, ""])), speaks).tolist() == [0, 97, 1, 0, 98, 0, 0]
    for line, message in (
        ("{", "is no conversation"),
        ('{"messages": "a"}', "is no conversation"),
        ('{"messages": ["a"]}', "messages must be a list of objects"),
        ('{"messages": [{}], "tools": "[]"}', r"tools must be a list of objects; got '\[\]'"),
        (
            '{"messages": [{}], "functions": [{}]}',
            "functions would change the text, but is not read: write them as tools",
        ),
        ('{"messages": [{}], "chat_template_kwargs": {"a": 1}}', "is not read: leave it out"),
    ):
        with refusal(f"wrong.jsonl, line 1: .*{message}"):
            read_corpus(write(tmp_path, {"wrong.jsonl": line}), pattern="wrong.jsonl")


@extras.needs("jinja2")
def test_tools_of_a_conversation_reach_its_template(tmp_path):
    """An answer that calls a tool may have no content."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    lines = [{"messages": [answer], "tools": tools, "id": 7}, {"messages": [answer], "tools": None}]
    source = (
        "{{ tools | length if tools else 'none' }}{{ messages[0].content }}{{ "
        "messages[0].tool_calls[0].function.name }}"
    )
    template = ChatTemplate(path="here", source=source)

    def encode_chat(messages, *, complete, **variables):
        return [ord(c) for c in template.render(messages, **variables)]

    content = "\n".join(map(json.dumps, lines))
    corpus = read_corpus(write(tmp_path, {"talk.jsonl": content}), pattern="*.jsonl", held_out=0.0)
    speaks = types.SimpleNamespace(encode_chat=encode_chat, eos_id=0)
    written = "".join(map(chr, token_stream(corpus.train, speaks).tolist()))
    assert written == "\x001f\x00nonef\x00"
    template = ChatTemplate(path="here", source="{{ raise_exception('no tools') }}")
    with refusal("^talk.jsonl:1: .* no tools"):
        token_stream(corpus.train, speaks)


def test_arrays_of_integers_are_sequences(tmp_path):
    """Rows are sequences, padded rows are shorter, and a file with one axis is one sequence."""
    np.save(tmp_path / "fixed.npy", np.arange(12, dtype=np.int16).reshape(4, 3))
    np.save(tmp_path / "ragged.npy", np.array([[5, -1, -1], [7, 8, -1]], np.int16))
    np.save(tmp_path / "one.npy", np.array([9, 9, 9, 9], np.int16))
    corpus = read_corpus(tmp_path, pattern="*.npy", held_out=0.0)
    assert {name: text.tolist() for name, text in corpus.train.items()} == {
        "fixed.npy:1": [0, 1, 2],
        "fixed.npy:2": [3, 4, 5],
        "fixed.npy:3": [6, 7, 8],
        "fixed.npy:4": [9, 10, 11],
        "one.npy:1": [9, 9, 9, 9],
        "ragged.npy:1": [5],
        "ragged.npy:2": [7, 8],
    }
    tokenizer = JsonTokenizer.from_tokenizer(integer_tokenizer(13), EOS)
    ragged = {name: corpus.train[name] for name in ("ragged.npy:2", "ragged.npy:1")}
    stream = token_stream(ragged, tokenizer)
    assert stream.tolist() == [12, 7, 8, 12, 5, 12]
    assert tokenizer.vocab_size == 13
    assert (
        tokenizer.encode("5 11 0") == [5, 11, 0] == tokenizer.encode(tokenizer.decode([5, 11, 0]))
    )
    with refusal("a token of the arrays must be an integer >= 0 and below 13; got 13"):
        token_stream({"a": np.array([3, 13])}, tokenizer)
    assert read_corpus(tmp_path, pattern="*.npy", held_out=0.5).digest == corpus.digest
    np.save(tmp_path / "one.npy", np.array([9, 9, 9, 8], np.int16))
    assert read_corpus(tmp_path, pattern="*.npy").digest != corpus.digest


def arrays(array):
    np.save("a.npy", np.array([1, 2]))
    np.save("x.npy", array, allow_pickle=True)
    return read_corpus(".", pattern="*.npy")


HERE = pathlib.Path()  # an empty folder

test_refused_corpora = refused_calls(
    {
        "no folder of texts at nowhere": lambda: read_corpus("nowhere"),
        "1 undecodable, 1 held out": lambda: read_corpus(
            write(HERE, {"a.py": b"\xff", "b.py": "1"}), held_out=1.0
        ),
        r"x.npy must hold integers \[T\] or \[N, T\]; got float64 \[2\]": lambda: arrays(
            np.array([0.5, 1])
        ),
        "x.npy, row 1: tokens must be >= 0": lambda: arrays(np.array([[1, 2], [-1, 3]])),
        r"x.npy, row 0: tokens must be >= 0 and below 2\*\*31": lambda: arrays(np.array([2**40])),
        "x.npy holds no array of numbers": lambda: arrays(np.array([[1], "a"], object)),
        "x.npy holds int8, a.npy int64: write all arrays with one dtype": lambda: arrays(
            np.array([1], np.int8)
        ),
        "data.held_out must be a number from 0 to 1; got 1.5": lambda: read_corpus(
            write(HERE, {"b.py": "1"}), held_out=1.5
        ),
    }
)
